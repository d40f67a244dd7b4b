"""Estimates how long an operation takes, from the sizes of what it takes and makes.

Only the order of a pipeline's turns depends on it.
"""

import math
import re

import tensorflow as tf

_PRODUCTS = re.compile("MatMul|Einsum|Conv")
# Additions and multiplications of a product in the time that one number takes to be
# read or written, within a factor of two or so on CPUs and GPUs.
_FLOPS_OF_A_NUMBER = 64
# What stands in for sizes that the graph does not know, such as that of a batch.
_SIZE = 32


def of(op: tf.Operation) -> float:
    """Returns how long an operation takes, in the time to read or write a number.

    What an operation calls, such as the body of a loop, is not looked into.
    """
    taken = [numbers(tensor, _SIZE) for tensor in op.inputs]
    made = [numbers(tensor, _SIZE) for tensor in op.outputs]
    moved = float(sum(taken) + sum(made))
    if len(taken) < 2 or not _PRODUCTS.search(op.type):
        return moved
    # Of [m, k] and [k, n] it is m * k * n, the root of the product of all sizes.
    multiplied = math.sqrt(taken[0] * taken[1] * made[0])
    return moved + 2 * multiplied / _FLOPS_OF_A_NUMBER


def numbers(tensor: tf.Tensor, size: int) -> int:
    """Returns how many numbers a tensor has, where `size` stands for unknown sizes.

    It is 0 where even the rank is unknown, or what it has are no numbers.
    """
    others = (tf.resource, tf.variant, tf.string)
    if tensor.shape.rank is None or tensor.dtype in others:
        return 0
    return math.prod(size if n is None else n for n in tensor.shape)
