"""Computes loss and gradients: on the towers, or of gathered outputs at home."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.analysis.rules import NoRuleError, Rules, TotalsWanted
from towers.builders.context import Context, loss_key
from towers.builders.pieces.batches import LocalBatches
from towers.builders.pieces.executor import TowerExecutor, TowerFunction
from towers.builders.pieces.metrics import Measured, MetricSink
from towers.builders.pieces.reader import RowReader, TowerInputs, Values
from towers.builders.pieces.reducer import StateCombiner
from towers.collectives import batch, reduce
from towers.collectives.hosts import OneHost
from towers.keras_adapter.models import compiled_loss, overrides
from towers.layers import sharded
from towers.layers.variables import not_trained
from towers.tower import passes
from towers.tower.passes import TowerResult


class StepOutputs(NamedTuple):
    """What the towers made of a batch, before anything is updated.

    Attributes:
        results: The towers' results.
        state: The new values of the model's variables, combined; see
            `StateCombiner.combine_state`.
        measured: The loss of the whole batch, and what metrics are to know.
        direct: Gradients that come from the loss itself, past the outputs: none, or one
            list as `TowerResult.gradients`. If there are none, state, loss and metrics
            are this host's parts of them until `sum_over` adds those of others.
    """

    results: Sequence[TowerResult]
    state: Sequence[tf.Tensor | None]
    measured: Measured
    direct: Sequence[Sequence[tf.Tensor | tf.IndexedSlices | None]]

    def sum_over(
        self, hosts: OneHost, more: Any = None, compressible: Sequence[Any] = ()
    ) -> tuple["StepOutputs", Any]:
        """Adds what is not yet that of all hosts, and a nest of tensors besides.

        `compressible` is as for `OneHost.sum`.

        Returns:
            The outputs of all hosts, and the sums of `more`.
        """
        if self.direct:
            # Each host has seen the outputs of all.
            return self, hosts.sum(more, "step", compressible)
        loss, of_outputs, changes, refused = self.measured
        # In one sum: each takes its time, however little it adds.
        parts = loss, of_outputs, changes, self.state, more
        loss, of_outputs, changes, state, more = hosts.sum(parts, "step", compressible)
        measured = Measured(loss, of_outputs, changes, refused)
        return self._replace(state=state, measured=measured), more


@dataclasses.dataclass
class LossAndGradients:
    """Computes loss and gradients, changing nothing."""

    context: Context
    batches: LocalBatches
    executor: TowerExecutor
    metrics: MetricSink
    state: StateCombiner
    rows: RowReader

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
        local_batches, seen = self.prepare(data, True, local_batches)
        local_x = local_batches and [local[0] for local in local_batches]
        values = self.rows.fetch(inputs.values, data[0], local_x, training=True)
        inputs = inputs._replace(values=values)
        if self.place_loss("train") == "tower":
            try:
                function = functools.partial(passes.forward_backward, context.model)
                results, rules = self.on_towers(
                    "train",
                    function,
                    inputs.values,
                    data,
                    local_batches,
                    [inputs.scale],
                )
            except NoRuleError as error:
                self.gather_loss("train", str(error))
            else:
                self._computed(results)
                state = self.state.combine_state(results, rules)
                measured = self.metrics.combine(results, rules)
                return StepOutputs(results, state, measured, [])
        return self._gathered(data, seen, inputs, local_batches)

    def _computed(self, results):
        """Tells the timers what each tower has made, of all its micro-batches."""
        self.context.timers.computed(
            [
                [(result.loss, result.gradients) for result in group]
                for group in self.context.plan.by_replica(results)
            ]
        )

    def prepare(
        self, data: Any, training: bool, local_batches: Sequence[Any] | None = None
    ) -> tuple[Sequence[Any] | None, Callable[[], Any]]:
        """Has towers preprocess a batch; see `LocalBatches.preprocess_batch`.

        Local batches that were preprocessed have, behind the others, the y that metrics
        are to see, as it was given.
        """
        if self.context.preprocess is None:
            inputs = overrides(self.context.model, "compute_loss")
            seen = functools.partial(self.batches.whole, data, inputs)
            return local_batches, seen
        given = local_batches or self.batches.place(data)
        local_batches, seen = self.batches.preprocess_batch(data, training, given)
        pairs = zip(local_batches, given, strict=True)
        return [(*local, before[1]) for local, before in pairs], seen

    def on_towers(
        self,
        step: str,
        function: Callable[..., TowerResult],
        values: Sequence[Values],
        data: Any,
        local_batches: Sequence[Any] | None,
        extra: Sequence[Any] = (),
    ) -> tuple[list[TowerResult], Rules]:
        """Has each tower compute its part of the loss, and what it adds to metrics.

        Args:
            step: "train" or "test".
            function: `passes.forward_backward` or `passes.evaluate`, the model bound.
            values: The variables' values for each tower.
            data: (x, y, sample_weight) of the whole batch.
            local_batches: What each tower has of it, if that is there.
            extra: What the function takes behind the fraction, but for totals.

        Returns:
            The towers' results, and the rules by which they add up.

        Raises:
            NoRuleError: The parts cannot be put together.
        """
        context = self.context
        measures = not overrides(context.model, "compute_metrics")

        def run():
            rules = context.rules(step, data, measures)
            towers = TowerFunction(
                functools.partial(function, rules),
                rules,
                step == "train",
                [*extra, self._totals(step, data, local_batches)],
                inputs=lambda local: local[0],
            )
            results = self.executor.run_towers(towers, values, data, local_batches)
            return results, rules

        try:
            return run()
        except TotalsWanted as wanted:
            if context.model.run_eagerly:
                raise
            context.found.loss_graphs[loss_key(step, data)] = wanted.graph
        return run()

    def _totals(self, step, data, local_batches):
        """The totals of the whole batch that the loss takes, if it takes any."""
        context, plan = self.context, self.context.plan
        graph = context.loss_graph(step, data)
        if graph is None:
            return []
        parts = []
        local_batches = local_batches or self.batches.place(data)
        for device, local in zip(plan.devices, local_batches, strict=True):
            with tf.device(device), tf.name_scope("totals"):
                parts.append(graph.totals_of(local))
        with tf.device(plan.home), tf.name_scope("totals"):
            fractions = self.batches.fractions(data)
            return reduce.combine_totals(parts, fractions, graph.kinds, plan.hosts)

    def evaluates_on_towers(self) -> bool:
        """Whether towers are to compute loss and metrics in evaluation, too."""
        context = self.context
        return (
            context.plan.count > 1
            and compiled_loss(context.model) is not None
            and not context.model.run_eagerly
        )

    def place_loss(self, step: str) -> str:
        """Decides where to try to compute the loss of a step: "tower" or "gathered"."""
        context = self.context
        places = context.found.loss_places
        if "gathered" in (context.loss_placement, places.get(step)):
            places[step] = "gathered"
        elif overrides(context.model, "compute_loss"):
            self.gather_loss(step, "its own compute_loss")
        elif context.together:
            self.gather_loss(step, "layers that are synchronized")
        elif (
            context.plan.count > 1
            and context.model.run_eagerly
            and context.loss_placement != "tower"
        ):
            # It is Python that sees the whole batch, and is called once.
            self.gather_loss(step, "run_eagerly=True")
        else:
            places[step] = "tower"
        return places[step]

    def gather_loss(self, step: str, reason: str) -> None:
        """Has a step's loss computed on gathered outputs from now on, and says so."""
        name = self.context.model.name
        if self.context.loss_placement == "tower":
            raise ValueError(
                f"Received loss_placement='tower', but towers cannot compute the loss "
                f"of model '{name}', because of {reason}; use loss_placement='auto'."
            )
        self.context.found.loss_places[step] = "gathered"
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
        x, model, seen = data[0], self.context.model, seen()
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
        for_outputs = self.batches.of_host(x, for_outputs)
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
        self._computed(back)
        results = [
            result._replace(gradients=again.gradients)
            for result, again in zip(results, back, strict=True)
        ]
        direct = [*map(reduce.add, direct)]
        direct = [sharded.expand(model.trainable_variables, direct)]
        return StepOutputs(results, state, Measured(loss), direct)

    def _at_home(self, seen, x, results, rules, scale):
        """Computes the loss of gathered outputs, and its gradients.

        Returns:
            The loss; the model's state behind it; the loss's gradients for outputs and
            for layers' losses; and those for all values of each variable, past the
            outputs.
        """
        size = batch.batch_size(x)
        outputs = self.metrics.gather(results, size)
        hosts, state = self.context.plan.hosts, self.state.combine_state(results, rules)
        state = hosts.sum(state, "state")
        with tf.device(self.context.plan.home):
            losses = self.metrics.sum_layer_losses(results)
            losses = hosts.sum(losses, "losses of layers")
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
            for target, rows in zip(targets, for_outputs, strict=True):
                if rows is not None:
                    rows.set_shape(target.shape)  # which Python in a graph loses
            for_outputs = [batch.by_example(rows, size) for rows in for_outputs]
        return loss, state, for_outputs, for_losses, wanted[2]

    def _carry(self, backs, results, carried, for_losses):
        """Carries gradients back through towers that have kept their forward passes."""
        carried_back = []
        for back, result in zip(backs, results, strict=True):
            k, (_, for_outputs) = result.tower, carried[result.tower]
            if isinstance(result.size, int) and result.size == 0:
                for_outputs = batch.made_up(for_outputs)
            with tf.name_scope(f"tower_{k}"), tf.device(self.context.plan.devices[k]):
                carried_back.append(back(for_outputs, for_losses)._replace(tower=k))
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
        self._variables = [*model.trainable_variables, *not_trained(model)]
        self._tape = tape
        self._others = {}
        # Of each trainable variable, all values that it has.
        self.values = [[variable.value] for variable in model.trainable_variables]
        self._place = {id(variable): i for i, variable in enumerate(self._variables)}
        cut = [v for v in model.trainable_variables if sharded.of(v) is not None]
        whole = [(variable, tf.convert_to_tensor(variable)) for variable in cut]
        for variable, value in whole:
            tape.watch(value)
            self.values[self._place[id(variable)]] = [value]
        super().__init__(whole)
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
