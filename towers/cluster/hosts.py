"""The connected hosts that this process trains with, as a `World`.

An engine carries what hosts send one another: TensorFlow's collectives in
`tensorflow_world.py`, MPI in `mpi_world.py`. An engine has three collectives of tensors
of equal sizes: it adds them, gathers them, or swaps them. The others are made of these
three, here.

To gather unequal rows, hosts first gather their numbers. Each then pads its rows to as
many as the most of any host.
"""

import abc
import copy
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from towers.collectives.packing import BUCKET_BYTES, buckets, narrowed, widened
from towers.collectives.world import COMPRESSIONS
from towers.devices.names import HOST
from towers.hosts import group
from towers.program import small_file

T = TypeVar("T")
# The bytes of a file that are sent at once, a multiple of the size of int32.
_BLOCK_BYTES = 2**24
# Up to so many numbers, gradients are not rounded.
_SMALL = 2**13
# The integers whose bits are sent in the place of numbers of these sizes.
_INTEGERS = {4: tf.int32, 8: tf.int64, 16: tf.int64}


class Cluster(abc.ABC):
    """Hosts that are connected; an engine is a subclass.

    Attributes:
        names: See `World`.
        communicator: See `World`.
        connects_devices: See `World`.
        wire: The type in which gradients are sent; `None` for their own.
    """

    connects_devices = False

    def __init__(self, names: Sequence[str], index: int, communicator: Any):
        """Takes the names of all hosts, and the index of this one."""
        self.count, self.index = len(names), index
        self.names, self.communicator = tuple(names), communicator
        self.wire: np.dtype | None = None
        with tf.init_scope(), tf.device(HOST):
            # All collectives write it, and so run in the order in which they were made.
            self._order = tf.Variable(0.0, trainable=False, name="order_of_collectives")

    @abc.abstractmethod
    def _sums(self, tensors: Sequence[tf.Tensor], purpose: str) -> list[tf.Tensor]:
        """Adds flat tensors of one type over all hosts, with the same bits on all."""

    @abc.abstractmethod
    def _gather_equal(self, rows: tf.Tensor, purpose: str) -> tf.Tensor:
        """Concatenates as many rows of each host, at least one, bit for bit."""

    @abc.abstractmethod
    def _swap(self, parts: tf.Tensor, purpose: str) -> tf.Tensor:
        """Sends each host `parts[k]`; returns what each host has sent this one."""

    @abc.abstractmethod
    def exchange(self, value: T) -> list[T]:
        """See `World`."""

    def compressing(self, compression: str) -> "Cluster":
        """See `World`."""
        same = copy.copy(self)
        same.wire = COMPRESSIONS[compression]
        return same

    def overlaps(self, size: int) -> bool:
        """See `World`."""
        return size > BUCKET_BYTES

    def all_reduce(
        self, tensors: T, purpose: str, compressible: Sequence[tf.Tensor] = ()
    ) -> T:
        """See `World`. Numbers of 16 bits are added in float32."""
        # Slices are no composites here, as their rows differ between hosts.
        flat = tf.nest.flatten(tensors)
        dense, may_round = [], {*map(id, compressible)}
        with tf.device(HOST), tf.name_scope("hosts"):
            for i, tensor in enumerate(flat):
                if isinstance(tensor, tf.IndexedSlices):
                    flat[i] = self._join(tensor, f"{purpose} {i}")
                elif tensor is not None:
                    self._check_size(tensor, purpose)
                    dense.append(i)
            wide = [widened(flat[i]) for i in dense]
            wires = [self.wire if id(flat[i]) in may_round else None for i in dense]
            for indices in buckets(wide, wires):
                # The first index tells a bucket of a purpose from the next.
                name = f"{purpose} {indices[0]}"
                parts = [wide[k] for k in indices]
                totals = self._sum_bucket(parts, name, wires[indices[0]])
                for k, part in zip(indices, totals, strict=True):
                    flat[dense[k]] = narrowed(part, flat[dense[k]])
        return tf.nest.pack_sequence_as(tensors, flat)

    def reduce_scatter(
        self, parts: Sequence[Sequence[tf.Tensor]], purpose: str
    ) -> list[tf.Tensor]:
        """See `World`. All sums travel: TensorFlow adds no parts on CPUs."""
        tensors = [tensor for of_host in parts for tensor in of_host]
        before = sum(map(len, parts[: self.index]))
        own = slice(before, before + len(parts[self.index]))
        rounded = [tensor for tensor in tensors if tensor.dtype == tf.float32]
        return self.all_reduce(tensors, purpose, rounded)[own]

    def all_gather(self, tensors: T, total: Any, purpose: str) -> T:
        """See `World`."""

        def rows(tensor):
            if tensor is None or tensor.shape.rank == 0:
                return tensor
            if not isinstance(tensor, tf.Tensor) or tensor.dtype == tf.string:
                raise ValueError(
                    f"Received {purpose} of type {type(tensor).__name__}, "
                    f"{tensor.dtype.name}, on {self.count} hosts; expected dense "
                    "tensors of numbers, as others cannot be sent between hosts."
                )
            whole = self._rows(tensor, purpose)
            known = total if isinstance(total, int) else None
            whole.set_shape([known, *tensor.shape[1:]])
            return whole

        with tf.device(HOST), tf.name_scope("hosts"):
            return tf.nest.map_structure(rows, tensors)

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

    def stack(self, tensor: tf.Tensor, purpose: str) -> tf.Tensor:
        """See `World`."""
        return self.all_gather(tensor[tf.newaxis], self.count, purpose)

    def all_to_all(
        self, parts: Sequence[Sequence[tf.Tensor]], purpose: str
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

    def send_files(self, folder: str | None, to: str) -> str | None:
        """See `World`."""
        own = None
        if self.index == 0 and folder:
            sizes = {
                name: os.path.getsize(os.path.join(folder, name))
                for name in sorted(os.listdir(folder))
                if os.path.isfile(os.path.join(folder, name))
            }
            own = [os.path.basename(folder), sizes]
        if (listed := self.broadcast_value(own)) is None:
            return None
        name, sizes = _checked_files(listed)
        if self.index > 0:
            folder = os.path.join(to, name)
            os.makedirs(folder, exist_ok=True)
        for name, size in sizes.items():
            with open(os.path.join(folder, name), "wb" if self.index else "rb") as file:
                for start in range(0, size, _BLOCK_BYTES):
                    length = min(_BLOCK_BYTES, size - start)
                    # Integers of 4 bytes are sent as they are, and bytes are not.
                    block = np.zeros(-(-length // 4), np.int32)
                    if self.index == 0:
                        file.readinto(memoryview(block).cast("B")[:length])
                    with group.explained():
                        (sent,) = self.broadcast([tf.constant(block)], "file")
                    if self.index > 0:
                        file.write(memoryview(sent.numpy()).cast("B")[:length])
        return folder

    def broadcast_value(self, value: T) -> T:
        """See `World`."""
        return self.exchange(value if self.index == 0 else None)[0]

    def _sum_bucket(self, tensors, purpose, wire):
        """Adds flat tensors of one type, which are rounded to the type `wire`, if any.

        Empty tensors stay.
        """
        sizes = [tensor.shape[0] for tensor in tensors]
        if wire is None or tensors[0].dtype != tf.float32 or sum(sizes) <= _SMALL:
            return self._sums(tensors, purpose)
        rounded = tf.cast(tf.concat(tensors, 0), wire)
        return tf.split(tf.cast(self._sum_rounded(rounded, purpose), tf.float32), sizes)

    def _sum_rounded(self, flat, purpose):
        """Adds numbers of 16 bits in float32; each host adds a part of them."""
        size = flat.shape[0]
        most = -(-size // self.count)
        parts = tf.concat([flat, tf.zeros([most * self.count - size], flat.dtype)], 0)
        parts = self._swap(tf.reshape(parts, [self.count, most]), f"parts of {purpose}")
        total = tf.reduce_sum(tf.cast(parts, tf.float32), 0)
        return self._gather_equal(tf.cast(total, flat.dtype), purpose)[:size]

    def _check_size(self, tensor, purpose):
        if not tf.TensorShape(tensor.shape).is_fully_defined():
            raise ValueError(
                f"Received {purpose} with a sum of shape {tensor.shape} on "
                f"{self.count} hosts; expected sizes that are known before a batch "
                "is, so give the model inputs of fixed sizes, or train on one host."
            )

    def _join(self, slices, purpose):
        """Joins the rows of all hosts, the first host's first."""
        return tf.IndexedSlices(
            self._rows(slices.values, f"values of {purpose}"),
            self._rows(slices.indices, f"indices of {purpose}"),
            slices.dense_shape,
        )

    def _rows(self, rows, purpose):
        """Puts the rows of all hosts together, the first host's first."""
        rows = tf.convert_to_tensor(rows)
        own = tf.shape(rows, tf.int64)
        shapes = self._gather_equal(own[tf.newaxis], f"shapes of {purpose}")
        counts, most = shapes[:, 0], _rounded_up(tf.reduce_max(shapes[:, 0]))
        # A host without rows may not know the other sizes.
        sizes = tf.reduce_max(shapes, 0)[1:]
        rows = tf.reshape(rows, tf.concat([own[:1], sizes], 0))
        rows = tf.ensure_shape(rows, [None, *rows.shape[1:]])
        whole = self._gather_equal(_padded(rows, most), purpose)
        shape = tf.concat([[tf.constant(self.count, tf.int64), most], sizes], 0)
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
        whole = self._swap(padded, purpose)
        received = [whole[k, : counts[k, self.index]] for k in range(self.count)]
        received[self.index] = parts[self.index]
        return received

    def _first_of_shape(self, tensor, shape, purpose):
        """Returns the first host's tensor, whose shape is known on all hosts."""
        if tensor.dtype == tf.string:
            raise ValueError(
                f"Received {purpose} of type string on {self.count} hosts; expected "
                "tensors of numbers, as others cannot be sent between hosts."
            )
        bits, of_bits = as_integers(tensor)
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
        """Returns the first host's flat tensor of integers.

        It is a sum, as TensorFlow's own broadcast knows no order of collectives.
        """
        if self.index > 0:
            integers = tf.zeros_like(integers)
        return self._sums([integers], purpose)[0]


def as_integers(
    tensor: tf.Tensor,
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns integers of 32 or 64 bits for a tensor of numbers, bit for bit.

    Returns:
        The integers, and the function that makes the tensor of them again. Integers
        for numbers of 128 bits have one axis more.
    """
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


def _checked_files(listed: Any) -> tuple[str, dict[str, int]]:
    """Returns a folder's name and the sizes of its files, as the first host tells them.

    Raises:
        ValueError: A name would lead out of the folder, or nobody of ours says this.
    """
    try:
        folder, sizes = listed
        names = [folder, *sizes]
        good = all(type(size) is int and size >= 0 for size in sizes.values())
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError("The first host sends something else than files.") from error
    for name in names:
        if not small_file.is_name(name):
            raise ValueError(
                f"The first host sends a file by the name {name!r}; expected one "
                "without a folder, so nothing of it is written."
            )
    if not good:
        raise ValueError("The first host sends files of no size.")
    return folder, sizes
