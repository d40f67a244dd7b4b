"""Places what TensorFlow would put on another device than the one it comes from.

Keras applies the optimizer under one device. Here, each operation of an update goes
beside the largest of its inputs.
"""

import contextlib
import math
from collections.abc import Iterator

import tensorflow as tf


def where_its_input_is(operation: tf.Operation) -> str:
    """Returns the device of an operation being made: for `tf.compat.v1.device`.

    What a function or the body of a loop returns goes through an identity that
    TensorFlow places on the device that calls, or nowhere, which is the first device.
    There, what is on another device would make a detour.
    """
    if operation.type == "Identity" and not operation.device:
        return operation.inputs[0].device
    return operation.device


@contextlib.contextmanager
def updates(device: str, stages: int) -> Iterator[None]:
    """Inside, an optimizer updates variables where they are.

    With one stage that is a device. With several, each operation is placed where the
    largest of its inputs is; `device` is for those without one. In eager execution all
    are placed there.
    """

    def place(operation):
        if operation.device:
            return operation.device
        placed = [(_elements(t), _device(t)) for t in operation.inputs]
        return max((each for each in placed if each[1]), default=(0, device))[1]

    if stages == 1 or tf.executing_eagerly():
        with tf.device(device):
            yield
        return
    with tf.device(None), tf.compat.v1.device(place):
        yield


def _device(tensor):
    if tensor.device:
        return tensor.device
    # What reads a variable, or takes it from outside, has no device of its own.
    if tensor.op.type == "ReadVariableOp":
        return _device(tensor.op.inputs[0])
    captures = getattr(tensor.graph, "captures", ())
    return next((_device(out) for out, inside in captures if inside is tensor), "")


def _elements(tensor):
    # A handle of a variable stands for its value.
    if tensor.dtype == tf.resource:
        return math.inf
    return tensor.shape.num_elements() or 0
