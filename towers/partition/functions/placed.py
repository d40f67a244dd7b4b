"""Batches whose rows are copied to the towers' devices ahead of a step."""

import collections
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from towers.collectives import batch, packing
from towers.collectives.world import World
from towers.devices.names import HOST
from towers.plan import Plan
from towers.program.features import feature


class PlacedBatch(NamedTuple):
    """A batch that was split and copied to the towers.

    Attributes:
        local_batches: Each tower's part of the batch, on the tower's device.
        size: Number of examples of the whole batch.
        digest: A digest of the batch, which must be the same on all hosts; `None` with
            one host.
    """

    local_batches: tuple[Any, ...]
    size: tf.Tensor | int
    digest: tf.Tensor | None = None


def place(plan: Plan, data: Any) -> PlacedBatch:
    """Splits a batch, and copies each tower's rows to its device."""
    batch.check_rows(data)
    size, local = batch.batch_size(data), []
    for device, bounds in zip(plan.devices, plan.bounds(size), strict=True):
        with tf.device(device):
            local.append(packing.copy(batch.take(data, *bounds)))
    if plan.hosts.count == 1:
        return PlacedBatch(tuple(local), size)
    with tf.device(HOST):
        return PlacedBatch(tuple(local), size, feature("loop.agreement").digest(data))


def prefetch(
    plan: Plan, dataset: Iterable[Any], count: int
) -> Iterator[tuple[PlacedBatch]]:
    """Yields the batches of a data set, and places `count` more of them ahead."""
    waiting = collections.deque()
    for data in dataset:
        data = data if isinstance(data, tuple) else (data,)
        placed = place(plan, tf.nest.map_structure(batch.as_tensor, data))
        # In a tf.function, a number that varies must be a tensor.
        size = tf.convert_to_tensor(placed.size, tf.int32)
        waiting.append((placed._replace(size=size),))
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


def same_batch(hosts: World, placed: PlacedBatch) -> tf.Operation:
    """Checks, in the graph being built, that all hosts have the same global batch."""
    with tf.device(HOST):
        signature = tf.stack([tf.cast(placed.size, tf.float32), placed.digest])
        signatures = hosts.stack(signature, "batch")
        return tf.debugging.Assert(
            tf.reduce_all(signatures == signatures[0]),
            [
                "Hosts have different batches; give all hosts the same global "
                "batches, in the same order. Rows and digest, by host:",
                signatures,
            ],
            summarize=2 * hosts.count,
        )
