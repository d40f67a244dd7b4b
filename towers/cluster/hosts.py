"""The `World` of hosts that are connected by `Communicator`s."""

import copy
import json
import math
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from towers.cluster import scattered
from towers.cluster.communicator import Communicator, aligned
from towers.cluster.scattered import LARGE
from towers.collectives.packing import BUCKET_BYTES, buckets, widened
from towers.collectives.world import COMPRESSIONS
from towers.devices.names import HOST
from towers.hosts import group
from towers.program import small_file

T = TypeVar("T")


class Cluster:
    """Hosts that are connected.

    Attributes:
        names: See `World`.
        communicator: The collectives of the hosts.
        wire: The type in which gradients travel; `None` for their own.
    """

    def __init__(self, names: Sequence[str], index: int, communicator: Communicator):
        """Takes the place of this host among others that it has joined."""
        self.count, self.index = len(names), index
        self.names, self.communicator = tuple(names), communicator
        self.wire: np.dtype | None = None
        with tf.init_scope(), tf.device(HOST):
            # All collectives write it, and so run in the order in which they were made.
            self._order = tf.Variable(0.0, trainable=False, name="order_of_collectives")

    def compressing(self, compression: str) -> "Cluster":
        """See `World`."""
        same = copy.copy(self)
        same.wire = COMPRESSIONS[compression]
        return same

    def all_reduce(
        self, tensors: T, purpose: str, compressible: Sequence[tf.Tensor] = ()
    ) -> T:
        """See `World`. Numbers of 16 bits are added in float32."""
        # Slices are no composites here, as their rows differ between hosts.
        flat = tf.nest.flatten(tensors)
        dense, may_round = [], {*map(id, compressible)}
        with tf.device(HOST), tf.name_scope("hosts"):
            for i, each in enumerate(flat):
                if isinstance(each, tf.IndexedSlices):
                    flat[i] = self._join(each, f"{purpose} {i}")
                elif each is not None:
                    dense.append(i)
            wide = [widened(flat[i]) for i in dense]
            wires = [self.wire if id(flat[i]) in may_round else None for i in dense]
            for places in buckets(wide, wires):
                # One bucket of a purpose is told from the next by its place.
                name = f"{purpose} {places[0]}"
                parts = [wide[k] for k in places]
                totals = self._sum_bucket(parts, name, wires[places[0]])
                for k, part in zip(places, totals, strict=True):
                    like = flat[dense[k]]
                    part = tf.cast(tf.reshape(part, like.shape), like.dtype)
                    flat[dense[k]] = part
        return tf.nest.pack_sequence_as(tensors, flat)

    def overlaps(self, size: int) -> bool:
        """See `World`."""
        return size > BUCKET_BYTES

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

    def stack(self, tensor: tf.Tensor, purpose: str) -> tf.Tensor:
        """See `World`."""
        return self.all_gather(tensor[tf.newaxis], self.count, purpose)

    def reduce_scatter(
        self, parts: Sequence[Sequence[tf.Tensor]], purpose: str
    ) -> list[tf.Tensor]:
        """See `World`."""
        return scattered.reduce_scatter(self, parts, purpose)

    def gather_parts(
        self,
        mine: Sequence[tf.Tensor],
        like: Sequence[Sequence[tf.TensorSpec]],
        purpose: str,
    ) -> list[list[tf.Tensor]]:
        """See `World`."""
        return scattered.gather_parts(self, mine, like, purpose)

    def all_to_all(
        self,
        arrays: Sequence[Sequence[np.ndarray]],
        purpose: str,
        sizes: Sequence[Sequence[int]] | None = None,
    ) -> Sequence[Sequence[np.ndarray]]:
        """See `World`."""
        return self.communicator.all_to_all(arrays, purpose, sizes)

    def broadcast(self, tensors: Sequence[tf.Tensor], purpose: str) -> list[tf.Tensor]:
        """See `World`."""
        varying = not all(tensor.shape.is_fully_defined() for tensor in tensors)

        def send(*arrays):
            if varying:
                # Random numbers may decide on a shape, too.
                sizes = np.array([n for array in arrays for n in array.shape], np.int64)
                self.communicator.broadcast(_as_bytes(sizes), f"shapes of {purpose}")
                ends = np.cumsum([array.ndim for array in arrays])[:-1]
                shapes = np.split(sizes, ends)
            else:
                shapes = [array.shape for array in arrays]
            if self.index > 0:
                arrays = [
                    aligned(math.prod(shape), like.dtype).reshape(shape)
                    for shape, like in zip(shapes, arrays, strict=True)
                ]
            for array in arrays:
                self.communicator.broadcast(_as_bytes(array), purpose)
            return arrays

        with tf.device(HOST), tf.name_scope("hosts"):
            sent = self.meet(send, tensors, [tensor.dtype for tensor in tensors])
        for tensor, like in zip(sent, tensors, strict=True):
            tensor.set_shape(like.shape)
        return sent

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
        if (told := self.broadcast_value(own)) is None:
            return None
        name, sizes = _checked_files(told)
        if self.index > 0:
            folder = os.path.join(to, name)
            os.makedirs(folder, exist_ok=True)
        for name, size in sizes.items():
            path = os.path.join(folder, name)
            mode, access = ("rb", mmap.ACCESS_READ), ("w+b", mmap.ACCESS_WRITE)
            mode, access = mode if self.index == 0 else access
            with open(path, mode) as file:
                if self.index > 0:
                    file.truncate(size)
                if size:
                    with (
                        mmap.mmap(file.fileno(), size, access=access) as mapped,
                        memoryview(mapped) as content,
                        group.explained(),
                    ):
                        self.communicator.broadcast(content, "file")
        return folder

    def broadcast_value(self, value: T) -> T:
        """See `World`."""
        return self._tell(value if self.index == 0 else None, "what is broadcast")[0]

    def exchange(self, value: T) -> list[T]:
        """See `World`."""
        return self._tell(value, "what each host tells")

    def _tell(self, value, purpose):
        with group.explained():
            told = self.communicator.all_gather(json.dumps(value).encode(), purpose)
        return [json.loads(bytes(each)) for each in told]

    def _sum_bucket(self, tensors, purpose, wire):
        """Adds flat tensors of one type."""
        # There is nothing to be gained with doubles.
        wire = wire if tensors[0].dtype == tf.float32 else None
        sizes = [each.shape[0] for each in tensors]
        # To join large ones would copy them twice; many small ones take time each.
        large = [k for k, size in enumerate(sizes) if size >= LARGE]
        small = [k for k, size in enumerate(sizes) if size < LARGE]
        joined = [tf.concat([tensors[k] for k in small], 0)] if small else []
        buffers = [tensors[k] for k in large] + joined

        def add(*arrays):
            return self.communicator.grouped_all_reduce(arrays, purpose, wire)

        totals = self.meet(add, buffers, [each.dtype for each in buffers])
        for total, like in zip(totals, buffers, strict=True):
            total.set_shape(like.shape)
        if small:
            totals[-1:] = tf.split(totals[-1], [sizes[k] for k in small])
        placed = dict(zip(large + small, totals, strict=True))
        return [placed[k] for k in range(len(tensors))]

    def _rows(self, rows, purpose):
        """Puts the rows of all hosts together, the first host's first."""

        def gather(array):
            parts = self.communicator.all_gather(_as_bytes(array), purpose)
            # They lie side by side in one array.
            whole = parts[0].obj.view(array.dtype)
            return [whole.reshape(-1, *array.shape[1:])]

        (whole,) = self.meet(gather, [rows], [rows.dtype])
        whole.set_shape([None, *rows.shape[1:]])
        return whole

    def _join(self, slices, purpose):
        """Joins the rows of all hosts, the first host's first."""
        return tf.IndexedSlices(
            self._rows(slices.values, f"values of {purpose}"),
            self._rows(slices.indices, f"indices of {purpose}"),
            slices.dense_shape,
        )

    def meet(
        self,
        function: Callable[..., Sequence[np.ndarray]],
        inputs: Sequence[tf.Tensor],
        types: Sequence[tf.DType],
    ) -> list[tf.Tensor]:
        """See `World`."""

        def call(order, *arrays):
            try:
                return [order, *function(*arrays)]
            except Exception as error:
                # TensorFlow would log the whole traceback, twice.
                raise error.with_traceback(None) from None

        # It has a side effect, and waits for the one before.
        inputs = [self._order.read_value(), *inputs]
        order, *results = tf.nest.flatten(
            tf.numpy_function(call, inputs, [tf.float32, *types])
        )
        self._order.assign(tf.ensure_shape(order, []))
        return results


def _checked_files(told: Any) -> tuple[str, dict[str, int]]:
    """Returns a folder's name and the sizes of its files, as the first host tells them.

    Raises:
        ValueError: A name would lead out of the folder, or nobody of ours says this.
    """
    try:
        folder, sizes = told
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


def _as_bytes(array):
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


# The hosts that this process has joined, and its place among them.
_here: tuple[group.Joined, Cluster] | None = None


def this_host() -> Cluster:
    """Returns this process's place among the hosts that it has joined."""
    global _here
    now = group.current
    if _here is None or _here[0] is not now:
        membership = now.membership
        _here = now, Cluster(membership.names, membership.rank, now.communicator)
    return _here[1]
