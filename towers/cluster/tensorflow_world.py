"""The `World` of hosts that TensorFlow's collectives connect, in the graph.

On CPUs, TensorFlow has two collectives: all-reduce, around a ring over gRPC, and
all-gather of equally many rows. All others are made of these two. Collectives of one
host run one after another, in the order in which the graph has them.

An all-gather of unequal rows first gathers their numbers, and then pads the rows of
each host to as many as the most of any host. An all-to-all gathers what all hosts send
one another, so that its bytes grow with the square of the number of hosts; NCCL's would
not, but TensorFlow has none on CPUs.
"""

import contextlib
import itertools
import json
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import tensorflow as tf

from towers.cluster.hosts import Cluster
from towers.cluster.tensorflow_watch import HostWatch
from towers.devices.names import HOST
from towers.hosts import group
from towers.keras_adapter import cluster

T = TypeVar("T")

# Up to so many numbers, gradients are not rounded.
_SMALL = 2**13
# The integers whose bits TensorFlow sends in the place of numbers of these sizes.
_INTEGERS = {4: tf.int32, 8: tf.int64, 16: tf.int64}


class TensorFlowWorld(Cluster):
    """Hosts in a cluster of TensorFlow's; see `World`."""

    def __init__(self, names: Sequence[str], index: int, watch: HostWatch):
        """Takes the place of this host among others, and what follows their news."""
        super().__init__(names, index, watch)
        self._watch, self._exchanged = watch, itertools.count()

    def reduce_scatter(
        self, parts: Sequence[Sequence[tf.Tensor]], purpose: str
    ) -> list[tf.Tensor]:
        """See `World`. TensorFlow has no reduce-scatter on CPUs: all sums travel."""
        tensors = [tensor for of_host in parts for tensor in of_host]
        before = sum(map(len, parts[: self.index]))
        own = slice(before, before + len(parts[self.index]))
        rounded = [tensor for tensor in tensors if tensor.dtype == tf.float32]
        return self.all_reduce(tensors, purpose, rounded)[own]

    def gather_parts(
        self,
        mine: Sequence[tf.Tensor],
        like: Sequence[Sequence[tf.TensorSpec]],
        purpose: str,
    ) -> list[list[tf.Tensor]]:
        """See `World`."""
        gathered = [[*of_host] for of_host in like]
        with tf.device(HOST), tf.name_scope("hosts"):
            for dtype in dict.fromkeys(spec.dtype for h in like for spec in h):
                # All hosts send as many numbers as the one with the most.
                sizes = [
                    {
                        i: spec.shape.num_elements()
                        for i, spec in enumerate(of_host)
                        if spec.dtype == dtype
                    }
                    for of_host in like
                ]
                most = max(1, *(sum(of_host.values()) for of_host in sizes))
                own = [tf.reshape(mine[i], [-1]) for i in sizes[self.index]]
                room = most - sum(sizes[self.index].values())
                own.append(tf.zeros([room], dtype))
                whole = self._gather_equal(tf.concat(own, 0), purpose)
                for k, of_host in enumerate(sizes):
                    start = k * most
                    for i, size in of_host.items():
                        part = whole[start : start + size]
                        gathered[k][i] = tf.reshape(part, like[k][i].shape)
                        start += size
        return gathered

    def all_to_all(
        self,
        parts: Sequence[Sequence[tf.Tensor]],
        purpose: str,
        sizes: Any = None,
    ) -> list[list[tf.Tensor]]:
        """See `World`."""
        with tf.device(HOST), tf.name_scope("hosts"):
            counts = tf.stack(
                [[tf.shape(part, tf.int64)[0] for part in of_host] for of_host in parts]
            )
            # From whom, to whom, and of which tensor.
            every = self._gather_equal(counts[tf.newaxis], f"sizes of {purpose}")
            columns = [
                self._send_each(of_tensor, every[:, :, i], f"{purpose} {i}")
                for i, of_tensor in enumerate(zip(*parts, strict=True))
            ]
        return [[*of_host] for of_host in zip(*columns, strict=True)]

    def broadcast(self, tensors: Sequence[tf.Tensor], purpose: str) -> list[tf.Tensor]:
        """See `World`."""
        with tf.device(HOST), tf.name_scope("hosts"):
            if not all(tensor.shape.is_fully_defined() for tensor in tensors):
                ranks = [tf.rank(tensor) for tensor in tensors]
                sizes = tf.concat([tf.shape(t, tf.int64) for t in tensors], 0)
                sizes = self._first(sizes, f"shapes of {purpose}")
                shapes = tf.split(sizes, ranks, num=len(ranks))
            else:
                shapes = [tensor.shape for tensor in tensors]
            return [
                self._first_of_shape(tensor, shape, f"{purpose} {i}")
                for i, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True))
            ]

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

    def _sum_bucket(self, tensors, purpose, wire):
        """Adds flat tensors of one type."""
        sizes = [tensor.shape[0] for tensor in tensors]
        joined = tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0)
        own = joined.dtype
        if wire is not None and own == tf.float32 and sum(sizes) > _SMALL:
            joined = tf.cast(joined, wire)
        total = tf.cast(self._sum(joined, purpose), own)
        return [total] if len(tensors) == 1 else tf.split(total, sizes)

    def _rows(self, rows, purpose):
        """Puts the rows of all hosts together, the first host's first."""
        rows = tf.convert_to_tensor(rows)
        count = tf.shape(rows, tf.int64)[:1]
        counts = self._gather_equal(count, f"numbers of {purpose}")
        most = _rounded_up(tf.reduce_max(counts))
        whole = self._gather_equal(_padded(rows, most), purpose)
        count = tf.constant(self.count, tf.int64)
        shape = tf.concat([[count, most], tf.shape(rows, tf.int64)[1:]], 0)
        parts = tf.reshape(whole, shape)
        return tf.boolean_mask(parts, tf.sequence_mask(counts, most))

    def _send_each(self, parts, counts, purpose):
        """Sends each host its part of one tensor.

        Args:
            parts: The part for each host.
            counts: For each host, the number of rows that it sends each host.
            purpose: Name of the tensor.

        Returns:
            The part from each host.
        """
        most = _rounded_up(tf.reduce_max(counts))
        padded = tf.stack([_padded(part, most) for part in parts])
        whole = self._gather_equal(padded, purpose)
        first = self.index
        received = [
            whole[k * self.count + first, : counts[k, first]] for k in range(self.count)
        ]
        received[first] = parts[first]
        return received

    def _first_of_shape(self, tensor, shape, purpose):
        """Returns the first host's tensor, whose shape is known on all hosts."""
        if tensor.dtype == tf.string:
            raise ValueError(
                f"Received {purpose} of type string on {self.count} hosts; expected "
                "tensors of numbers, as others cannot be sent between hosts."
            )
        bits, of_bits = _as_bits(tensor)
        # Bits of large numbers have one axis more.
        rest = tf.shape(bits, tf.int64)[tf.rank(tensor) :]
        shape = tf.concat([tf.cast(shape, tf.int64), rest], 0)
        if self.index > 0:
            # Hosts know alike which sizes are static.
            bits = tf.ensure_shape(tf.zeros(shape, bits.dtype), bits.shape)
        sent = of_bits(tf.reshape(self._first(tf.reshape(bits, [-1]), purpose), shape))
        sent.set_shape(tensor.shape)
        return sent

    def _first(self, integers, purpose):
        """Returns the first host's flat tensor of integers."""
        # TensorFlow's own broadcast knows no order of collectives.
        if self.index > 0:
            integers = tf.zeros_like(integers)
        return self._sum(integers, purpose)

    def _sum(self, flat, purpose):
        """Adds a flat tensor over all hosts; the graph may have to find its size."""
        size = flat.shape.num_elements()
        if size == 0:
            return flat
        if size is None:
            # TensorFlow cannot add empty tensors.
            flat = tf.concat([flat, tf.zeros([1], flat.dtype)], 0)
        key = self._key(flat, f"sum of {purpose}")
        with self._call(purpose):
            total = cluster.all_reduce(flat, self.count, key, self._order)
        return total[:-1] if size is None else total

    def _gather_equal(self, rows, purpose):
        """Concatenates equally many rows of each host, bit for bit."""
        bits, of_bits = _as_bits(rows)
        flat = tf.reshape(bits, [-1])
        key = self._key(flat, f"rows of {purpose}")
        with self._call(purpose):
            whole = cluster.all_gather(flat, self.count, key, self._order)
        # Bits of large numbers have one axis more.
        shape = bits.shape if bits.shape.is_fully_defined() else tf.shape(bits)
        whole = of_bits(tf.reshape(whole, tf.concat([[-1], shape[1:]], 0)))
        known = rows.shape[0] and self.count * rows.shape[0]
        whole.set_shape([known, *rows.shape[1:]])
        return whole

    def _key(self, tensor, purpose):
        """Returns a key that belongs to a purpose, a type and a size.

        A counter could differ between hosts: one of them may trace a function again.
        """
        of_kind = f"{purpose} {tensor.dtype.name}"
        size = tensor.shape.num_elements()
        if not tf.executing_eagerly():
            self._watch.collectives.append(f"{purpose} ({size} {tensor.dtype.name})")
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
            self._watch.begin(purpose)
            yield
            self._watch.end()


def _as_bits(tensor):
    """Returns a tensor of integers with the same bits, and the way back."""
    dtype = tensor.dtype
    if dtype in (tf.int32, tf.int64):
        return tensor, tf.identity
    if dtype.size in _INTEGERS:
        bits = tf.bitcast(tensor, _INTEGERS[dtype.size])
        return bits, lambda sent: tf.bitcast(sent, dtype)
    if dtype.is_floating:
        narrow = tf.bitcast(tensor, tf.int16)
        return tf.cast(narrow, tf.int32), lambda sent: tf.bitcast(
            tf.cast(sent, tf.int16), dtype
        )
    # Booleans, and integers of 8 or 16 bits.
    return tf.cast(tensor, tf.int32), lambda sent: tf.cast(sent, dtype)


def _padded(rows, most):
    """Appends zeros, so that there are as many rows as the most of any host."""
    room = most - tf.shape(rows, tf.int64)[0]
    ends = tf.scatter_nd([[0, 1]], [room], [rows.shape.rank, 2])
    padded = tf.pad(rows, ends)
    padded.set_shape([None, *rows.shape[1:]])
    return padded


def _rounded_up(count):
    """Returns one of a few sizes, as TensorFlow keeps a record of each that it sends.

    There are eight between a power of two and the next. The least is 1, as TensorFlow
    cannot gather empty tensors.
    """
    count = tf.maximum(count, 1)
    powers = tf.constant([2**k for k in range(4, 62)], tf.int64)
    bits = tf.reduce_sum(tf.cast(count >= powers, tf.int64))
    unit = tf.bitwise.left_shift(tf.ones([], tf.int64), bits)
    return -(-count // unit) * unit
