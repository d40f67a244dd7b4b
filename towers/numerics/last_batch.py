"""Keeps the batches that graphs have begun with last, in case one of them fails."""

import itertools
from typing import Any

import tensorflow as tf

from towers.collectives import batch
from towers.devices.names import HOST
from towers.loop import loop

_numbers = itertools.count()


class LastBatch:
    """The last batch of each kind of step, until somebody takes it.

    A graph reads its data itself, and each batch but once. They stay where they are, on
    the host; nothing is copied.
    """

    def __init__(self) -> None:
        # By the kind of step and the specs of a batch: such a batch, and where it is.
        self._kept: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {}

    def keep(self, step: str, data: Any) -> Any:
        """Has the graph being built keep its batch.

        Args:
            step: "train", "test" or "predict".
            data: The batch: a nest of tensors.

        Returns:
            The batch, which is there when it is kept.
        """
        if tf.executing_eagerly():
            return data
        tensors, specs = loop.flat(data), batch.specs(data)
        place = {
            "dtypes": [tensor.dtype for tensor in tensors],
            "shared_name": f"towers_last_batch_{next(_numbers)}",
        }
        _, place = self._kept.setdefault((step, str(specs)), (specs, place))
        with tf.device(HOST), tf.name_scope("last_batch"):
            with tf.control_dependencies([tf.raw_ops.StageClear(**place)]):
                name = place["shared_name"]
                kept = tf.raw_ops.Stage(values=tensors, shared_name=name)
            with tf.control_dependencies([kept]):
                return loop.pack(data, [*map(tf.identity, tensors)])

    def take(self, step: str) -> list[Any]:
        """Returns what is kept of a kind of step, and forgets it."""
        found = []
        for (kind, _), (specs, place) in self._kept.items():
            with tf.device(HOST):
                if kind == step and tf.raw_ops.StageSize(**place) > 0:
                    found.append(loop.pack(specs, tf.raw_ops.Unstage(**place)))
        return found
