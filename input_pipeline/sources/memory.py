"""Arrays in pages of their own, which TensorFlow reads where they are."""

import math
import mmap

import numpy as np
import tensorflow as tf

# In bytes; what TensorFlow expects of a tensor's first element.
_ALIGNMENT = 64
# Below it, an array is one of NumPy's.
_LEAST_BYTES = 2**20


class Pages(np.ndarray):
    """An array that nobody writes to any more once it is a tensor."""


def zeros(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
    """Makes an array of zeros, in pages of memory of its own if it is large.

    Pages that are not written to take no memory. As soon as nobody has the array, its
    pages go back to the system, unlike those of an allocator.

    Args:
        shape: of the array.
        dtype: of its elements.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < _LEAST_BYTES:
        return np.zeros(shape, dtype)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype).reshape(shape).view(Pages)


def as_tensor(array: np.ndarray | tf.Tensor) -> tf.Tensor:
    """Makes a tensor of an array: of one that `zeros` made, in its own memory."""
    if isinstance(array, tf.Tensor):
        return array
    aligned = array.flags.c_contiguous and array.ctypes.data % _ALIGNMENT == 0
    if not (isinstance(array, Pages) and aligned and array.size):
        return tf.convert_to_tensor(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
