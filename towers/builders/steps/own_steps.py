"""Steps that a model defines itself, such as its own `train_step`, on towers."""

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.analysis import effects
from towers.builders import checks
from towers.builders.common import Pieces
from towers.builders.pieces.reducer import AllReduce, Reducer
from towers.builders.steps.keras_steps import Scope, train_function
from towers.collectives import batch, reduce
from towers.keras_adapter import optimizers
from towers.keras_adapter.models import overrides
from towers.keras_adapter.variables import value_behind
from towers.layers import sharded, variables
from towers.partition.partitioned import Copied, Observer, Partitioned, judge
from towers.partition.placement.copies import together
from towers.tower.errors import ModelError
from towers.tower.run import refuse_stateful

_STEPS = "train_step", "test_step", "predict_step"


def has_own_steps(model: keras.Model) -> bool:
    """Tells whether a model defines a step itself."""
    return any(overrides(model, step) for step in _STEPS)


def is_cut(model: keras.Model) -> bool:
    """Tells whether a model's steps are traced as on one device, and cut.

    Those that a model defines itself are. TOWERS_ENGINE=cut has Keras's own cut, too.
    """
    return has_own_steps(model) or os.environ.get("TOWERS_ENGINE") == "cut"


@dataclasses.dataclass
class OwnSteps:
    """The steps of a model that defines one of them itself, as one device has them.

    Attributes:
        pieces: What all ways to update variables have in common.
        reducer: How gradients are added.
    """

    pieces: Pieces
    reducer: Reducer

    def __post_init__(self):
        self._partitioned: dict[Any, Partitioned] = {}
        self._created: set[str] = set()

    def train_step(
        self, data: Any, local_batches: Sequence[Any] | None = None
    ) -> dict[str, tf.Tensor]:
        """Trains on one global batch; see `TrainStep.train_step`."""
        return self._run("train_step", data, local_batches)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Evaluates one global batch; returns the logs of the model's own step."""
        return self._run("test_step", data)

    def predict_step(self, data: Any) -> Any:
        """Computes the outputs of one global batch: a nest of tensors."""
        return self._run("predict_step", data)

    def train_function(self, scope: Scope) -> Callable[[Any], dict[str, tf.Tensor]]:
        """Makes the function that Keras's `fit` calls; see `train_function`."""
        return train_function(
            self.pieces, self.train_step, scope, self.create_variables
        )

    def create_variables(self, data: Any) -> None:
        """Has a step create what it creates late; `data` is a batch, or its specs."""
        self._create("train_step", data)

    def _create(self, step, data):
        """Traces a step for the variables that it creates, and keeps what it traced."""
        context = self.pieces.context
        if step in self._created or context.model.run_eagerly:
            return
        self._created.add(step)
        refuse_stateful(context.model)
        if step == "train_step" and not overrides(context.model, step):
            # What Keras's step creates is known, and need not be traced for.
            self.pieces.creator.create_variables(data)
        elif step == "train_step" and self.pieces.copies.shards is not None:
            # Slots are cut as they are created, which a graph cannot do.
            with tf.init_scope():
                x, *_ = keras.utils.unpack_x_y_sample_weight(data)
                self.pieces.creator.build_layers(x)
                self.pieces.creator.build_optimizer()
                self.pieces.copies.create()
        # Not in an `init_scope`, where no tape records.
        with tf.device(context.plan.home):
            self._partition(step, _local_spec(data))

    def _partition(self, step, spec):
        """Returns a step of the model, partitioned for batches of a kind."""
        if (step, str(spec)) not in self._partitioned:
            context = self.pieces.context
            copied = self._copied if step == "train_step" else lambda trace: None
            placement = context.loss_placement
            apart = step == "train_step" and self.pieces.copies.shards is not None
            verdict = judge(self.function(step), spec, copied, placement, apart)
            found = Partitioned(verdict)
            if step == "train_step" and context.strict:
                # Its variables are there now, if the step has built it.
                checks.check_variables(context.model)
            self._partitioned[step, str(spec)] = found
            self.say(step, found, found.lines)
        return self._partitioned[step, str(spec)]

    def say(
        self, step: str, found: Partitioned, lines: Callable[[str], Sequence[str]]
    ) -> None:
        """Says what a step does otherwise than it would on one device.

        Args:
            step: Its name.
            found: What became of it.
            lines: Returns what to say of that, for a name.
        """
        context = self.pieces.context
        name = f"The {step} of model '{context.model.name}'"
        context.say(lines(name))
        if context.xla:
            context.say([f"{name} runs without XLA, unlike Keras's own step."])
        if context.guard is not None and found.trace.reads_gradients:
            context.say([f"{name} has gradients that check_numerics does not see."])
        if step == "train_step" and (unsaved := self._unsaved(found.trace)):
            context.say(
                [
                    f"{name} changes {', '.join(unsaved)}, which no attribute of the "
                    "model or of its layers holds, so that checkpoints do not contain "
                    "it; make it an attribute."
                ]
            )

    def _unsaved(self, trace):
        """The names of variables that a step changes, and nobody saves."""
        model = self.pieces.context.model
        saved = {
            id(place.handle)
            for each in variables.of(model)
            for place in sharded.places(each)
        }
        saved |= {id(each.handle) for each in variables.plain(model).values()}
        changed = effects.changed(trace.graph)
        known = {id(each.handle): each.name for each in trace.concrete.variables}
        return sorted(known[each] for each in changed & known.keys() - saved)

    def _copied(self, trace):
        """What each tower has a copy of: what optimizers update, and their state."""
        copies, model = self.pieces.copies, self.pieces.context.model
        if copies.shards is not None:
            algorithm = reduce.algorithm_for("auto", self.pieces.context.plan.home)
            return Copied(copies.handles(), algorithm, self._update_shards)
        if not isinstance(self.reducer, AllReduce):
            return None
        # Also for a single tower: other hosts have more, and the same phases.
        wanted = [*model.trainable_variables]
        for optimizer in variables.optimizers(model).values():
            wanted += optimizers.all_variables(optimizer)
            for leaf in optimizers.updating(optimizer):
                wanted += optimizers.known_variables(leaf)
        known = {id(value_behind(each).handle): each for each in variables.of(model)}
        found = {id(value_behind(each).handle) for each in wanted}
        found = together(trace.graph, found, known.keys())
        copies.add([*wanted, *(known[each] for each in found & known.keys())])
        return Copied(copies.handles(), self.reducer.algorithm)

    def _update_shards(self, update, parts, whole, observed):
        """Has each tower update the part that it owns; see `Copied.apply`."""
        model, hosts = self.pieces.context.model, self.pieces.context.plan.hosts
        places = {id(variable): i for i, variable in enumerate(update.variables)}
        others = places.keys() - {*map(id, model.trainable_variables)}
        if update.optimizer is not model.optimizer or others:
            raise ModelError(
                f"Model '{model.name}' applies an optimizer of its own, of which "
                "shard_optimizer_state=True cannot divide the state; expected "
                "`self.optimizer` for the model's trainable variables, or False."
            )

        def over_hosts(sums, scatter=tuple):
            return hosts.sum(sums, "gradients"), scatter()

        chosen = [places.get(id(v)) for v in model.trainable_variables]
        parts = [[None if i is None else mine[i] for i in chosen] for mine in parts]
        adds = over_hosts if hosts.count > 1 else None
        sums = self.reducer.sum_gradients(parts, range(len(parts)), over_hosts=adds)
        known = [whole.get(i) for i in chosen]
        sums = [
            [b if a is None else a for a, b in zip(mine, given, strict=True)]
            for mine, given in zip(sums, self.reducer.hand_out(known), strict=True)
        ]
        # All hosts have these.
        given = {i for i, each in enumerate(known) if each is not None}
        self.pieces.copies.shards.with_gradients |= given
        together = itertools.chain(*self.reducer.together(sums))
        with observed([gradient for gradient in together if gradient is not None]):
            self.pieces.updater.update_weights(sums)

    def _run(self, step, data, local_batches=None):
        context, plan = self.pieces.context, self.pieces.context.plan
        model = context.model
        batch.check_rows(data)
        self._create(step, data)
        if model.run_eagerly:
            self._check_alone(f"runs its own {step} eagerly")
            line = (
                f"Model '{model.name}' runs its own {step} eagerly, so one device "
                "computes all of each batch; towers are for graphs."
            )
            context.say([line])
            with tf.device(plan.home):
                return self.function(step)(data)
        data = tf.nest.map_structure(batch.as_tensor, data)
        found = self._partition(step, _local_spec(data))
        if local_batches is None:
            local_batches = self.pieces.batches.place(data)
        for line in found.stateful_draws:
            self._check_alone(f"draws random numbers of TensorFlow's own state{line}")
        observer = None
        if step == "train_step":
            observer = self.observer(data, self.steps_done())
        with self._together(step, data):
            if found.copied is not None:
                self.pieces.copies.follow_learning_rates()
            whole = data if batch.part_of(data) is None else None
            size = batch.batch_size(data)
            return found(plan, local_batches, size, observer, whole)

    def _check_alone(self, what):
        if self.pieces.context.plan.hosts.count > 1:
            raise ModelError(
                f"Model '{self.pieces.context.model.name}' {what}, which differs "
                "between hosts; expected a step that runs as a graph, and draws by "
                "keras.random with a seed generator."
            )

    @contextlib.contextmanager
    def _together(self, step, data):
        """Inside, all hosts compute the same batch, if there are several."""
        context = self.pieces.context
        agreement, hosts = context.agreement, context.timers.hosts
        if agreement is None:
            yield
        elif step != "train_step":
            with agreement.evaluates(data):
                yield
        else:
            told = agreement.of_batch(data, hosts)
            (told,) = context.plan.hosts.sum([told], "batch")
            with agreement.before(told):
                agreement.hear(told, hosts)
                yield

    def function(self, step: str) -> Callable[[Any], Any]:
        """Returns a step of the model, of a batch as it is given."""
        model, preprocess = self.pieces.context.model, self.pieces.context.preprocess
        home = self.pieces.context.plan.home

        def function(data):
            if preprocess is not None:
                data = keras.utils.unpack_x_y_sample_weight(data)
                data = preprocess(data, step == "train_step")
                data = keras.utils.pack_x_y_sample_weight(*data)
            with _creating_on(home):
                return getattr(model, step)(data)

        return function

    def steps_done(self) -> tf.Tensor | None:
        """Returns how many steps were done, to be read as one begins.

        Optimizers take turns in it. `None` if nobody wants to know.
        """
        each = variables.optimizers(self.pieces.context.model).values()
        if self.pieces.context.guard is None or not each:
            return None
        counts = [tf.cast(tf.identity(one.iterations), tf.int64) for one in each]
        return tf.reduce_max(counts)

    def observer(self, data: Any, done: tf.Tensor | None) -> Observer:
        """Makes what measures a step, and stops it if a gradient is not finite.

        Args:
            data: The batch.
            done: What `steps_done` has returned.
        """
        context = self.pieces.context
        guard, model = context.guard, context.model
        of_model = [*variables.optimizers(model).values()]
        scaled = [
            each
            for each in of_model
            if isinstance(each, keras.optimizers.LossScaleOptimizer)
        ]

        def gradients(of_towers, sums):
            if guard is None:
                return contextlib.nullcontext()
            given = keras.utils.unpack_x_y_sample_weight(data)
            whole = functools.partial(self.pieces.batches.whole, given)
            return guard.before(
                *(whole, tf.zeros([]), [*of_towers, sums]),
                next(iter(scaled), None),
                to_blame=len(of_towers),
                done=done,
            )

        return Observer(context.timers.computed, gradients)


@contextlib.contextmanager
def _creating_on(device):
    """Inside, variables are created on a device, such as slots of an optimizer."""

    def create(creator, **given):
        with tf.device(device):
            return creator(**given)

    with contextlib.ExitStack() as stack:
        # Keras leaves the graph for it.
        with tf.init_scope():
            stack.enter_context(tf.variable_creator_scope(create))
        yield


def _local_spec(data):
    return batch.local_spec(batch.specs(batch.rows_given(data)), None)
