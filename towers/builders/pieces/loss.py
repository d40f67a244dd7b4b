"""Computes loss and gradients: on the towers, or of gathered outputs at home."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.analysis.rules import NoRuleError
from towers.builders.context import Context
from towers.builders.pieces.batches import LocalBatches
from towers.builders.pieces.executor import TowerExecutor, TowerFunction
from towers.builders.pieces.metrics import MetricSink
from towers.builders.pieces.reader import TowerInputs
from towers.builders.pieces.reducer import StateCombiner
from towers.collectives import batch, reduce
from towers.tower import build, passes
from towers.tower.passes import TowerResult


class StepOutputs(NamedTuple):
    """What the towers made of a batch, before anything is updated.

    Attributes:
        results: The towers' results.
        state: The new values of the model's variables, combined; see
            `StateCombiner.combine_state`.
        loss: The loss of the whole batch, a scalar.
        direct: Gradients that come from the loss itself, past the outputs: none, or one
            list as `TowerResult.gradients`.
        y: The whole batch's y, if towers have preprocessed it.
    """

    results: Sequence[TowerResult]
    state: Sequence[tf.Tensor | None]
    loss: tf.Tensor
    direct: Sequence[Sequence[tf.Tensor | tf.IndexedSlices | None]]
    y: Any = None


@dataclasses.dataclass
class LossAndGradients:
    """Computes loss and gradients, changing nothing."""

    context: Context
    batches: LocalBatches
    executor: TowerExecutor
    metrics: MetricSink
    state: StateCombiner

    def compute(
        self, data: Any, inputs: TowerInputs, local_batches: Sequence[Any] | None = None
    ) -> StepOutputs:
        """Computes loss and gradients of a global batch; see `TrainStep.train_step`."""
        context, plan = self.context, self.context.plan
        unpack = keras.utils.unpack_x_y_sample_weight
        data, local_batches = (
            unpack(data),
            local_batches and [*map(unpack, local_batches)],
        )
        sent = zip(inputs.values, plan.devices, strict=True)
        context.timers.received([each for each, device in sent if plan.packs(device)])
        local_batches, seen = self.batches.preprocess_batch(data, True, local_batches)
        y = None if context.preprocess is None else seen[1]
        if self._place_loss() == "tower":
            try:
                return self._on_towers(data, inputs, local_batches)._replace(y=y)
            except NoRuleError as error:
                self._gather_loss(str(error))
        return self._gathered(data, seen, inputs, local_batches)._replace(y=y)

    def _on_towers(self, data, inputs, local_batches):
        """Has each tower compute its part of the loss.

        Raises:
            NoRuleError: The parts cannot be put together.
        """
        rules = self.context.rules("train", data)
        function = functools.partial(passes.forward_backward, self.context.model, rules)
        towers = TowerFunction(
            function, rules, True, [inputs.scale], inputs=lambda local: local[0]
        )
        results = self.executor.run_towers(towers, inputs.values, data, local_batches)
        self.context.timers.computed([(r.loss, r.gradients) for r in results])
        loss = self.metrics.sum_losses(results)
        return StepOutputs(results, self.state.combine_state(results, rules), loss, [])

    def _place_loss(self):
        """Decides where to try to compute the loss: "tower" or "gathered"."""
        context = self.context
        if "gathered" in (context.loss_placement, context.found.loss_placed):
            context.found.loss_placed = "gathered"
        elif build.overrides(context.model, "compute_loss"):
            self._gather_loss("its own compute_loss")
        elif context.together:
            self._gather_loss("layers that are synchronized")
        elif (
            context.plan.count > 1
            and context.model.run_eagerly
            and context.loss_placement != "tower"
        ):
            # It is Python that sees the whole batch, and is called once.
            self._gather_loss("run_eagerly=True")
        else:
            context.found.loss_placed = "tower"
        return context.found.loss_placed

    def _gather_loss(self, reason):
        """Has the loss computed on gathered outputs from now on, and says so."""
        name = self.context.model.name
        if self.context.loss_placement == "tower":
            raise ValueError(
                f"Received loss_placement='tower', but towers cannot compute the loss "
                f"of model '{name}', because of {reason}; use loss_placement='auto'."
            )
        self.context.found.loss_placed = "gathered"
        line = (
            f"The loss of model '{name}' is computed on gathered outputs, because of "
            f"{reason}."
        )
        self.context.say([line])

    def _gathered(self, data, seen, inputs, local_batches):
        """Computes the loss at home, from the outputs of all towers.

        The towers run forward; home computes the loss and its gradient for the outputs;
        the towers carry that gradient back. Where the loss looks at variables, too,
        there is a gradient of home's own.
        """
        if local_batches is None:
            batch.check_rows(data)  # of which x alone is cut
        x, model = data[0], self.context.model
        local_x = local_batches and [local[0] for local in local_batches]
        rules = self.context.rules("train, gathered", x)
        # Python is called once, so what it has computed is kept.
        backs, keeps = [], model.run_eagerly and not self.context.together

        def kept(*arguments):
            result, back = passes.taped_forward(model, rules, *arguments)
            backs.append(back)
            return result

        forward = functools.partial(passes.forward, model, True, rules)
        towers = TowerFunction(forward, rules, training=True, eagerly=kept)
        results = self.executor.run_towers(towers, inputs.values, x, local_x)
        loss, state, for_outputs, for_losses, direct = self._at_home(
            seen, x, results, rules, inputs.scale
        )
        carried = self.batches.place((x, for_outputs))
        if local_batches:
            # The same rows as on the way forward.
            pairs = zip(local_x, carried, strict=True)
            carried = [(rows, gradients) for rows, (_, gradients) in pairs]
        if keeps:
            back = self._carry(backs, results, carried, for_losses)
        else:
            backward = functools.partial(passes.backward, model, rules)
            towers = TowerFunction(backward, rules, True, [for_losses])
            whole = x, for_outputs
            back = self.executor.run_towers(towers, inputs.values, whole, carried)
        self.context.timers.computed([result.gradients for result in back])
        results = [
            result._replace(gradients=again.gradients)
            for result, again in zip(results, back, strict=True)
        ]
        return StepOutputs(results, state, loss, [[*map(reduce.add, direct)]])

    def _at_home(self, seen, x, results, rules, scale):
        """Computes the loss of gathered outputs, and its gradients.

        Returns:
            The loss; the model's state behind it; the loss's gradients for outputs and
            for layers' losses; and those for all values of each variable, past the
            outputs.
        """
        outputs = self.metrics.gather(results)
        state = self.state.combine_state(results, rules)
        with tf.device(self.context.plan.home):
            losses = self.metrics.sum_layer_losses(results)
            targets = passes.differentiable(outputs)
            with (
                tf.GradientTape() as tape,
                _Home(self.context.model, state, tape) as home,
            ):
                tape.watch([targets, losses])
                loss = self.metrics.whole_loss(seen, outputs, losses, training=True)
                scaled = loss * tf.cast(scale, loss.dtype)
            state = home.finish()
            wanted = tape.gradient(scaled, [targets, losses, home.values])
            for_outputs, for_losses = tf.nest.map_structure(_dense, wanted[:2])
            size = batch.batch_size(x)
            for target, rows in zip(targets, for_outputs, strict=True):
                if rows is not None:
                    rows.set_shape(target.shape)  # which Python in a graph loses
            for_outputs = [batch.by_example(rows, size) for rows in for_outputs]
        return loss, state, for_outputs, for_losses, wanted[2]

    def _carry(self, backs, results, carried, for_losses):
        """Carries gradients back through towers that have kept their forward passes."""
        carried_back = []
        for back, result in zip(backs, results, strict=True):
            k = result.tower
            with tf.name_scope(f"tower_{k}"), tf.device(self.context.plan.devices[k]):
                carried_back.append(back(carried[k][1], for_losses))
        return carried_back


class _Home(keras.StatelessScope):
    """Inside, home computes a loss behind the towers, and changes no variable.

    A loss of the user's may call the model again, which then changes its state.
    """

    def __init__(
        self,
        model: keras.Model,
        state: Sequence[tf.Tensor | None],
        tape: tf.GradientTape,
    ):
        self._variables = [*model.trainable_variables, *model.non_trainable_variables]
        self._tape = tape
        self._others = {}
        # Of each trainable variable, all values that it has.
        self.values = [[variable.value] for variable in model.trainable_variables]
        self._place = {id(variable): i for i, variable in enumerate(self._variables)}
        super().__init__()
        for variable, value in zip(self._variables, state, strict=True):
            if value is not None:
                self.add_update((variable, value))

    def add_update(self, update):
        variable, value = update
        # No gradient flows through an assignment; it ends at the value assigned.
        value = tf.stop_gradient(value)
        place = self._place.get(id(variable))
        if place is None:
            self._others[id(variable)] = variable
        elif place < len(self.values):
            self._tape.watch(value)
            self.values[place].append(value)
        super().add_update((variable, value))

    def finish(self) -> list[tf.Tensor | None]:
        """Returns the model's new state, and gives others, of metrics, their values."""
        for variable in self._others.values():
            variable.assign(self.get_current_value(variable))
        return [self.get_current_value(variable) for variable in self._variables]


def _dense(gradient):
    return None if gradient is None else tf.convert_to_tensor(gradient)
