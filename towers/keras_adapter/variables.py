"""Keras and TensorFlow variables: values behind a `keras.Variable`, and swaps."""

import collections
import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import keras
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from towers.keras_adapter.patching import swapped


def value_behind(variable: keras.Variable) -> tf.Variable:
    """Returns the `tf.Variable` behind a Keras variable, whatever scope is active.

    `keras.Variable.value` differs within a stateless scope, and under autocast.
    """
    return variable._value


def put_behind(variable: keras.Variable, value: tf.Variable) -> None:
    """Makes a Keras variable use another `tf.Variable`, of any shape, from now on."""
    variable._value, variable._shape = value, tuple(value.shape)


@contextlib.contextmanager
def swapped_values(
    variables: Sequence[keras.Variable], values: Sequence[tf.Variable]
) -> Iterator[None]:
    """Makes Keras variables use other `tf.Variable`s, of any shape, in the context."""
    shapes = [tuple(value.shape) for value in values]
    with swapped(variables, "_value", values), swapped(variables, "_shape", shapes):
        yield


@contextlib.contextmanager
def places_kept(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Restores the `tf.Variable`s of Keras variables after the context."""
    values = [variable._value for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable._value = value


def take_identity(new: tf.Variable, old: tf.Variable) -> None:
    """Gives a `tf.Variable` the key by which an optimizer identifies another one."""
    new._unique_id = old._unique_id


def variable_like(value: Any, device: str, like: Any, shape: Any = None) -> tf.Variable:
    """Creates a variable on a device that an optimizer takes for another variable.

    Args:
        value: The initial value, or a function that returns it.
        device: The device.
        like: A `tf.Variable`, or a `ShardedVariable`.
        shape: The shape, if it is not that of the value.
    """
    name = like.name.partition(":")[0]
    with tf.init_scope(), tf.device(device):
        new = tf.Variable(
            value, trainable=like.trainable, name=name, dtype=like.dtype, shape=shape
        )
    take_identity(new, like)
    return new


def without_value(like: Any, device: str) -> tf.Variable:
    """Creates a variable with the shape of another one, and without a value.

    The variable takes no memory: a graph may be traced with it.

    Args:
        like: A `tf.Variable`, or a `ShardedVariable`.
        device: The device.
    """
    with tf.init_scope(), tf.device(device):
        new = resource_variable_ops.UninitializedVariable(
            trainable=like.trainable,
            name=like.name.partition(":")[0],
            dtype=like.dtype,
            shape=like.shape,
        )
    take_identity(new, like)
    return new


def empty(variable: tf.Variable) -> None:
    """Frees the memory of a variable's value, until `give_room`."""
    _put_zeros(variable, [0])


def give_room(variable: tf.Variable) -> None:
    """Gives an empty variable zeros of its shape, to be assigned later."""
    _put_zeros(variable, variable.shape)


def fill(variable: tf.Variable, value: tf.Tensor) -> None:
    """Gives an empty variable a value of its shape."""
    # Unlike `assign`, this takes a value of any shape.
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def _put_zeros(variable, shape):
    with tf.device(variable.device):
        zeros = tf.zeros(shape, variable.dtype)
        if tf.inside_function():
            # TensorFlow would refuse the graph if it knew the shape.
            zeros = tf.compat.v1.placeholder_with_default(zeros, None)
        fill(variable, zeros)


def bytes_of(variable: keras.Variable | tf.Variable) -> int:
    """Returns the size of a variable in bytes."""
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


@contextlib.contextmanager
def read_once(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Makes reads of `tf.Variable`s return their values at the start of the context.

    TensorFlow does the same for a variable with a `caching_device`. Do not assign the
    variables meanwhile.
    """
    values = [tf.convert_to_tensor(variable) for variable in variables]
    with swapped(variables, "_cached_value", values):
        yield


@dataclasses.dataclass(frozen=True)
class SavedVariable:
    """A variable in a file of weights that Keras has saved.

    Attributes:
        path: The path of its value.
        layer: The name of its layer.
        key: Identifies the variable, with the same key in another file of a model of
            the same layers.
    """

    path: str
    layer: str
    key: str


def saved_variables(file: h5py.Group) -> list[SavedVariable]:
    """Lists a model's variables in a .weights.h5 file, which a .keras file contains.

    Keras numbers the layers of a list by class, and stores their names. A name that a
    user has given identifies a layer wherever it stands in the list.
    """
    return [*_saved(file, ())]


def _saved(group, keys):
    variables = group.get("vars", {})
    for index in sorted(variables, key=int):
        name = variables.attrs.get("name", group.name)
        yield SavedVariable(variables[index].name, name, "/".join((*keys, index)))
    # A group without variables, and so without a name, is a list.
    of_list, unnamed = bool(keys) and "vars" not in group, collections.Counter()
    for member in sorted(group, key=_numbered):
        if member == "vars" or (not keys and member == "optimizer"):
            continue
        key, (stem, _) = member, _numbered(member)
        if of_list:
            own = group[member].get("vars")
            name = own and own.attrs.get("name")
            if name and _numbered(name)[0] != stem:
                key = f"named {name}"
            else:
                key = f"{stem} {unnamed[stem]}"
                unnamed[stem] += 1
        yield from _saved(group[member], (*keys, key))


def _numbered(name):
    """Splits a name into its stem and the number at its end."""
    stem, number = re.fullmatch(r"(.*?)(?:_(\d+))?", name).groups()
    return stem, int(number or 0)
