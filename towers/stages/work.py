"""Estimates an operation's time from the sizes of its inputs and outputs.

Only the order of a pipeline's turns depends on it.
"""

import math
import re

import tensorflow as tf

_PRODUCTS = re.compile("MatMul|Einsum|Conv")
# Additions and multiplications of a product in the time that it takes to read or write
# a number, within a factor of two or so on CPUs and GPUs.
_FLOPS_OF_A_NUMBER = 64
# The size used where the graph knows none, such as for a batch.
_SIZE = 32


def of(op: tf.Operation) -> float:
    """Returns an operation's time, in units of reading or writing a number.

    The functions that an operation calls, such as the body of a loop, do not count.
    """
    taken = [numbers(tensor, _SIZE) for tensor in op.inputs]
    made = [numbers(tensor, _SIZE) for tensor in op.outputs]
    moved = float(sum(taken) + sum(made))
    if len(taken) < 2 or not _PRODUCTS.search(op.type):
        return moved
    # The product of [m, k] and [k, n] takes m * k * n, the root of the product of
    # sizes.
    multiplied = math.sqrt(taken[0] * taken[1] * made[0])
    return moved + 2 * multiplied / _FLOPS_OF_A_NUMBER


def numbers(tensor: tf.Tensor, size: int) -> int:
    """Returns how many numbers a tensor has, where `size` stands for unknown sizes.

    Returns 0 if the rank is unknown, or the tensor does not hold numbers.
    """
    others = (tf.resource, tf.variant, tf.string)
    if tensor.shape.rank is None or tensor.dtype in others:
        return 0
    return math.prod(size if n is None else n for n in tensor.shape)
