"""The steps of a model on towers: Keras's, or those that it defines itself."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.builders import checks, specs
from towers.builders.common import Pieces
from towers.builders.eager_steps import run_eagerly
from towers.builders.guarded_step import guarded_step, state_before, steps_done
from towers.builders.step_report import StepReport, describe_stages, step_name
from towers.builders.train_function import Scope, step_function, train_function
from towers.collectives import batch
from towers.keras_adapter.layers import layers_of
from towers.keras_adapter.models import overrides
from towers.layers import sharded, variables
from towers.partition.partitioned import Partitioned, judge
from towers.tower.errors import explained_trace

# Above it, the start gets too long if towers are copied into the step's graph: with a
# ResNet-50 and 8 towers by a third, for steps that are 2% faster.
_MANY_LAYERS = 100


@dataclasses.dataclass
class Steps:
    """The steps of a model, each traced as on one device, and cut.

    Attributes:
        pieces: Cut and place batches, create variables; the store says where they live.
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
        """Runs a step of the model on a global batch, and returns what it returns.

        For the first batch of a kind, the step is traced and cut; every batch is placed
        on the towers, and then the phases run (`PartitionedCall`).
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
        partitioned = self._partition(step, _local_spec(data))
        if plan.hosts.count > 1:
            checks.refuse_stateful_draws(model, partitioned.stateful_draws)
        if local_batches is None:
            local_batches = self.pieces.batches.place(data)
        timers = guard = None
        if step == "train_step":
            timers, done = context.timers, steps_done(context)
            state = state_before(context, partitioned.trace)
            guard = guarded_step(self.pieces, data, done, state)
        with context.agreeing_on(step, data):
            if partitioned.copied is not None:
                self.pieces.store.follow_learning_rates()
            whole = data if batch.part_of(data) is None else None
            size = batch.batch_size(data)
            execution = context.execution(step)
            return partitioned(
                plan, local_batches, size, whole, execution, timers, guard
            )

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
        elif self._places_first:
            # What is traced here reads variables where they stay.
            with tf.init_scope():
                self.pieces.creator.build_apart(data, trains=False)
                variables.move(context.model, context.plan.home_of)
        # Not in an `init_scope`, where no tape records.
        with tf.device(context.plan.home):
            partitioned = self._partition(step, _local_spec(data))
        if step == "train_step":
            with tf.init_scope():
                describe_stages(self.pieces, partitioned, data)
        # Only now, as a second try has to do what a first one could not.
        self._created.add(step)

    def _create_for_training(self, data):
        """Creates what has to be there before a step of training is traced."""
        context, creator = self.pieces.context, self.pieces.creator
        if not overrides(context.model, "train_step"):
            # What Keras's step creates is known, and need not be traced for.
            creator.build_all(data)
        elif self._places_first:
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
        divided = creator.divide_layers(functools.partial(self._stages_of_tower, data))
        with tf.init_scope():
            self.pieces.store.settle(data, divided)

    def _stages_of_tower(self, data, pipeline):
        """Cuts what a tower computes of a micro-batch of known size into stages."""
        context = self.pieces.context
        verdict = judge(
            self._reading_stand_ins(step_function(context, "train_step")),
            specs.sized(data, None),
            updates_apart=self.pieces.store,
            home=context.plan.home,
            pipeline=pipeline,
            stand_ins=self.pieces.store.stand_ins(),
        )
        return Partitioned(verdict).staged(specs.usual_rows(context, data))

    @property
    def _places_first(self):
        """Whether variables are placed before a step is traced."""
        several = self.pieces.context.plan.pipeline.stages > 1
        return several or self.pieces.store.divides

    def _partition(self, step, spec):
        """Returns a step of the model, partitioned for batches of a kind."""
        if (step, str(spec)) not in self._partitioned:
            context = self.pieces.context
            trains, pipeline = step == "train_step", context.plan.pipeline
            store = self.pieces.store
            if not trains:
                # Nothing is kept for a gradient.
                pipeline = dataclasses.replace(pipeline, recompute="none")
            with explained_trace(context.model):
                verdict = judge(
                    self._reading_stand_ins(step_function(context, step)),
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
                # Its variables are there now, if the step has built it.
                checks.check_variables(context.model)
            self._partitioned[step, str(spec)] = partitioned
            lines = partitioned.lines(step_name(context, step))
            self.report(step, partitioned, lines)
        return self._partitioned[step, str(spec)]

    def _keep_whole(self, step, assigned):
        """Puts parameters that a step assigns itself at home, as whole variables."""
        context, model = self.pieces.context, self.pieces.context.model
        chosen = [v for v in model.trainable_variables if sharded.of(v) in assigned]
        self.pieces.store.keep_whole(chosen)
        # What was traced refers to the parts.
        self._partitioned.clear()
        names = ", ".join(variable.path for variable in chosen)
        line = (
            f"{step_name(context, step)} assigns {names} beside the optimizer, so that "
            f"they stay whole on {context.plan.home}."
        )
        context.say([line])

    def report(self, step: str, partitioned: Partitioned, lines: Sequence[str]) -> None:
        """Notes and says what a step does otherwise than it would on one device.

        Args:
            step: Its name.
            partitioned: The step.
            lines: What is to be said before all else.
        """
        context = self.pieces.context
        stand_ins = self.pieces.store.stand_ins()
        report = StepReport(context, step, partitioned, stand_ins)
        if step == "train_step":
            report.note()
        report.say(lines)

    def _reading_stand_ins(self, function):
        """Makes a function read stand-ins in place of variables in parts."""

        def reading(data):
            with sharded.standing_in(self.pieces.context.model.variables):
                return function(data)

        return reading

    @property
    def _towers_stay(self):
        """Whether what towers compute stays a function in the step's graph."""
        model, hosts = self.pieces.context.model, self.pieces.context.plan.hosts
        size = sum(math.prod(v.shape) * 4 for v in model.trainable_variables)
        # The results of a function come all at once, no gradient before the last.
        return len(layers_of(model)) > _MANY_LAYERS and not hosts.overlaps(size)


def _local_spec(data):
    return batch.local_spec(batch.specs(batch.rows_given(data)), None)
