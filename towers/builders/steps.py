"""The steps of a model on towers: Keras's, or those that it defines itself."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.analysis import effects
from towers.builders import checks
from towers.builders.common import Pieces
from towers.builders.creator import sized
from towers.builders.pieces.reducer import AllReduce, Reducer, ReduceScatter
from towers.builders.train_function import Scope, train_function
from towers.cluster import process_group
from towers.collectives import batch, reduce
from towers.collectives.spread import tables as spread_tables
from towers.keras_adapter import optimizers
from towers.keras_adapter.layers import layers_of
from towers.keras_adapter.models import COMPUTE_LOSS, measuring, overrides
from towers.keras_adapter.patching import patched
from towers.keras_adapter.variables import value_behind
from towers.layers import sharded, tables, variables
from towers.partition.combined import REDUCE_SCOPE
from towers.partition.partitioned import (
    Copied,
    Execution,
    Observer,
    Partitioned,
    judge,
)
from towers.partition.placement.copies import together
from towers.stages import table
from towers.tower.errors import ModelError, explained_trace

# Above it, the start gets too long if towers are copied into the step's graph: with a
# ResNet-50 and 8 towers by a third, for steps that are 2% faster.
_MANY_LAYERS = 100
_STEPS = "train_step", "test_step", "predict_step"


def words_of_draws(places: Sequence[str]) -> str:
    """Says of a step that it draws random numbers without a seed, at some places."""
    return (
        f"draws random numbers without a seed{','.join(places)}, so that no run can "
        "repeat them; expected those of keras.random, with a keras.random.SeedGenerator"
    )


def has_own_steps(model: keras.Model) -> bool:
    """Tells whether a model defines a step itself."""
    return any(overrides(model, step) for step in _STEPS)


@dataclasses.dataclass
class Steps:
    """The steps of a model, each traced as on one device, and cut.

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
        """Trains on one global batch; see `Builder`."""
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
        if step in self._created:
            return
        if context.model.run_eagerly:
            flat = tf.nest.flatten(data)
            if any(isinstance(t, tf.TypeSpec) for t in flat):
                self.pieces.creator.build_all(data)
            return
        checks.refuse_stateful(context.model)
        if step == "train_step":
            self._create_for_training(data)
        elif self._cuts or self._has_stages:
            # What is traced here reads variables where they stay.
            with tf.init_scope():
                self.pieces.creator.build_apart(data, trains=False)
                variables.move(context.model, self.pieces.copies.home_of)
        # Not in an `init_scope`, where no tape records.
        with tf.device(context.plan.home):
            found = self._partition(step, _local_spec(data))
        if step == "train_step":
            with tf.init_scope():
                self._describe_stages(found, data)
        # Only now, as a second try has to do what a first one could not.
        self._created.add(step)

    def _create_for_training(self, data):
        """Creates what has to be there before a step of training is traced."""
        context, creator = self.pieces.context, self.pieces.creator
        if not overrides(context.model, "train_step"):
            # What Keras's step creates is known, and need not be traced for.
            creator.build_all(data)
        elif self._cuts or self._has_stages:
            # They are placed as they are created, which a graph cannot do.
            with tf.init_scope():
                creator.build_apart(data)
            # What was traced of a table that was whole refers to that.
            self._partitioned.clear()
        else:
            if context.plan.pipeline.recompute != "none":
                # A layer is known by what it is, and so before it is called.
                x, *_ = keras.utils.unpack_x_y_sample_weight(data)
                creator.build_layers(x)
            return
        divided = creator.divide_layers(functools.partial(self._tower_alone, data))
        with tf.init_scope():
            creator.place(data, divided)

    def _tower_alone(self, data, pipeline):
        """What a tower computes of a micro-batch of known size, cut into stages."""
        verdict = judge(
            self._reading_stand_ins(self.function("train_step")),
            sized(data, None),
            updates_apart=True,
            home=self.pieces.context.plan.home,
            pipeline=pipeline,
            divided=self._divided,
        )
        return Partitioned(verdict).staged(self.pieces.creator.usual_rows(data))

    def _describe_stages(self, found, data):
        """Says which layers are on which stage, and what memory they take."""
        context, pipeline = self.pieces.context, self.pieces.context.plan.pipeline
        first, *_ = tf.nest.flatten(batch.specs(data))
        placement, known = pipeline.placement, context.usual_rows or first.shape[0]
        if pipeline.stages == 1 or placement.kept is not None or not known:
            return
        rows = self.pieces.creator.usual_rows(data)
        kept = table.activation_bytes(found.staged(rows), pipeline, rows)
        placement.kept = kept
        context.say(table.lines(pipeline, kept, rows))

    @property
    def _cuts(self):
        """Whether variables, or their slots, lie in parts on several devices."""
        shards = self.pieces.copies.shards is not None
        return shards or self.pieces.context.shard_embeddings != "none"

    @property
    def _has_stages(self):
        """Whether the devices of a tower share the model's layers."""
        return self.pieces.context.plan.pipeline.stages > 1

    @property
    def _updates_apart(self):
        """Whether optimizers do more than to update each copy of the variables."""
        each_tower = isinstance(self.reducer, AllReduce | ReduceScatter)
        apart = self._cuts and (each_tower or bool(self._divided))
        return self._has_stages or apart

    @property
    def _divided(self):
        """The tables that hosts divide, by the `id` of the handles of stand-ins."""
        found = spread_tables.of(self.pieces.context.model.variables).values()
        return {id(table.stand_in.handle): table for table in found}

    def _partition(self, step, spec):
        """Returns a step of the model, partitioned for batches of a kind."""
        if (step, str(spec)) not in self._partitioned:
            context = self.pieces.context
            copied = self._copied if step == "train_step" else lambda trace: None
            trains, pipeline = step == "train_step", context.plan.pipeline
            if not trains:
                # Nothing is kept for a gradient.
                pipeline = dataclasses.replace(pipeline, recompute="none")
            with explained_trace(context.model):
                verdict = judge(
                    self._reading_stand_ins(self.function(step)),
                    spec,
                    copied,
                    loss_placement=context.loss_placement,
                    updates_apart=trains and self._updates_apart,
                    home=context.plan.home,
                    pipeline=pipeline,
                    divided=self._divided,
                )
            found = Partitioned(verdict, self._towers_stay)
            if step == "train_step" and context.strict:
                # Its variables are there now, if the step has built it.
                checks.check_variables(context.model)
            self._partitioned[step, str(spec)] = found
            if trains:
                self.note(found)
            self.say(step, found, found.lines)
        return self._partitioned[step, str(spec)]

    def note(self, partitioned: Partitioned) -> None:
        """Notes what was found out about a step of training."""
        gathered = partitioned.placement.gathered
        found = self.pieces.context.found
        found.loss_placed = "gathered" if gathered else "tower"
        found.unseeded = self._unseeded(partitioned)

    def _reading_stand_ins(self, function):
        """A function in which tables that hosts divide are what stands in for them."""

        def reading(data):
            with spread_tables.standing_in(self.pieces.context.model.variables):
                return function(data)

        return reading

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
        execution = self._execution(step)
        if execution.towers_by_xla:
            context.say(found.by_xla(name))
        if execution.updates_by_xla:
            context.say(found.updated(f"the {step} of model '{context.model.name}'"))
        if context.guard is not None and found.trace.reads_gradients:
            context.say([f"{name} has gradients that check_numerics does not see."])
        if unseeded := self._unseeded(found):
            context.say([f"{name} {words_of_draws(unseeded)}."])
        pipeline = context.plan.pipeline
        if pipeline.stages > 1 and found.trace.labels.enclosed:
            line = (
                f"Model '{context.model.name}' calls "
                f"{', '.join(found.trace.labels.enclosed)} in a branch or a loop, of "
                "which all is computed on one stage."
            )
            context.say([line])
        if step == "train_step" and (unsaved := self._unsaved(found.trace)):
            context.say(
                [
                    f"{name} changes {', '.join(unsaved)}, which no attribute of the "
                    "model or of its layers holds, so that checkpoints do not contain "
                    "it; make it an attribute."
                ]
            )

    def _unseeded(self, found):
        """Where a step draws random numbers of a state that is not the model's."""
        if self.pieces.context.preprocess is not None:
            # It may draw by `tf.random`.
            return []
        unsaved = self._unsaved(found.trace)
        of_keras = [f" by {name}" for name in unsaved if "seed_generator" in name]
        return [*found.stateful_draws, *of_keras]

    def _unsaved(self, trace):
        """The names of variables that a step changes, and nobody saves."""
        model = self.pieces.context.model
        saved = {id(place.handle) for place in _places(variables.of(model))}
        saved |= {id(each.handle) for each in variables.plain(model).values()}
        changed = effects.changed(trace.graph)
        known = {id(each.handle): each.name for each in trace.concrete.variables}
        saved |= self._divided.keys()
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
                "or a state in parts on several devices; expected `self.optimizer` for "
                "the model's trainable variables, or shard_optimizer_state=False, "
                "shard_embeddings='none', stages=1."
            )

        def over_hosts(sums, scatter=tuple):
            dense = [each for each in sums if isinstance(each, tf.Tensor)]

            def add():
                total = hosts.sum(sums, "gradients", dense)
                return (total, scatter()), total

            found, _ = self.pieces.context.timers.over_hosts(add, sums)
            return found

        trained = model.trainable_variables
        chosen = [places.get(id(v)) for v in trained]
        parts = [
            sharded.expand(trained, [None if i is None else mine[i] for i in chosen])
            for mine in parts
        ]
        adds = over_hosts if hosts.count > 1 else None
        plan = self.pieces.context.plan
        towers = range(0, len(plan.towers), plan.pipeline.micro_batches)
        with tf.name_scope(REDUCE_SCOPE):
            sums = self.reducer.sum_gradients(parts, towers, over_hosts=adds)
        known = []
        for variable, i in zip(trained, chosen, strict=True):
            total = whole.get(i)
            if spread_tables.of([variable]) and total is not None:
                known += sharded.of(variable).parts_of(total)
            else:
                known += sharded.expand([variable], [total])
        handed = self.reducer.hand_out(known)
        cuts = sharded.devices(trained)
        for i in cuts:
            # As `sum_gradients` has it: the first copy updates the shards of a table.
            for k, mine in enumerate(handed):
                mine[i] = sharded.norm(known[i]) if k else known[i]
        sums = [
            [b if a is None else a for a, b in zip(mine, given, strict=True)]
            for mine, given in zip(sums, handed, strict=True)
        ]
        if (shards := self.pieces.copies.shards) is not None:
            # All hosts have these; what is cut stays where it is.
            given = {i for i, g in enumerate(known) if g is not None}
            shards.with_gradients |= given - cuts.keys()
        together = itertools.chain(*self.reducer.together(sums))
        with observed([gradient for gradient in together if gradient is not None]):
            self.pieces.updater.update_weights(sums)

    def _run(self, step, data, local_batches=None):
        context, plan = self.pieces.context, self.pieces.context.plan
        model = context.model
        batch.check_rows(data)
        self._create(step, data)
        if model.run_eagerly:
            logs = self._run_eagerly(step, data)
            if step == "train_step":
                context.timers.computed([tf.nest.flatten(logs)])
            return logs
        data = tf.nest.map_structure(batch.as_tensor, data)
        data = context.begin(step.removesuffix("_step"), data)
        found = self._partition(step, _local_spec(data))
        if local_batches is None:
            local_batches = self.pieces.batches.place(data)
        if plan.hosts.count > 1 and (draws := found.stateful_draws):
            raise ModelError(
                f"Model '{model.name}' draws random numbers of TensorFlow's own state"
                f"{draws[0]}, which differs between hosts; expected a step that draws "
                "by keras.random with a seed generator, or run_eagerly=True."
            )
        observer = None
        if step == "train_step":
            observer = self.observer(data, self.steps_done(), self._state(found.trace))
        with self._together(step, data):
            if found.copied is not None:
                self.pieces.copies.follow_learning_rates()
            whole = data if batch.part_of(data) is None else None
            size = batch.batch_size(data)
            execution = self._execution(step)
            return found(plan, local_batches, size, observer, whole, execution)

    @property
    def _towers_stay(self):
        """Whether what towers compute stays a function in the step's graph."""
        model, hosts = self.pieces.context.model, self.pieces.context.plan.hosts
        size = sum(math.prod(each.shape) * 4 for each in model.trainable_variables)
        # The results of a function come all at once, no gradient before the last.
        return len(layers_of(model)) > _MANY_LAYERS and not hosts.overlaps(size)

    def _run_eagerly(self, step, data):
        """Has one device of each host compute a whole batch, in plain Python."""
        context, plan = self.pieces.context, self.pieces.context.plan
        model, hosts = context.model, plan.hosts
        line = (
            f"Model '{model.name}' runs its {step} eagerly, so one device computes "
            "all of each batch; towers are for graphs."
        )
        if hosts.count > 1:
            line += (
                f" Each of {hosts.count} hosts does so, and has the first's numbers."
            )
        context.say([line])
        # A tape knows whole variables only, as graphs before may have left none.
        tables.bring_home(model, self.pieces.copies.home_of)
        with self._together(step, data):
            if batch.part_of(data) is not None:
                rows, size = batch.rows_given(data), batch.batch_size(data)
                data = plan.gather(rows, size, "batch")
            with tf.device(plan.home):
                found = self.eagerly(step, data)
        if hosts.count > 1:
            # What others have drawn, or rounded, may differ.
            self.pieces.copies.follow_first_host()
            found = _of_first_host(hosts, found)
        return found

    def eagerly(self, step: str, data: Any) -> Any:
        """Computes a step of the model op by op, on the device of the scope."""
        if step != "train_step" or self.pieces.context.guard is None:
            return self.function(step)(data)
        model = self.pieces.context.model
        observer = self.observer(data, self.steps_done(), self._state())
        losses = []

        def compute_loss(original, called, *args, **kwargs):
            loss = original(called, *args, **kwargs)
            losses.extend([loss] if called is model else ())
            return loss

        def apply(original, optimizer, grads, trainable_variables=None):
            observed = contextlib.nullcontext()
            # Others may be within it.
            if optimizer in variables.optimizers(model, only_built=False).values():
                given = [*grads]
                observed = observer.gradients([given], given, targets=lambda: losses)
            with observed:
                return original(optimizer, grads, trainable_variables)

        with contextlib.ExitStack() as stack:
            stack.enter_context(patched(COMPUTE_LOSS, compute_loss))
            for each in optimizers.APPLY:
                stack.enter_context(patched(each, apply))
            return self.function(step)(data)

    def _state(self, trace=None):
        """What a step of Keras's changes before the optimizer: variables, and values.

        Without a trace, that is all that it might change. There is nothing to know if
        nothing stops the step.
        """
        context = self.pieces.context
        if context.guard is None or has_own_steps(context.model):
            return []
        model = context.model
        every = {id(place.handle): place for place in _places(variables.of(model))}
        if trace is not None:
            every = {
                each: every[each]
                for each in effects.changed(trace.graph) & every.keys()
            }
        applied = [*model.trainable_variables]
        for optimizer in variables.optimizers(model).values():
            applied += optimizers.all_variables(optimizer)
        applied = {id(place.handle) for place in _places(applied)}
        state = []
        for each, variable in every.items():
            if each not in applied:
                with tf.device(variable.device):
                    state.append((variable, tf.identity(variable)))
        return state

    def _execution(self, step):
        context = self.pieces.context
        xla = context.xla and (step == "train_step" or context.found.compiled)
        return Execution(
            *(context.usual_rows, xla, context.compiles_update),
            is_elastic=process_group.member() is not None,
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
                with tf.name_scope("preprocess"):
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

    def observer(
        self,
        data: Any,
        done: tf.Tensor | None,
        state: Sequence[tuple[tf.Variable, tf.Tensor]] = (),
    ) -> Observer:
        """Makes what measures a step, and stops it if a gradient is not finite.

        Args:
            data: The batch.
            done: What `steps_done` has returned.
            state: What to give back if the step is stopped; see `Guard.before`.
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

        def gradients(of_towers, sums, packed=(), targets=list):
            if guard is None:
                return contextlib.nullcontext()
            losses = [] if own else targets()
            sums_of = [tf.reduce_sum(tf.cast(each, tf.float32)) for each in losses]
            loss = tf.add_n([tf.zeros([]), *sums_of])
            given = keras.utils.unpack_x_y_sample_weight(data)
            whole = functools.partial(self.pieces.batches.whole, given)
            return guard.before(
                *(whole, loss, [sums]),
                *(optimizer, packed),
                of_towers=of_towers if own else (),
                done=done,
                state=state,
            )

        timers = context.timers
        return Observer(
            *(timers.computed, gradients),
            *(timers.tower_in_stages, timers.received, timers.over_hosts),
        )


def _of_first_host(hosts, values):
    """What the first host has of a nest of values; strings are each host's own."""
    flat = tf.nest.flatten(values, expand_composites=True)
    flat = [None if each is None else tf.convert_to_tensor(each) for each in flat]
    kept = {i for i, each in enumerate(flat) if each is None or each.dtype == tf.string}
    told = [each for i, each in enumerate(flat) if i not in kept]
    found = iter(hosts.first(told, "what a step returns"))
    flat = [each if i in kept else next(found) for i, each in enumerate(flat)]
    return tf.nest.pack_sequence_as(values, flat, expand_composites=True)


def _places(every):
    """What stands behind variables; of those that are cut, each shard."""
    return [place for variable in every for place in sharded.places(variable)]


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
