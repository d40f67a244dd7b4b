"""Arrays in pages of their own, which TensorFlow reads where they are."""

import math
import mmap

import numpy as np
import tensorflow as tf

# In bytes; what TensorFlow expects of a tensor's first element.
_ALIGNMENT = 64


def zeros(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
    """Makes an array of zeros, in pages of memory of its own.

    Pages that are not written to take no memory. All go back to the system as soon as
    nobody has the array, while the allocators of threads may keep what they have freed.

    Args:
        shape: of the array.
        dtype: of its elements.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    pages = mmap.mmap(-1, max(size, 1))
    return np.frombuffer(pages, np.uint8, size).view(dtype).reshape(shape)


def as_tensor(array: np.ndarray | tf.Tensor) -> tf.Tensor:
    """Makes a tensor of an array: in its memory if TensorFlow can read that.

    What is written to the array later may change the tensor.
    """
    if isinstance(array, tf.Tensor):
        return array
    aligned = array.flags.c_contiguous and array.ctypes.data % _ALIGNMENT == 0
    if not (aligned and array.flags.writeable and array.size):
        return tf.convert_to_tensor(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
