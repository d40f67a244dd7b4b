"""Keeps the last batch of each step, in case one of its stages fails."""

import itertools
from typing import Any

import tensorflow as tf

from towers.collectives import batch
from towers.devices.names import HOST
from towers.loop import loop

_numbers = itertools.count()


class LastBatch:
    """The last batch of each kind of step, until `take` removes it.

    A graph reads its data itself, and reads each batch only once. Kept tensors stay on
    the host; nothing is copied.
    """

    def __init__(self) -> None:
        # Maps (kind of step, specs) to specs, and the attributes of the staging area.
        self._kept: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {}

    def keep(self, step: str, data: Any) -> Any:
        """Adds operations that keep the batch to the graph being built.

        Args:
            step: "train", "test" or "predict".
            data: The batch: a nest of tensors.

        Returns:
            The batch, which is available once it is kept.
        """
        if tf.executing_eagerly():
            return data
        tensors, specs = loop.flat(data), batch.specs(data)
        staging = {
            "dtypes": [tensor.dtype for tensor in tensors],
            "shared_name": f"towers_last_batch_{next(_numbers)}",
        }
        _, staging = self._kept.setdefault((step, str(specs)), (specs, staging))
        with tf.device(HOST), tf.name_scope("last_batch"):
            with tf.control_dependencies([tf.raw_ops.StageClear(**staging)]):
                name = staging["shared_name"]
                kept = tf.raw_ops.Stage(values=tensors, shared_name=name)
            with tf.control_dependencies([kept]):
                return loop.pack(data, [*map(tf.identity, tensors)])

    def take(self, step: str) -> list[Any]:
        """Returns the kept batches of a kind of step, and drops them."""
        batches = []
        for (kind, _), (specs, staging) in self._kept.items():
            with tf.device(HOST):
                if kind == step and tf.raw_ops.StageSize(**staging) > 0:
                    batches.append(loop.pack(specs, tf.raw_ops.Unstage(**staging)))
        return batches
