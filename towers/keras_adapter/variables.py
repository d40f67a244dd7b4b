"""Keras and TensorFlow variables: what is behind a `keras.Variable`, and exchanges."""

import contextlib
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from towers.keras_adapter.patching import swapped


def value_behind(variable: keras.Variable) -> tf.Variable:
    """Returns the `tf.Variable` behind a Keras variable, whatever scope is active.

    `keras.Variable.value` differs within a stateless scope, and under autocast.
    """
    return variable._value


def put_behind(variable: keras.Variable, value: tf.Variable) -> None:
    """Has a Keras variable use another `tf.Variable` from now on."""
    variable._value = value


@contextlib.contextmanager
def swapped_values(
    variables: Sequence[keras.Variable], values: Sequence[tf.Variable]
) -> Iterator[None]:
    """Inside, Keras variables use other `tf.Variable`s, one for each."""
    with swapped(variables, "_value", values):
        yield


@contextlib.contextmanager
def places_kept(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """On leaving, Keras variables use the `tf.Variable`s that they use now."""
    places = [variable._value for variable in variables]
    try:
        yield
    finally:
        for variable, place in zip(variables, places, strict=True):
            variable._value = place


def take_identity(new: tf.Variable, old: tf.Variable) -> None:
    """Gives a `tf.Variable` the identity by which an optimizer knows another one."""
    new._unique_id = old._unique_id


@contextlib.contextmanager
def read_once(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Inside, each read of a `tf.Variable` gives the value that it has now.

    TensorFlow does so itself for a variable with a `caching_device`. Nobody may assign
    the variables meanwhile.
    """
    values = [tf.convert_to_tensor(variable) for variable in variables]
    with swapped(variables, "_cached_value", values):
        yield
