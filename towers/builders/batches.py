"""The batches on their way to the towers: cut and placed."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towers.builders.context import Context
from towers.collectives import batch, packing
from towers.devices.names import is_gpu
from towers.layers import embeddings

_INDICES = tf.int32, tf.int64


@dataclasses.dataclass
class LocalBatches:
    """Makes one local batch for each tower of a global batch."""

    context: Context

    def cut(self, data: Any) -> list[Any]:
        """Cuts a batch, where it is: returns as many nests of tensors as towers."""
        batch.check_rows(data)
        data = tf.nest.map_structure(batch.as_tensor, data)
        bounds = self.context.plan.bounds(batch.batch_size(data))
        if batch.part_of(data) is not None:
            first, end = bounds[0][0], bounds[-1][1]
            data = batch.rows_given(data)
            tf.debugging.assert_equal(batch.batch_size(data), end - first)
            bounds = [(start - first, end - first) for start, end in bounds]
        return [batch.take(data, start, end) for start, end in bounds]

    def whole(self, data: Any) -> Any:
        """Returns a whole batch, also where this host is given only some rows of it.

        Args:
            data: (x, y, sample_weight), as it is given.
        """
        part = batch.part_of(data)
        if part is None:
            return data
        rows = (part.x, *data[1:])
        return self.context.plan.gather(rows, batch.batch_size(data), "batch")

    def place(self, data: Any) -> list[Any]:
        """Cuts a batch as `cut` does, and copies each part to its tower."""
        return self.copy_each(self.cut(data))

    def copy_each(self, local_batches: Sequence[Any]) -> list[Any]:
        """Copies each local batch to its tower's device."""
        return [*map(self.copy, self.context.plan.devices, local_batches)]

    def copy(self, device: str, local: Any) -> Any:
        """Copies a local batch to a tower's device."""
        kept = () if self._sends_indices or not is_gpu(device) else _INDICES
        with tf.device(device), tf.name_scope("place"):
            return packing.copy(local, kept)

    @functools.cached_property
    def _sends_indices(self):
        """Whether indices go to GPUs: those of tables at home would only come back.

        It looks through all layers, and batches are placed in each step.
        """
        context = self.context
        if is_gpu(context.plan.home) or context.model.run_eagerly:
            return True
        return not embeddings.tables(context.model)

    def preprocess(self, data: Any, training: bool) -> Any:
        """Returns a whole batch as the loss sees it, computed at home.

        Args:
            data: (x, y, sample_weight) of the batch.
            training: Whether this is a part of training.
        """
        data, preprocess = self.whole(data), self.context.preprocess
        if preprocess is None:
            return data
        with tf.device(self.context.plan.home):
            return preprocess(tf.nest.map_structure(batch.as_tensor, data), training)
