"""The `World` of hosts that TensorFlow's collectives connect, in the graph.

On CPUs, TensorFlow has two collectives: all-reduce, around a ring over gRPC, and
all-gather of equally many rows. Hosts swap tensors by an all-gather, so its bytes grow
with the square of the number of hosts. Collectives of one host run one after another,
in the order in which the graph has them.
"""

import contextlib
import itertools
import json
import zlib
from collections.abc import Sequence
from typing import TypeVar

import tensorflow as tf

from towers.cluster.hosts import Cluster, as_integers
from towers.cluster.tensorflow_watch import HostWatch
from towers.hosts import group
from towers.keras_adapter import cluster, runtime

T = TypeVar("T")


class TensorFlowWorld(Cluster):
    """Hosts in a cluster of TensorFlow's; see `World`."""

    def __init__(self, names: Sequence[str], index: int, watch: HostWatch):
        """Takes the place of this host among others, and what follows their news."""
        super().__init__(names, index, watch)
        self._group = runtime.of_tasks(self.count)
        self._watch, self._exchanged = watch, itertools.count()

    @property
    def connects_devices(self) -> bool:
        """See `World`. To compress, gradients go through the host's memory."""
        return self.wire is None

    def exchange(self, value: T) -> list[T]:
        """See `World`."""
        number = next(self._exchanged)
        with self._call("what each host tells"):
            cluster.write(f"exchange/{number}/{self.index}", json.dumps(value))
            values = [self._read(f"exchange/{number}/{k}") for k in range(self.count)]
        if number:
            # All have come here, so all have read what came before.
            cluster.remove(f"exchange/{number - 1}/{self.index}")
        return [json.loads(text) for text in values]

    def _read(self, key):
        while (text := cluster.read(key, 1.0)) is None:
            if self._watch.broken is not None:
                raise self._watch.broken
        return text

    def _sums(self, tensors, purpose):
        """See `Cluster`."""
        if len(tensors) == 1:
            return [self._sum(tensors[0], purpose)]
        sizes = [tensor.shape[0] for tensor in tensors]
        return tf.split(self._sum(tf.concat(tensors, 0), purpose), sizes)

    def _sum(self, flat, purpose):
        """Adds a flat tensor over all hosts; the graph may have to find its size."""
        size = flat.shape.num_elements()
        if size == 0:
            return flat
        some = _not_empty(flat)
        key = self._key(some, f"sum of {purpose}")
        with self._call(purpose):
            total = runtime.all_reduce(some, self._group, key, self._order)
        return total[: tf.size(flat)] if size is None else total

    def _sum_rounded(self, flat, purpose):
        """Adds numbers of 16 bits, and rounds each sum on its way around the ring."""
        return self._sum(flat, purpose)

    def _gather_equal(self, rows, purpose):
        """See `Cluster`."""
        bits, of_bits = as_integers(rows)
        flat, size = _not_empty(tf.reshape(bits, [-1])), tf.size(bits, tf.int64)
        key = self._key(flat, f"rows of {purpose}")
        with self._call(purpose):
            whole = runtime.all_gather(flat, self._group, key, self._order)
        # Bits of large numbers have one axis more.
        shape = tf.shape(bits, tf.int64) * [self.count, *[1] * (bits.shape.rank - 1)]
        whole = of_bits(tf.reshape(whole[: self.count * size], shape))
        known = rows.shape[0] and self.count * rows.shape[0]
        whole.set_shape([known, *rows.shape[1:]])
        return whole

    def _swap(self, parts, purpose):
        """See `Cluster`."""
        return self._gather_equal(parts, purpose)[self.index :: self.count]

    def _key(self, tensor, purpose):
        """Returns a key that belongs to a purpose, a type and a size.

        A counter could differ between hosts: one of them may trace a function again.
        """
        of_kind = f"{purpose} {tensor.dtype.name}"
        size = tensor.shape.num_elements()
        if not tf.executing_eagerly():
            self._watch.collectives[f"{purpose} ({size} {tensor.dtype.name})"] = None
        size = tf.size(tensor, tf.int64) if size is None else size
        key = (zlib.crc32(of_kind.encode()) + size * 2654435761) % (2**31 - 1)
        return key if isinstance(key, int) else tf.cast(key, tf.int32)

    @contextlib.contextmanager
    def _call(self, purpose):
        """Inside, this host is in a collective, if it runs eagerly."""
        if not tf.executing_eagerly():
            yield
            return
        with group.explained():
            outer = self._watch.begin(purpose)
            yield
            self._watch.end(outer)


def _not_empty(flat):
    """Returns one zero for no number: TensorFlow neither adds nor gathers nothing."""
    size = flat.shape.num_elements()
    if size:
        return flat
    zeros = tf.zeros([tf.cast(tf.size(flat) == 0, tf.int32)], flat.dtype)
    some = tf.concat([flat, zeros], 0)
    some.set_shape([1 if size == 0 else None])
    return some
