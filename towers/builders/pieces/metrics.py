"""Takes the towers' outputs in: gathers them, computes whole losses and metrics."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towers.builders.context import Context
from towers.collectives import batch
from towers.keras_adapter.layers import TAGS, set_tag
from towers.keras_adapter.models import compiled_loss, compute_loss, loss_tracker
from towers.tower import build
from towers.tower.errors import ModelError
from towers.tower.passes import TowerResult


@dataclasses.dataclass
class MetricSink:
    """Computes at home what Keras computes of whole batches."""

    context: Context

    def gather(self, results: Sequence[TowerResult]) -> Any:
        """Joins the towers' outputs, and their tags, at home: one row an example."""
        sizes = [result.size for result in results]
        with tf.device(self.context.plan.home), tf.name_scope("gather"):
            outputs = batch.join([r.outputs for r in results], sizes)
            tags = batch.join([r.tags for r in results], sizes)
        for name, values in zip(TAGS, tags, strict=True):
            for output, value in zip(
                tf.nest.flatten(outputs), tf.nest.flatten(values), strict=True
            ):
                set_tag(output, name, value)
        return outputs

    def sum_losses(self, results: Sequence[TowerResult]) -> tf.Tensor:
        """Adds the towers' parts of the loss."""
        with tf.device(self.context.plan.home):
            total = tf.add_n([result.loss for result in results])
        return self.context.plan.hosts.sum(total)

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
        if kept and build.overrides(model, "compute_loss"):
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
        self, data: Any, outputs: Any, loss: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Updates the model's metrics with a whole batch, as Keras does.

        Args:
            data: (x, y, sample_weight).
            outputs: The gathered outputs.
            loss: Their loss.

        Returns:
            The metrics' results, by name.
        """
        model = self.context.model
        x, y, sample_weight = data
        with tf.device(self.context.plan.home), tf.name_scope("metrics"):
            size = batch.batch_size(x)
            loss_tracker(model).update_state(loss, sample_weight=size)
            return model.compute_metrics(x, y, outputs, sample_weight)

    def track_each_loss(self, y: Any, outputs: Any, sample_weight: Any) -> None:
        """Tracks the loss of each output, where the towers computed the loss.

        With several outputs, Keras tracks each one's loss when it computes them. A
        tower cannot, so this is done once more for the whole batch, with the y that the
        loss has seen.
        """
        losses = compiled_loss(self.context.model)
        if losses is not None and losses.metrics:
            with tf.device(self.context.plan.home):
                losses(y, outputs, sample_weight)
