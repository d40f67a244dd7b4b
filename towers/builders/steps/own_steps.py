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
from towers.builders.pieces.reducer import AllReduce, Reducer, ReduceScatter
from towers.builders.steps.keras_steps import Scope, train_function
from towers.collectives import batch, reduce
from towers.keras_adapter import optimizers
from towers.keras_adapter.models import measuring, overrides
from towers.keras_adapter.variables import value_behind
from towers.layers import sharded, variables
from towers.partition.partitioned import (
    Copied,
    Execution,
    Observer,
    Partitioned,
    judge,
)
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
        elif step == "train_step" and self._cuts:
            # Slots are cut as they are created, which a graph cannot do.
            with tf.init_scope():
                self.pieces.creator.create_apart(data)
            # What was traced of a table that was whole refers to that.
            self._partitioned.clear()
        elif step == "train_step" and context.plan.pipeline.recompute != "none":
            # A layer is known by what it is, and so before it is called.
            x, *_ = keras.utils.unpack_x_y_sample_weight(data)
            self.pieces.creator.build_layers(x)
        # Not in an `init_scope`, where no tape records.
        with tf.device(context.plan.home):
            self._partition(step, _local_spec(data))

    @property
    def _cuts(self):
        """Whether variables, or their slots, lie in parts on several devices."""
        shards = self.pieces.copies.shards is not None
        return shards or self.pieces.context.shard_embeddings != "none"

    @property
    def _updates_apart(self):
        """Whether optimizers do more than to update each copy of the variables."""
        return self._cuts and isinstance(self.reducer, AllReduce | ReduceScatter)

    def _partition(self, step, spec):
        """Returns a step of the model, partitioned for batches of a kind."""
        if (step, str(spec)) not in self._partitioned:
            context = self.pieces.context
            copied = self._copied if step == "train_step" else lambda trace: None
            trains, pipeline = step == "train_step", context.plan.pipeline
            recomputes = trains and pipeline.recompute != "none"
            verdict = judge(
                self.function(step),
                spec,
                copied,
                loss_placement=context.loss_placement,
                updates_apart=trains and self._updates_apart,
                home=context.plan.home,
                recomputed=pipeline.parts if recomputes else None,
            )
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
        if self._execution(step).towers_by_xla:
            context.say(found.by_xla(name))
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
        if self._updates_apart:
            algorithm = reduce.algorithm_for("auto", self.pieces.context.plan.home)
            return Copied(copies.handles(), algorithm, self._update_apart)
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

    def _update_apart(self, update, parts, whole, observed):
        """Has devices update the parts that they have; see `Copied.apply`."""
        model, hosts = self.pieces.context.model, self.pieces.context.plan.hosts
        places = {id(variable): i for i, variable in enumerate(update.variables)}
        others = places.keys() - {*map(id, model.trainable_variables)}
        if update.optimizer is not model.optimizer or others:
            raise ModelError(
                f"Model '{model.name}' applies an optimizer of its own, with variables "
                "or a state in parts on several towers; expected `self.optimizer` for "
                "the model's trainable variables, or shard_optimizer_state=False and "
                "shard_embeddings='none'."
            )

        def over_hosts(sums, scatter=tuple):
            return hosts.sum(sums, "gradients"), scatter()

        trained = model.trainable_variables
        chosen = [places.get(id(v)) for v in trained]
        parts = [
            sharded.expand(trained, [None if i is None else mine[i] for i in chosen])
            for mine in parts
        ]
        adds = over_hosts if hosts.count > 1 else None
        sums = self.reducer.sum_gradients(parts, range(len(parts)), over_hosts=adds)
        known = sharded.expand(trained, [whole.get(i) for i in chosen])
        handed = self.reducer.hand_out(known)
        for i in sharded.devices(trained):
            # As `sum_gradients` has it: the first copy updates the shards of a table.
            for k, mine in enumerate(handed):
                mine[i] = sharded.norm(known[i]) if k else known[i]
        sums = [
            [b if a is None else a for a, b in zip(mine, given, strict=True)]
            for mine, given in zip(sums, handed, strict=True)
        ]
        if (shards := self.pieces.copies.shards) is not None:
            # All hosts have these.
            shards.with_gradients |= {i for i, g in enumerate(known) if g is not None}
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
            execution = self._execution(step)
            return found(plan, local_batches, size, observer, whole, execution)

    def _execution(self, step):
        context = self.pieces.context
        xla = context.xla and (step == "train_step" or context.found.compiled)
        return Execution(context.usual_rows, xla, context.compiles_update)

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
            measured = contextlib.nullcontext()
            if preprocess is not None:
                given = keras.utils.unpack_x_y_sample_weight(data)
                data = preprocess(given, step == "train_step")
                data = keras.utils.pack_x_y_sample_weight(*data)
                if not has_own_steps(model):
                    # Keras's own metrics know targets as the user gives them.
                    measured = measuring(model, *given[:2])
            with _creating_on(home), measured:
                return getattr(model, step)(data)

        return function

    def steps_done(self) -> tf.Tensor | None:
        """Returns how many steps were done, to be read as one begins.

        Optimizers take turns in it. `None` if there is no guard, or the guard asks the
        model's optimizer.
        """
        model = self.pieces.context.model
        each = variables.optimizers(model).values()
        if self.pieces.context.guard is None or not each or not has_own_steps(model):
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
        # `numerics` finds out what was wrong with Keras's own step.
        own = has_own_steps(model)
        optimizer = next(iter(scaled), None) if own else model.optimizer

        def gradients(of_towers, sums, packed=()):
            if guard is None:
                return contextlib.nullcontext()
            given = keras.utils.unpack_x_y_sample_weight(data)
            whole = functools.partial(self.pieces.batches.whole, given)
            return guard.before(
                *(whole, tf.zeros([]), [sums]),
                *(optimizer, packed),
                of_towers=of_towers if own else (),
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
