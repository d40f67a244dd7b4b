"""Arrays in separate pages, which TensorFlow reads in place."""

import math
import mmap

import numpy as np
import tensorflow as tf

# In bytes; TensorFlow expects this of a tensor's first element.
_ALIGNMENT = 64
# Smaller arrays are ordinary arrays of NumPy.
_LEAST_BYTES = 2**20


class Pages(np.ndarray):
    """An array that is not written to any more once it is a tensor."""


def zeros(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
    """Makes an array of zeros, in separate pages of memory if it is large.

    Unwritten pages take no memory. When the array is released, its pages go back to the
    system, unlike those of an allocator.

    Args:
        shape: the shape of the array.
        dtype: the type of its elements.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < _LEAST_BYTES:
        return np.zeros(shape, dtype)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype).reshape(shape).view(Pages)


def as_tensor(array: np.ndarray | tf.Tensor) -> tf.Tensor:
    """Makes a tensor of an array; shares the memory of an array from `zeros`."""
    if isinstance(array, tf.Tensor):
        return array
    aligned = array.flags.c_contiguous and array.ctypes.data % _ALIGNMENT == 0
    if not (isinstance(array, Pages) and aligned and array.size):
        return tf.convert_to_tensor(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
