"""Takes in what towers return: their outputs, and their parts of losses and metrics."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.analysis.rules import Rules
from towers.builders.context import Context
from towers.builders.pieces.batches import LocalBatches
from towers.collectives import batch, reduce
from towers.keras_adapter.layers import TAGS, set_tag
from towers.keras_adapter.models import (
    compiled_loss,
    compiled_metrics,
    compute_loss,
    loss_tracker,
    overrides,
)
from towers.tower import metrics
from towers.tower.errors import ModelError
from towers.tower.passes import TowerResult


class Measured(NamedTuple):
    """What a batch tells about losses and metrics.

    Attributes:
        loss: The loss of the whole batch, a scalar.
        of_outputs: The loss of each output, if there are several and the towers have
            computed them.
        changes: What the batch adds to each of `metrics.variables_of`, `None` where it
            adds nothing. `None` if all metrics need the outputs.
        refused: Metrics that need the outputs nevertheless.
    """

    loss: tf.Tensor
    of_outputs: Sequence[tf.Tensor] = ()
    changes: Sequence[tf.Tensor | None] | None = None
    refused: Sequence[keras.metrics.Metric] = ()


@dataclasses.dataclass
class MetricSink:
    """Computes at home what Keras computes of whole batches."""

    context: Context
    batches: LocalBatches

    def gather(self, results: Sequence[TowerResult], total: int | tf.Tensor) -> Any:
        """Joins the towers' outputs, and their tags, at home: one row an example.

        `total` is the number of examples of the global batch.
        """
        sizes, plan = [result.size for result in results], self.context.plan
        with tf.device(plan.home), tf.name_scope("gather"):
            outputs = batch.join([r.outputs for r in results], sizes)
            tags = batch.join([r.tags for r in results], sizes)
            outputs = plan.gather(outputs, total, "outputs")
            tags = plan.gather(tags, total, "tags")
        for name, values in zip(TAGS, tags, strict=True):
            for output, value in zip(
                tf.nest.flatten(outputs), tf.nest.flatten(values), strict=True
            ):
                set_tag(output, name, value)
        return outputs

    def combine(self, results: Sequence[TowerResult], rules: Rules) -> Measured:
        """Adds this host's parts of the loss, and of the changes of metrics."""
        plan, model = self.context.plan, self.context.model
        sources = [plan.devices[result.tower] for result in results]
        with tf.device(plan.home), tf.name_scope("measured"):
            loss, *of_outputs = (
                tf.add_n(parts)
                for parts in zip(
                    *([r.loss, *r.output_losses] for r in results), strict=True
                )
            )
            if not results[0].metrics:
                return Measured(loss, of_outputs)
            changes = reduce.combine_states(
                [result.metrics for result in results],
                [result.fraction for result in results],
                [rules[f"metric {i}"] for i in range(len(results[0].metrics))],
                sources if any(map(plan.packs, sources)) else (),
                plan.hosts,
            )
        refused = metrics.refused(model, rules)
        for metric, reason in refused.items():
            line = (
                f"Metric '{metric.name}' of model '{model.name}' is computed on "
                f"gathered outputs, because of {reason}."
            )
            self.context.say([line])
        return Measured(loss, of_outputs, changes, [*refused])

    def sum_layer_losses(self, results: Sequence[TowerResult]) -> list[tf.Tensor]:
        """Adds the towers' parts of each loss that layers added, where it is called."""
        by_loss = zip(*(result.losses for result in results), strict=True)
        return [tf.add_n(parts) for parts in by_loss]

    def whole_loss(
        self, data: Any, outputs: Any, losses: Sequence[tf.Tensor], training: bool
    ) -> tf.Tensor:
        """Computes the loss of a whole batch from gathered outputs, as Keras does.

        `data` is (x, y, sample_weight); `losses` are those that layers added.
        """
        model, kept = self.context.model, self.context.found.kept
        if kept and overrides(model, "compute_loss"):
            raise ModelError(
                f"Model '{model.name}' keeps a tensor of one call for later, in "
                f"{kept}, and its own compute_loss would find only that of the last "
                "tower's local batch; return the tensor as an output instead."
            )
        x, y, sample_weight = data
        return compute_loss(
            model, x, y, outputs, sample_weight, training=training, added=losses
        )

    def update_metrics(
        self, data: Any, measured: Measured, gather: Callable[[], Any]
    ) -> dict[str, tf.Tensor]:
        """Updates the model's metrics with a whole batch, as Keras does.

        Args:
            data: (x, y, sample_weight).
            measured: What the towers have measured, or home has.
            gather: Returns the gathered outputs.

        Returns:
            The metrics' results, by name.
        """
        model = self.context.model
        size = batch.batch_size(data)
        with tf.device(self.context.plan.home), tf.name_scope("metrics"):
            loss_tracker(model).update_state(measured.loss, sample_weight=size)
            if measured.of_outputs:
                # As Keras counts them.
                count = size if isinstance(size, int) else None
                trackers = compiled_loss(model).metrics
                for tracker, loss in zip(trackers, measured.of_outputs, strict=True):
                    tracker.update_state(loss, sample_weight=count)
            if measured.changes is None:
                x, y, sample_weight = self._whole(data)
                return model.compute_metrics(x, y, gather(), sample_weight)
            if measured.refused:
                _, y, sample_weight = self._whole(data)
                self._update(measured.refused, y, gather(), sample_weight)
            others = {id(v) for metric in measured.refused for v in metric.variables}
            variables = metrics.variables_of(model)
            for variable, change in zip(variables, measured.changes, strict=True):
                if change is not None and id(variable) not in others:
                    variable.assign_add(change)
            return model.get_metrics_result()

    def _whole(self, data):
        inputs = overrides(self.context.model, "compute_metrics")
        return self.batches.whole(data, inputs)

    def _update(self, wanted, y, outputs, sample_weight):
        """Updates some of the compiled metrics, as Keras updates all."""
        variables = metrics.variables_of(self.context.model)
        # Of all others, nothing is kept.
        with keras.StatelessScope([(v, v.value) for v in variables]) as scope:
            compiled = compiled_metrics(self.context.model)
            compiled.update_state(y, outputs, sample_weight)
        for variable in (v for metric in wanted for v in metric.variables):
            variable.assign(scope.get_current_value(variable))
