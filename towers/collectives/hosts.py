"""What hosts that train together put together: sums, rows, and what they agree on.

A host is a process with towers of its own. All hosts build the same graphs, so they
meet in the same sums, one after another. With one host no operation is made.
"""

import collections
import functools
import json
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from towers.cluster import server
from towers.devices import HOST
from towers.keras_adapter import runtime

T = TypeVar("T")

# As in PyTorch's DistributedDataParallel (Li et al. 2020): large enough for the
# network, small enough to begin while the rest of the gradients are computed.
_BUCKET_BYTES = 25 * 2**20
# How often a host that waits for another looks whether one has failed.
_LOOK_S = 1.0
# Integers are added as parts of 16 bits in the buffer of the floats: a sum of their own
# would take as long as the whole buffer. It is exact for up to 256 hosts.
_SHIFTS, _MASK, MOST_HOSTS = (0, 16, 32, 48), 2**16 - 1, 256
_OF_SIZE = {tf.float32: tf.int32, tf.float64: tf.int64}


class OneHost:
    """A host that trains by itself.

    Attributes:
        count: Number of hosts.
        index: Which of them this one is.
        names: What to call each in sentences.
    """

    count, index, names = 1, 0, ("this host",)

    def sum(self, tensors: T, purpose: str) -> T:
        """Adds a nest of tensors over all hosts.

        Args:
            tensors: Tensors, `tf.IndexedSlices` or `None`. All but the rows of slices
                have the same shapes on all hosts.
            purpose: What they are, in a word; the same on all hosts.
        """
        return tensors

    def gather(self, tensors: T, start: Any, total: Any, purpose: str) -> T:
        """Puts together the rows that the hosts have of a nest of tensors.

        Args:
            tensors: Dense tensors of numbers; `None` and scalars stay.
            start: Which row the first one of this host is.
            total: Number of rows of all hosts.
            purpose: As for `sum`.

        Raises:
            ValueError: A tensor is of another kind.
        """
        return tensors

    def first(self, tensors: Sequence[tf.Tensor], purpose: str) -> list[tf.Tensor]:
        """Returns what the first host has of tensors, to the bit.

        Args:
            tensors: Dense tensors of known shapes.
            purpose: As for `sum`.
        """
        return list(tensors)

    def send_files(self, folder: str | None, to: str) -> str | None:
        """Copies a folder of the first host's into a folder of each other host's.

        Args:
            folder: The first host's; `None` for nothing. Others need not say it.
            to: Where each other host puts it, under the same name.

        Returns:
            Where it lies on this host.
        """
        return folder

    def broadcast(self, value: T) -> T:
        """Returns what the first host has: anything that JSON can hold."""
        return value

    def tell_all(self, value: T) -> list[T]:
        """Returns what each host has: anything that JSON can hold."""
        return [value]


ONE_HOST = OneHost()


class Cluster(OneHost):
    """Hosts that TensorFlow's collectives connect."""

    def __init__(self, names: Sequence[str], index: int, timeout_s: float):
        """Takes the place of this host among those of a cluster that it has joined.

        `timeout_s` is how long it waits for what another host tells.
        """
        self.names, self.count = tuple(names), len(names)
        self.index, self._timeout_s = index, timeout_s
        self._told = 0
        with tf.init_scope(), tf.device(HOST):
            # All sums take it, and so run in the order in which they were made.
            self._order = tf.Variable(0.0, trainable=False, name="order_of_collectives")

    def sum(self, tensors: T, purpose: str) -> T:
        """See `OneHost`. Numbers of 16 bits are added in float32."""
        # Slices are no composites here, as their rows differ between hosts.
        flat = tf.nest.flatten(tensors)
        slices = [
            i for i, each in enumerate(flat) if isinstance(each, tf.IndexedSlices)
        ]
        dense = [
            i for i, each in enumerate(flat) if each is not None and i not in slices
        ]
        with tf.device(HOST), tf.name_scope("hosts"):
            if slices:
                joined = self._join_slices([flat[i] for i in slices], purpose)
                for i, each in zip(slices, joined, strict=True):
                    flat[i] = each
            sums = self._sum_dense([flat[i] for i in dense], purpose)
        for i, each in zip(dense, sums, strict=True):
            flat[i] = each
        return tf.nest.pack_sequence_as(tensors, flat)

    def gather(self, tensors: T, start: Any, total: Any, purpose: str) -> T:
        """See `OneHost`."""

        def rows(tensor):
            if tensor is None or tensor.shape.rank == 0:
                return tensor
            if not isinstance(tensor, tf.Tensor) or tensor.dtype == tf.string:
                raise ValueError(
                    f"Received {purpose} of type {type(tensor).__name__}, "
                    f"{tensor.dtype.name}, on {self.count} hosts; expected dense "
                    "tensors of numbers, as others cannot be sent between hosts."
                )
            return self._placed(tensor, start, total, purpose)

        with tf.device(HOST), tf.name_scope("hosts"):
            return tf.nest.map_structure(rows, tensors)

    def first(self, tensors: Sequence[tf.Tensor], purpose: str) -> list[tf.Tensor]:
        """See `OneHost`."""
        values = list(tensors)
        with tf.device(HOST), tf.name_scope("hosts"):
            bits = [*map(bits_of, tensors)]
            for places in _buckets(bits):
                sent = [tf.reshape(bits[i], [-1]) for i in places]
                buffer = tf.concat(sent, 0)
                if self.index > 0:
                    buffer = tf.zeros_like(buffer)
                total = self._sum_one(buffer, f"{purpose} {places[0]}")
                parts = tf.split(total, [part.shape[0] for part in sent])
                for i, part in zip(places, parts, strict=True):
                    shaped = tf.reshape(part, tensors[i].shape)
                    values[i] = _of_bits(shaped, tensors[i])
        return values

    def send_files(self, folder: str | None, to: str) -> str | None:
        """See `OneHost`."""
        names = sorted(os.listdir(folder)) if self.index == 0 and folder else []
        sizes = [os.path.getsize(os.path.join(folder, name)) for name in names]
        told = self.broadcast([folder and os.path.basename(folder), names, sizes])
        if told[0] is None:
            return None
        if self.index > 0:
            folder = os.path.join(to, told[0])
            os.makedirs(folder, exist_ok=True)
        for name, size in zip(*told[1:], strict=True):
            path = os.path.join(folder, name)
            # Of whole numbers, which are sent as they are.
            content = np.zeros(-(-size // 4), np.int32)
            if self.index == 0:
                with open(path, "rb") as file:
                    file.readinto(memoryview(content).cast("B")[:size])
            (content,) = self.first([tf.constant(content)], "file")
            if self.index > 0:
                with open(path, "wb") as file:
                    file.write(memoryview(content.numpy()).cast("B")[:size])
        return folder

    def broadcast(self, value: T) -> T:
        """See `OneHost`."""
        self._told += 1
        key = f"broadcast/{self._told}"
        if self.index == 0:
            _write(key, value)
            return value
        return self._read(key)

    def tell_all(self, value: T) -> list[T]:
        """See `OneHost`."""
        self._told += 1
        _write(f"tell/{self._told}/{self.index}", value)
        return [self._read(f"tell/{self._told}/{k}") for k in range(self.count)]

    def _read(self, key):
        """Waits for what another host writes, as long as no host has failed."""
        until_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return json.loads(runtime.read_key(key, _LOOK_S))
            except tf.errors.OpError as error:
                late = isinstance(error, tf.errors.DeadlineExceededError)
                server.check(wait=not late)
                if not late or time.monotonic() > until_s:
                    raise

    def _sum_dense(self, tensors, purpose):
        sums = [None] * len(tensors)
        floats = [*map(_as_floats, tensors)]
        for places in _buckets(floats):
            parts = [floats[i] for i in places]
            # One bucket of a purpose is told from the next by its place.
            total = self._sum_one(tf.concat(parts, 0), f"{purpose} {places[0]}")
            totals = tf.split(total, [part.shape[0] for part in parts])
            for i, part in zip(places, totals, strict=True):
                sums[i] = _of_floats(part, tensors[i])
        return sums

    def _sum_one(self, buffer, purpose):
        """Adds a buffer, whose size the graph may have to find out."""
        size = buffer.shape.num_elements()
        if size is None:
            size = tf.size(buffer, tf.int64)
        key = _key(f"{purpose} {buffer.dtype.name}", size)
        return runtime.collective_sum(buffer, self.count, key, self._order.handle)

    def _join_slices(self, slices, purpose):
        """Joins the rows of all hosts, variable by variable, the first host's first."""
        mine = tf.stack([tf.size(each.indices, tf.int64) for each in slices])
        counts = tf.scatter_nd([[self.index]], [mine], [self.count, len(slices)])
        counts = self._sum_one(tf.reshape(counts, [-1]), f"rows of {purpose}")
        counts = tf.reshape(counts, [self.count, len(slices)])
        starts = tf.reduce_sum(counts[: self.index], axis=0)
        totals = tf.reduce_sum(counts, axis=0)
        joined = []
        for k, each in enumerate(slices):
            name = f"{purpose} {k}"
            place = starts[k], totals[k]
            joined.append(
                tf.IndexedSlices(
                    self._placed(each.values, *place, f"values of {name}"),
                    self._placed(each.indices, *place, f"indices of {name}"),
                    each.dense_shape,
                )
            )
        return joined

    def _placed(self, rows, start, total, purpose):
        """Adds zeros and the rows of this host, at their place among those of all."""
        wide, start = bits_of(rows), tf.cast(start, tf.int64)
        room = tf.cast(_rounded_up(total), tf.int64)
        before = tf.stack([start, room - start - tf.shape(wide, tf.int64)[0]])
        others = tf.zeros([wide.shape.rank - 1, 2], tf.int64)
        placed = tf.pad(wide, tf.concat([[before], others], axis=0))
        known = total if isinstance(total, int) else None
        placed.set_shape([known, *wide.shape[1:]])
        flat = self._sum_one(tf.reshape(placed, [-1]), f"{purpose} {wide.shape[1:]}")
        whole = tf.reshape(flat, tf.shape(placed))[:total]
        whole = _of_bits(whole, rows)
        whole.set_shape([known, *rows.shape[1:]])
        return whole


def _write(key, value):
    try:
        runtime.write_key(key, json.dumps(value))
    except tf.errors.OpError:
        # It is the first host that keeps what is written.
        server.check(wait=True)
        raise


def _buckets(tensors: Sequence[tf.Tensor]) -> Iterator[list[int]]:
    """Yields the places of tensors of one type that are added in one buffer.

    The last gradients come first, as the backward pass computes them first.
    """
    by_type = collections.defaultdict(list)
    for i in reversed(range(len(tensors))):
        by_type[tensors[i].dtype].append(i)
    for dtype, every in by_type.items():
        places, size = [], 0
        for i in every:
            places.append(i)
            size += tensors[i].shape.num_elements() * dtype.size
            if size >= _BUCKET_BYTES:
                yield places
                places, size = [], 0
        if places:
            yield places


def _as_floats(tensor):
    """A flat tensor of floats to add; of an integer, its four parts of 16 bits."""
    flat = tf.reshape(tensor, [-1])
    if flat.dtype.is_floating:
        return flat if flat.dtype == tf.float64 else tf.cast(flat, tf.float32)
    flat = tf.cast(flat, tf.int64)
    parts = [
        tf.bitwise.bitwise_and(tf.bitwise.right_shift(flat, shift), _MASK)
        for shift in _SHIFTS
    ]
    return tf.cast(tf.concat(parts, 0), tf.float32)


def _of_floats(total, like):
    """What `_as_floats` made of a tensor, added up."""
    if not like.dtype.is_floating:
        parts = tf.split(tf.cast(total, tf.int64), len(_SHIFTS))
        # As integers are added, what is too large is lost.
        total = tf.add_n(
            tf.bitwise.left_shift(part, shift)
            for part, shift in zip(parts, _SHIFTS, strict=True)
        )
    return tf.cast(tf.reshape(total, like.shape), like.dtype)


def bits_of(rows: tf.Tensor) -> tf.Tensor:
    """Returns rows as a type of which nothing is lost when zeros are added."""
    if rows.dtype in _OF_SIZE:
        # Of floats, minus zero would become zero.
        return tf.bitcast(rows, _OF_SIZE[rows.dtype])
    return tf.cast(rows, tf.float32 if rows.dtype.is_floating else tf.int64)


def _of_bits(whole, rows):
    if rows.dtype in _OF_SIZE:
        return tf.bitcast(whole, rows.dtype)
    return tf.cast(whole, rows.dtype)


def _rounded_up(rows: Any) -> Any:
    """A size of which there are few: TensorFlow keeps a record of each that it adds.

    Of a number that is known there are few already. Of others, there are eight between
    a power of two and the next.
    """
    if isinstance(rows, int):
        return rows
    rows = tf.cast(rows, tf.int64)
    powers = tf.constant([2**k for k in range(4, 62)], tf.int64)
    bits = tf.reduce_sum(tf.cast(rows >= powers, tf.int64))
    unit = tf.bitwise.left_shift(tf.ones([], tf.int64), bits)
    return -(-rows // unit) * unit


def _key(purpose: str, size: Any) -> Any:
    """A key that belongs to a purpose and a size: a counter could differ by host."""
    first = zlib.crc32(purpose.encode())
    key = (first + size * 2654435761) % (2**31 - 1)
    return key if isinstance(key, int) else tf.cast(key, tf.int32)


@functools.cache
def this_host(timeout_s: float = 600.0) -> OneHost:
    """Returns this process's place among the hosts that it trains with."""
    membership = server.joined()
    if membership is None:
        return ONE_HOST
    return Cluster(membership.names, membership.rank, timeout_s)
