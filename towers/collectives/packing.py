"""Many tensors as a few flat buffers, one for each type, and back.

What goes from one memory to another goes faster in one piece: a transfer or a sum of a
buffer costs one start, however many variables are in it. Where buffers go is the
caller's business; these functions run on the device that they are called on. What is
taken out of a buffer shares its memory.
"""

import collections
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.devices.names import HOST, is_gpu

# As in PyTorch's DistributedDataParallel (Li et al. 2020): large enough for the
# network, small enough to begin while the rest of the gradients are computed.
BUCKET_BYTES = 25 * 2**20
# The only type of whole numbers that TensorFlow splits for a GPU.
INTEGER = tf.int32
# TensorFlow copies a slice of a tensor unless it begins and ends at such a place.
_ALIGNED_BYTES = 64


def copy(nest: Any, kept: Collection[tf.DType] = ()) -> Any:
    """Copies tensors as they are, one by one.

    Args:
        nest: A nest of dense, ragged or sparse tensors, of numbers, and of `None`.
        kept: Types that are not copied.
    """

    def one(value):
        if value is None or getattr(value, "dtype", None) in kept:
            return value
        return tf.identity(value)

    return tf.nest.map_structure(one, nest, expand_composites=True)


def pack(tensors: Sequence[Any]) -> list[tf.Tensor]:
    """Joins tensors into one flat buffer for each type.

    Each tensor begins at a multiple of 64 bytes, with zeros before it, but for int32.

    Args:
        tensors: Tensors of any shapes and types. What is not dense, or neither of a
            floating type nor in int32, or `None`, is passed over.

    Returns:
        Buffers of rank 1, in the order in which their types come first.
    """
    buffers = []
    for places in _places(tensors):
        parts = []
        for i in places:
            parts.append(tf.reshape(tensors[i], [-1]))
            if missing := -tensors[i].shape.num_elements() % aligned(tensors[i].dtype):
                parts.append(tf.zeros([missing], tensors[i].dtype))
        buffers.append(tf.concat(parts, axis=0))
    return buffers


def unpack(buffers: Sequence[tf.Tensor], like: Sequence[Any]) -> list[Any]:
    """Takes apart what `pack` has joined.

    Args:
        buffers: What `pack` returned, or sums of it.
        like: What was packed, or tensors and specs of the same types and shapes, which
            have to be known.

    Returns:
        Tensors in the order of `like`, and what was passed over as it is there.
    """
    tensors = list(like)
    for buffer, places in zip(buffers, _places(like), strict=True):
        unit = aligned(buffer.dtype)
        sizes = [like[i].shape.num_elements() for i in places]
        parts = tf.split(buffer, [size + -size % unit for size in sizes])
        for i, part, size in zip(places, parts, sizes, strict=True):
            own = part[:size] if size % unit else part
            tensors[i] = tf.reshape(own, like[i].shape)
    return tensors


def send(tensors: Sequence[Any], source: str, target: str) -> list[Any]:
    """Moves tensors from one device to another, those that `pack` takes in one piece.

    A device "" is that of the scope. A GPU sends what it has in the host's memory from
    there: whole numbers, such as seeds.
    """
    whole = [getattr(tensor, "dtype", None) == INTEGER for tensor in tensors]
    sent = [*tensors]
    for kind, device in (False, source), (True, HOST if is_gpu(source) else source):
        places = [i for i, each in enumerate(whole) if each == kind]
        with tf.device(device):
            buffers = pack([tensors[i] for i in places])
        with tf.device(target):
            received = unpack(buffers, [tensors[i] for i in places])
        for i, value in zip(places, received, strict=True):
            sent[i] = value
    return sent


def fits(tensor: tf.Tensor) -> bool:
    """Tells whether a tensor can be packed: its type and shape are such."""
    return _travels(tensor.dtype) and tensor.shape.is_fully_defined()


def aligned(dtype: tf.DType) -> int:
    """Returns how many numbers of a type are between two places where tensors begin."""
    return 1 if dtype == INTEGER else _ALIGNED_BYTES // dtype.size


def _travels(dtype):
    return dtype.is_floating or dtype == INTEGER


def _places(tensors):
    """For each type, where dense tensors of it are."""
    by_type = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, tf.Tensor | tf.TensorSpec) and _travels(tensor.dtype):
            by_type.setdefault(tensor.dtype, []).append(i)
    return list(by_type.values())


def broadcast(
    home: str,
    originals: Sequence[tf.Variable],
    devices: Sequence[str],
    copies: Sequence[Sequence[tf.Variable]],
) -> None:
    """Gives each device's copies of variables the values that they have at home."""
    with tf.device(home):
        values = [tf.convert_to_tensor(original) for original in originals]
        buffers = pack(values)
    for device, mine in zip(devices, copies, strict=False):
        with tf.device(device):
            received = unpack(buffers, values)
            for copy, value in zip(mine, received, strict=True):
                copy.assign(value)


def buckets(
    tensors: Sequence[tf.Tensor], wires: Sequence[np.dtype | None]
) -> Iterator[list[int]]:
    """Yields the places of tensors of one type that are added in one buffer.

    The last gradients come first, as the backward pass computes them first.
    """
    by_type = collections.defaultdict(list)
    for i in reversed(range(len(tensors))):
        by_type[tensors[i].dtype, wires[i]].append(i)
    for (dtype, _), every in by_type.items():
        places, size = [], 0
        for i in every:
            places.append(i)
            size += tensors[i].shape.num_elements() * dtype.size
            if size >= BUCKET_BYTES:
                yield places
                places, size = [], 0
        if places:
            yield places


def widened(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a flat tensor of a type that NumPy adds, and that loses nothing."""
    flat = tf.reshape(tensor, [-1])
    if not flat.dtype.is_floating:
        return tf.cast(flat, tf.int64)
    return flat if flat.dtype == tf.float64 else tf.cast(flat, tf.float32)
