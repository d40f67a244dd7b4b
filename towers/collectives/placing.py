"""Places what TensorFlow would put on another device than the one it comes from."""

from collections.abc import Sequence

import tensorflow as tf

from towers.devices import is_gpu


def where_its_input_is(operation: tf.Operation) -> str:
    """Returns the device of an operation being made: for `tf.compat.v1.device`.

    What a function or the body of a loop returns goes through an identity that
    TensorFlow places on the device that calls, or nowhere, which is the first device.
    There, what is on another device would make a detour.
    """
    if operation.type == "Identity" and not operation.device:
        return operation.inputs[0].device
    return operation.device


def read(variables: Sequence[tf.Variable], device: str) -> list[tf.Tensor]:
    """Reads the values of variables that are on a device, or on the host."""
    values = [tf.convert_to_tensor(variable) for variable in variables]
    if not is_gpu(device):
        return values
    # What reads has no device of its own, but the variable's. A loop would take its
    # value through the first device.
    placed = []
    for variable, value in zip(variables, values, strict=True):
        with tf.device(variable.device):
            placed.append(tf.identity(value))
    return placed
