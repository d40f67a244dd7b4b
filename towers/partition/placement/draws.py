"""Random numbers of the whole batch, each tower's rows of them.

TensorFlow's stateless random numbers come from a counter (Salmon et al. 2011): the n-th
block of them from the counter plus n. So a tower draws its rows alone, by a counter
that is ahead by what the rows before take.

Draws that take an unknown part of the counter are made at home, and cut.
"""

import functools
import operator

import tensorflow as tf

from towers.keras_adapter.graphs import traced

# Each number takes as much of the counter as any other. Theirs are blocks of 16 bytes.
SKIPPABLE = set(
    """StatelessRandomNormalV2 StatelessRandomUniformFullIntV2
    StatelessRandomUniformIntV2 StatelessRandomUniformV2""".split()
)
_SHAPE, _KEY, _COUNTER = range(3)
# They make of a seed, which GPUs read in the host's memory, what the former take.
OF_SEED = {"StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounterAlg"}


def function_of(op: tf.Operation) -> tf.types.experimental.ConcreteFunction:
    """Returns a function that draws a tower's rows of what an operation draws.

    It takes what the operation takes, and behind that the number of the tower's first
    example, and how many it has: an int32 vector. What the host has to know of numbers
    is computed in its memory, also on a GPU.

    Args:
        op: One of a type in `SKIPPABLE`. It draws as many numbers for each example, one
            example behind the other.
    """
    draw = getattr(tf.raw_ops, op.type)
    names = [argument.name for argument in op.op_def.input_arg]
    numbers = 4 if op.outputs[0].dtype.size <= 4 else 2
    options = {}
    if "dtype" in op.node_def.attr and "minval" not in names:
        options["dtype"] = op.outputs[0].dtype
    rank = op.outputs[0].shape.rank

    def rows(*values):
        *values, (first, size) = *values[:-1], tf.unstack(values[-1])
        shape = values[_SHAPE]
        # GPUs multiply a vector's numbers in their own memory.
        count = functools.reduce(operator.mul, tf.unstack(shape))
        first, size = tf.cast(first, shape.dtype), tf.cast(size, shape.dtype)
        of_example = tf.math.floordiv(count, tf.maximum(size, 1))
        start = tf.cast(first, tf.uint64) * tf.cast(of_example, tf.uint64)
        # GPUs do not unstack such numbers.
        low, high = values[_COUNTER][0], values[_COUNTER][1]
        moved = low + tf.math.floordiv(start, numbers)
        high += tf.cast(moved < low, tf.uint64)
        given = dict(zip(names, values, strict=True))
        given["shape"] = tf.stack([count + numbers])
        given["counter"] = tf.stack([moved, high])
        # A product that is too large wraps around, which leaves this as it is.
        begin = tf.math.floormod(first * of_example, numbers)
        drawn = draw(**given, **options)
        drawn = tf.slice(drawn, tf.stack([begin]), tf.stack([count]))
        drawn = tf.reshape(drawn, shape)
        drawn.set_shape([None] * rank)
        return drawn

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in op.inputs]
    return traced(rows, *specs, tf.TensorSpec([2], tf.int32))
