"""The connected hosts that this process trains with, as a `World`.

An engine carries what hosts send one another: TensorFlow's collectives in
`tensorflow_world.py`, MPI in `mpi_world.py`.
"""

import copy
import os
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from towers.collectives.packing import BUCKET_BYTES, buckets, widened
from towers.collectives.world import COMPRESSIONS
from towers.devices.names import HOST
from towers.hosts import group
from towers.program import small_file

T = TypeVar("T")
# The bytes of a file that are sent at once.
_BLOCK_BYTES = 2**24


class Cluster:
    """Hosts that are connected; an engine adds the other methods of `World`.

    Attributes:
        names: See `World`.
        communicator: See `World`.
        wire: The type in which gradients are sent; `None` for their own.
    """

    def __init__(self, names: Sequence[str], index: int, communicator: Any):
        """Takes the names of all hosts, and the index of this one."""
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
            for i, tensor in enumerate(flat):
                if isinstance(tensor, tf.IndexedSlices):
                    flat[i] = self._join(tensor, f"{purpose} {i}")
                elif tensor is not None:
                    dense.append(i)
            wide = [widened(flat[i]) for i in dense]
            wires = [self.wire if id(flat[i]) in may_round else None for i in dense]
            for indices in buckets(wide, wires):
                # The first index tells a bucket of a purpose from the next.
                name = f"{purpose} {indices[0]}"
                parts = [wide[k] for k in indices]
                totals = self._sum_bucket(parts, name, wires[indices[0]])
                for k, part in zip(indices, totals, strict=True):
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
                    block = np.zeros(min(_BLOCK_BYTES, size - start), np.uint8)
                    if self.index == 0:
                        file.readinto(block)
                    with group.explained():
                        (sent,) = self.broadcast([tf.constant(block)], "file")
                    if self.index > 0:
                        file.write(sent.numpy())
        return folder

    def broadcast_value(self, value: T) -> T:
        """See `World`."""
        return self.exchange(value if self.index == 0 else None)[0]

    def _join(self, slices, purpose):
        """Joins the rows of all hosts, the first host's first."""
        return tf.IndexedSlices(
            self._rows(slices.values, f"values of {purpose}"),
            self._rows(slices.indices, f"indices of {purpose}"),
            slices.dense_shape,
        )


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
