"""The steps of a model on towers: Keras's own, or steps that the model defines."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.analysis import effects
from towers.builders.context import Context, sized
from towers.builders.guard import guarded_step, state_before, steps_before
from towers.builders.pieces import Pieces
from towers.collectives import batch
from towers.collectives.world import World
from towers.keras_adapter import optimizers
from towers.keras_adapter.layers import layers_of
from towers.keras_adapter.models import COMPUTE_LOSS, overrides
from towers.keras_adapter.patching import patched
from towers.layers import sharded, tables, variables
from towers.partition import trace
from towers.partition.call import Gradients
from towers.partition.partitioned import NOT_SHARED, Partitioned, judge
from towers.program.features import feature
from towers.tower.errors import ModelError, explained_trace

# A larger model would take too long to start if towers were copied into the step's
# graph: a ResNet-50 on 8 towers takes a third longer, for steps that are 2% faster.
_MANY_LAYERS = 100


@dataclasses.dataclass
class Steps:
    """The steps of a model, each traced as on one device, and partitioned.

    Attributes:
        pieces: Cut and place batches, and create variables; their store says where
            variables live.
    """

    pieces: Pieces

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

    def _run(self, step, data, local_batches=None):
        """Runs a step of the model on a global batch, and returns its results.

        Traces and partitions the step for the first batch of a kind. Each batch is
        placed on the towers, where `PartitionedCall` runs the phases.
        """
        context, plan = self.pieces.context, self.pieces.context.plan
        model = context.model
        batch.check_rows(data)
        self._create(step, data)
        if model.run_eagerly:
            logs = run_eagerly(self.pieces, step, data)
            if step == "train_step":
                context.timers.computed([tf.nest.flatten(logs)])
            return logs
        data = tf.nest.map_structure(batch.as_tensor, data)
        data = context.begin(step.removesuffix("_step"), data)
        partitioned = self._partition(step, context.local_spec(data))
        if plan.hosts.count > 1:
            refuse_draws(model, partitioned.draws_of_host)
        if local_batches is None:
            local_batches = self.pieces.batches.place(data)
        timers = guard = None
        if step == "train_step":
            timers = context.timers
            guard = guarded_step(
                context.guard,
                model,
                functools.partial(self.pieces.batches.whole, data),
                steps_before(context.guard, model),
                state_before(context.guard, model, partitioned.trace),
            )
        with context.agreeing_on(step, data):
            if partitioned.copied is not None:
                self.pieces.store.follow_learning_rates()
            whole_batch = data if batch.part_of(data) is None else None
            if (examples := self._looked_up(local_batches)) is not None:
                local_batches, whole_batch = examples, None
            size = batch.batch_size(data)
            execution = context.execution(step)
            return partitioned(
                plan, local_batches, size, whole_batch, execution, timers, guard
            )

    def _looked_up(self, local_batches):
        """Looks up the towers' rows of examples that stay on their devices, if any."""
        preprocess = self.pieces.context.preprocess
        devices = self.pieces.context.plan.devices
        if preprocess is None:
            return None
        examples = [*map(preprocess.looked_up, local_batches, devices)]
        return None if None in examples else examples

    def create_variables(self, data: Any) -> None:
        """Traces the step to create its variables; `data` is a batch or its specs."""
        self._create("train_step", data)

    def _create(self, step, data):
        """Traces a step to create its variables, and keeps the trace."""
        context = self.pieces.context
        if step in self._created:
            return
        if context.model.run_eagerly:
            flat = tf.nest.flatten(data)
            if any(isinstance(t, tf.TypeSpec) for t in flat):
                self.pieces.creator.build_all(data)
            return
        refuse_stateful(context.model)
        if step == "train_step":
            self._create_for_training(data)
        elif self._places_first:
            # The trace reads variables on their final devices.
            with tf.init_scope():
                self.pieces.creator.build_apart(data, trains=False)
                variables.move(context.model, context.plan.home_of)
        # Gradient tapes record nothing within an `init_scope`.
        with tf.device(context.plan.home):
            partitioned = self._partition(step, context.local_spec(data))
        if step == "train_step":
            with tf.init_scope():
                describe_stages(self.pieces, partitioned, data)
        # Set at the end: after an exception, a second call has to try again.
        self._created.add(step)

    def _create_for_training(self, data):
        """Creates the variables that have to exist before a training step is traced."""
        context, creator = self.pieces.context, self.pieces.creator
        if not overrides(context.model, "train_step"):
            # The variables of Keras's step are known without a trace.
            creator.build_all(data)
        elif self._places_first:
            # Variables are placed as they are created, which a graph cannot do.
            with tf.init_scope():
                creator.build_apart(data)
            # Earlier traces refer to tables that were whole then.
            self._partitioned.clear()
        else:
            if context.plan.pipeline.recompute != "none":
                # Traces recognize a layer that exists before it is called.
                x, *_ = keras.utils.unpack_x_y_sample_weight(data)
                creator.build_layers(x)
            return
        divided = creator.divide_layers(functools.partial(self._stages_of_tower, data))
        with tf.init_scope():
            self.pieces.store.settle(data, divided)

    def _stages_of_tower(self, data, pipeline):
        """Cuts a tower's computation of a micro-batch of known size into stages."""
        context = self.pieces.context
        verdict = judge(
            self._reading_stand_ins(context.step_function("train_step")),
            sized(context.local_spec(data), None),
            updates_apart=self.pieces.store,
            home=context.plan.home,
            pipeline=pipeline,
            stand_ins=self.pieces.store.stand_ins(),
        )
        return Partitioned(verdict).staged(context.micro_batch_rows(data))

    @property
    def _places_first(self):
        """Whether variables are moved to their devices before a step is traced."""
        several = self.pieces.context.plan.pipeline.stages > 1
        return several or self.pieces.store.divides

    def _partition(self, step, spec):
        """Returns a step of the model, partitioned for batches like `spec`."""
        if (step, str(spec)) not in self._partitioned:
            context = self.pieces.context
            trains, pipeline = step == "train_step", context.plan.pipeline
            store = self.pieces.store
            if not trains:
                # Evaluation keeps no activations for gradients.
                pipeline = dataclasses.replace(pipeline, recompute="none")
            with explained_trace(context.model):
                verdict = judge(
                    self._reading_stand_ins(context.step_function(step)),
                    spec,
                    store.copied if trains else lambda trace: None,
                    loss_placement=context.loss_placement,
                    updates_apart=store if trains and store.updates_apart else None,
                    home=context.plan.home,
                    pipeline=pipeline,
                    stand_ins=store.stand_ins(),
                )
            if verdict.placement.assigned:
                self._keep_whole(step, verdict.placement.assigned)
                return self._partition(step, spec)
            partitioned = Partitioned(verdict, self._towers_stay)
            if step == "train_step" and context.strict:
                # A step that builds the model has created its variables by now.
                check_variables(context.model)
            self._partitioned[step, str(spec)] = partitioned
            lines = partitioned.lines(step_name(context, step))
            self.report(step, partitioned, lines)
        return self._partitioned[step, str(spec)]

    def _keep_whole(self, step, assigned):
        """Moves parameters that a step assigns itself to home, as whole variables."""
        context, model = self.pieces.context, self.pieces.context.model
        chosen = [v for v in model.trainable_variables if sharded.of(v) in assigned]
        self.pieces.store.keep_whole(chosen)
        # Earlier traces refer to the parts.
        self._partitioned.clear()
        names = ", ".join(variable.path for variable in chosen)
        line = (
            f"{step_name(context, step)} assigns {names} beside the optimizer, so that "
            f"they stay whole on {context.plan.home}."
        )
        context.say([line])

    def report(self, step: str, partitioned: Partitioned, lines: Sequence[str]) -> None:
        """Notes, and prints, how a step on towers differs from one on one device.

        Args:
            step: Name of the step.
            partitioned: The partitioned step.
            lines: Lines to print first.
        """
        context = self.pieces.context
        stand_ins = self.pieces.store.stand_ins()
        report = StepReport(context, step, partitioned, stand_ins)
        if step == "train_step":
            report.note()
        report.say(lines)

    def _reading_stand_ins(self, function):
        """Wraps a function so that it reads stand-ins for variables in parts."""

        def reading(data):
            with sharded.standing_in(self.pieces.context.model.variables):
                return function(data)

        return reading

    @property
    def _towers_stay(self):
        """Whether the towers' computation stays a function in the step's graph."""
        model, hosts = self.pieces.context.model, self.pieces.context.plan.hosts
        size = sum(math.prod(v.shape) * 4 for v in model.trainable_variables)
        # A function returns all results at once: no gradient before the last one.
        return len(layers_of(model)) > _MANY_LAYERS and not hosts.overlaps(size)


def is_synchronized(model: keras.Model) -> bool:
    """Returns whether a layer normalizes over all rows of a global batch."""
    return any(getattr(layer, "synchronized", False) for layer in layers_of(model))


# Refuses models that towers cannot compute, with a `ModelError`.


def check_variables(model: keras.Model) -> None:
    """Refuses variables whose gradients on several towers cannot be combined."""
    others = trace.overwritten_unlike_float8(model)
    if others:
        raise ModelError(
            f"Model '{model.name}' has a variable '{others[0].path}' that is "
            "overwritten with its gradient (overwrite_with_gradient), and Towers does "
            "not know how to combine the gradients; expected only those of Keras's "
            "float8, so pass strict=False to multi_gpu_model to take the largest."
        )


def refuse_stateful(model: keras.Model) -> None:
    """Refuses layers that keep a state for each row of the batch."""
    for layer in layers_of(model):
        if getattr(layer, "stateful", False):
            raise ModelError(
                f"The layer '{layer.name}' is stateful: it keeps a value for each row "
                "of the batch, which towers do not carry; use stateful=False."
            )


def refuse_draws(model: keras.Model, phrases: Sequence[str]) -> None:
    """Refuses random numbers that several hosts cannot share.

    Args:
        model: The model.
        phrases: Phrases that say where a step draws such numbers; empty if it does not.
    """
    if phrases:
        raise ModelError(
            f"Model '{model.name}' draws random numbers of TensorFlow's own state"
            f"{phrases[0]}, {NOT_SHARED}; expected a draw outside of it, keras.random "
            "with a seed generator, or run_eagerly=True."
        )


# Reports how a step on towers differs from one on one device.


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Notes and prints facts about a partitioned step; each line is printed once.

    Attributes:
        context: The builder's context.
        step: Name of the step, such as "train_step".
        partitioned: The partitioned step.
        stand_ins: The `id`s of handles that stand in for variables of the model.
    """

    context: Context
    step: str
    partitioned: Partitioned
    stand_ins: Collection[int] = ()

    def note(self) -> None:
        """Notes facts about a training step; see `ModelFacts`."""
        gathered, facts = self.partitioned.placement.gathered, self.context.facts
        facts.loss_placed = "gathered" if gathered else "tower"
        facts.unseeded = self._unseeded_draws()
        facts.unsaved = self._unsaved_variables()

    def say(self, lines: Sequence[str]) -> None:
        """Prints some lines about the step, and then all others that apply to it."""
        context, step, partitioned = self.context, self.step, self.partitioned
        execution, trace = context.execution(step), partitioned.trace
        name = step_name(context, step)
        context.say(lines)
        if execution.towers_by_xla:
            context.say(partitioned.by_xla(name))
        if execution.updates_by_xla:
            context.say(partitioned.updated(name[0].lower() + name[1:]))
        if context.guard is not None and trace.reads_gradients:
            context.say([f"{name} has gradients that check_numerics does not see."])
        if unseeded := self._unseeded_draws():
            context.say([f"{name} {words_of_draws(unseeded)}."])
        if context.plan.pipeline.stages > 1 and trace.labels.enclosed:
            line = (
                f"Model '{context.model.name}' calls "
                f"{', '.join(trace.labels.enclosed)} in a branch or a loop, of "
                "which all is computed on one stage."
            )
            context.say([line])
        if step == "train_step" and (unsaved := self._unsaved_variables()):
            names = ", ".join(sorted(variable.name for variable in unsaved))
            line = (
                f"{name} changes {names}, which no attribute of the "
                "model or of its layers holds, so that checkpoints do not contain "
                "it; make it an attribute."
            )
            context.say([line])

    def _unseeded_draws(self):
        """Returns phrases that say where random numbers come from no model state."""
        if self.context.preprocess is not None:
            # Preprocessing may draw with `tf.random`.
            return []
        names = sorted(variable.name for variable in self._unsaved_variables())
        of_keras = [f" by {name}" for name in names if "seed_generator" in name]
        return [*self.partitioned.stateful_draws, *of_keras]

    def _unsaved_variables(self):
        """Returns the variables that the step changes and no checkpoint saves."""
        model, trace = self.context.model, self.partitioned.trace
        saved = {*self.stand_ins}
        for variable in variables.of(model):
            saved |= {id(value.handle) for value in sharded.places(variable)}
        saved |= {id(variable.handle) for variable in variables.plain(model).values()}
        changed = effects.changed(trace.graph) - saved
        used = {id(variable.handle): variable for variable in trace.concrete.variables}
        return [variable for handle, variable in used.items() if handle in changed]


def step_name(context: Context, step: str) -> str:
    """Returns the name of a step of the model, for the start of a sentence."""
    return f"The {step} of model '{context.model.name}'"


def words_of_draws(phrases: Sequence[str]) -> str:
    """Returns a clause that says where a step draws random numbers without a seed."""
    return (
        f"draws random numbers without a seed{','.join(phrases)}, so that no run can "
        "repeat them; expected those of keras.random, with a keras.random.SeedGenerator"
    )


def describe_stages(pieces: Pieces, partitioned: Partitioned, data: Any) -> None:
    """Prints once which layers are on which stage, and the memory they take.

    Args:
        pieces: The pieces of the builder.
        partitioned: The partitioned training step.
        data: A batch, or its `tf.TypeSpec`s; if its size is not known, nothing is
            printed.
    """
    context, pipeline = pieces.context, pieces.context.plan.pipeline
    first, *_ = tf.nest.flatten(batch.specs(data))
    placement, size = pipeline.placement, context.usual_rows or first.shape[0]
    if pipeline.stages == 1 or placement.kept is not None or not size:
        return
    rows, table = context.micro_batch_rows(data), feature("stages.table")
    placement.kept = table.activation_bytes(partitioned.staged(rows), pipeline, rows)
    context.say(table.lines(pipeline, placement.kept, rows))


# Eager steps: one device of each host computes the whole batch, operation by operation.


def run_eagerly(pieces: Pieces, step: str, data: Any) -> Any:
    """Runs a step on a whole batch on the home device, and returns its results.

    Each host runs the step; all return the results of the first host.
    """
    context, plan = pieces.context, pieces.context.plan
    model, hosts = context.model, plan.hosts
    line = (
        f"Model '{model.name}' runs its {step} eagerly, so one device computes "
        "all of each batch; towers are for graphs."
    )
    if hosts.count > 1:
        line += f" Each of {hosts.count} hosts does so, and has the first's numbers."
    context.say([line])
    # Gradient tapes know whole variables only; earlier graphs may have cut them.
    tables.bring_home(model, plan.home_of)
    with context.agreeing_on(step, data):
        if batch.part_of(data) is not None:
            rows, size = batch.rows_given(data), batch.batch_size(data)
            data = plan.gather(rows, size, "batch")
        with tf.device(plan.home):
            results = compute_eagerly(pieces, step, data)
    if hosts.count > 1:
        # Other hosts may have drawn other random numbers, or rounded differently.
        pieces.store.follow_first_host()
        results = _of_first_host(hosts, results)
    return results


def compute_eagerly(pieces: Pieces, step: str, data: Any) -> Any:
    """Computes a step on a batch, on the current device; the guard checks gradients."""
    context = pieces.context
    if step != "train_step" or context.guard is None:
        return context.step_function(step)(data)
    model = context.model
    guard = guarded_step(
        context.guard,
        model,
        functools.partial(pieces.batches.whole, data),
        steps_before(context.guard, model),
        state_before(context.guard, model),
    )
    losses = []

    def compute_loss(original, called, *args, **kwargs):
        loss = original(called, *args, **kwargs)
        losses.extend([loss] if called is model else ())
        return loss

    def apply(original, optimizer, grads, trainable_variables=None):
        observed = contextlib.nullcontext()
        # The user's optimizer may call other optimizers inside.
        if optimizer in variables.optimizers(model, only_built=False).values():
            gradients = [*grads]
            observed = guard.before(Gradients([gradients], gradients, losses=losses))
        with observed:
            return original(optimizer, grads, trainable_variables)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(COMPUTE_LOSS, compute_loss))
        for method in optimizers.APPLY:
            stack.enter_context(patched(method, apply))
        return context.step_function(step)(data)


def _of_first_host(hosts: World, values: Any) -> Any:
    """Returns the first host's values of a nest; each host keeps its own strings."""
    flat = tf.nest.flatten(values, expand_composites=True)
    flat = [None if value is None else tf.convert_to_tensor(value) for value in flat]
    sent = [i for i, t in enumerate(flat) if t is not None and t.dtype != tf.string]
    received = hosts.broadcast([flat[i] for i in sent], "what a step returns")
    for i, value in zip(sent, received, strict=True):
        flat[i] = value
    return tf.nest.pack_sequence_as(values, flat, expand_composites=True)
