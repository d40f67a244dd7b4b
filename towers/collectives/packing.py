"""Packs many tensors into a few flat buffers, one for each type, and unpacks them.

One transfer, or one sum, of a buffer is faster than one for each tensor, as it starts
once. Callers decide where buffers are sent; these functions run on the current device.
Unpacked tensors share the memory of their buffer.
"""

import collections
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.devices.names import HOST, is_gpu

# As in PyTorch's DistributedDataParallel (Li et al. 2020): large enough to use the
# network, small enough to start while the remaining gradients are computed.
BUCKET_BYTES = 25 * 2**20
# The only integer type that TensorFlow splits on a GPU.
INTEGER = tf.int32
# TensorFlow copies a slice of a tensor unless it begins and ends at such a multiple.
_ALIGNED_BYTES = 64


def copy(nest: Any, kept: Collection[tf.DType] = (), like: Any = None) -> Any:
    """Copies the tensors of a nest to the current device, one by one.

    Args:
        nest: A nest of dense, ragged or sparse tensors of numbers, and of `None`.
        kept: Types that are not copied.
        like: The nest whose tensors, or specs, have these types; by default `nest`.
    """

    def one(value, like):
        if value is None or getattr(like, "dtype", None) in kept:
            return value
        return tf.identity(value)

    like = nest if like is None else like
    return tf.nest.map_structure(one, nest, like, expand_composites=True)


def pack(tensors: Sequence[Any]) -> list[tf.Tensor]:
    """Packs tensors into one flat buffer for each type.

    Except for int32, each tensor begins at a multiple of 64 bytes, with zeros before.

    Args:
        tensors: Tensors of any shapes and types. Skips `None` and all tensors that are
            not dense, or neither floating nor int32.

    Returns:
        Buffers of rank 1, in the order in which their types first occur.
    """
    buffers = []
    for indices in _places(tensors):
        parts = []
        for i in indices:
            parts.append(tf.reshape(tensors[i], [-1]))
            if missing := -tensors[i].shape.num_elements() % aligned(tensors[i].dtype):
                parts.append(tf.zeros([missing], tensors[i].dtype))
        buffers.append(tf.concat(parts, axis=0))
    return buffers


def unpack(buffers: Sequence[tf.Tensor], like: Sequence[Any]) -> list[Any]:
    """Unpacks buffers that `pack` has made.

    Args:
        buffers: The result of `pack`, or a sum of such results.
        like: The packed tensors, or tensors and specs of the same types and shapes;
            shapes are static.

    Returns:
        Tensors in the order of `like`; entries that `pack` skips are those of `like`.
    """
    tensors = list(like)
    for buffer, indices in zip(buffers, _places(like), strict=True):
        unit = aligned(buffer.dtype)
        sizes = [like[i].shape.num_elements() for i in indices]
        parts = tf.split(buffer, [size + -size % unit for size in sizes])
        for i, part, size in zip(indices, parts, sizes, strict=True):
            own = part[:size] if size % unit else part
            tensors[i] = tf.reshape(own, like[i].shape)
    return tensors


def send(tensors: Sequence[Any], source: str, target: str) -> list[Any]:
    """Moves tensors from one device to another; packs those that `pack` takes.

    A device "" is the current device. Integers, such as seeds, are in host memory even
    on a GPU, and are sent from there.
    """
    is_integer = [getattr(tensor, "dtype", None) == INTEGER for tensor in tensors]
    sent = [*tensors]
    for kind, device in (False, source), (True, HOST if is_gpu(source) else source):
        indices = [i for i, integer in enumerate(is_integer) if integer == kind]
        with tf.device(device):
            buffers = pack([tensors[i] for i in indices])
        with tf.device(target):
            received = unpack(buffers, [tensors[i] for i in indices])
        for i, value in zip(indices, received, strict=True):
            sent[i] = value
    return sent


def fits(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor can be packed, by its type and shape."""
    return _travels(tensor.dtype) and tensor.shape.is_fully_defined()


def aligned(dtype: tf.DType) -> int:
    """Returns the alignment of tensors in a buffer, in elements of a type."""
    return 1 if dtype == INTEGER else _ALIGNED_BYTES // dtype.size


def _travels(dtype):
    return dtype.is_floating or dtype == INTEGER


def _places(tensors):
    """Returns, for each type, the indices of its dense tensors."""
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
    """Assigns the values of variables at home to their copies on each device."""
    with tf.device(home):
        values = [tf.convert_to_tensor(original) for original in originals]
        buffers = pack(values)
    for device, copies_of_device in zip(devices, copies, strict=False):
        with tf.device(device):
            received = unpack(buffers, values)
            for copy, value in zip(copies_of_device, received, strict=True):
                copy.assign(value)


def buckets(
    tensors: Sequence[tf.Tensor], wires: Sequence[np.dtype | None]
) -> Iterator[list[int]]:
    """Yields the indices of tensors of one type that are added in one buffer.

    The last gradients come first, as the backward pass computes them first.
    """
    by_type = collections.defaultdict(list)
    for i in reversed(range(len(tensors))):
        by_type[tensors[i].dtype, wires[i]].append(i)
    for (dtype, _), of_type in by_type.items():
        indices, size = [], 0
        for i in of_type:
            indices.append(i)
            size += tensors[i].shape.num_elements() * dtype.size
            if size >= BUCKET_BYTES:
                yield indices
                indices, size = [], 0
        if indices:
            yield indices


def widened(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a flat tensor of a type that NumPy adds, without loss of precision.

    Complex numbers become two real ones each.
    """
    flat = tf.reshape(tensor, [-1])
    if flat.dtype.is_complex:
        return tf.reshape(tf.bitcast(flat, flat.dtype.real_dtype), [-1])
    if not flat.dtype.is_floating:
        return tf.cast(flat, tf.int64)
    return flat if flat.dtype == tf.float64 else tf.cast(flat, tf.float32)


def narrowed(flat: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Returns a sum of `widened` tensors, with the type and shape of one of them."""
    if tf.as_dtype(like.dtype).is_complex:
        flat = tf.bitcast(tf.reshape(flat, [-1, 2]), like.dtype)
    return tf.cast(tf.reshape(flat, like.shape), like.dtype)
