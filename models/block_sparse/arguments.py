"""Arguments of layers with blocks: what layers keep of them, and save."""

import random
from typing import Any

import keras
import numpy as np

_OF_KERAS = {
    "activation": keras.activations,
    "kernel_initializer": keras.initializers,
    "bias_initializer": keras.initializers,
    "kernel_regularizer": keras.regularizers,
    "bias_regularizer": keras.regularizers,
    "kernel_constraint": keras.constraints,
    "bias_constraint": keras.constraints,
}


def keep(layer: keras.layers.Layer, **given: Any) -> None:
    """Sets arguments as attributes of a layer.

    What Keras knows by name becomes the object, and a matrix as a pattern an array.
    """
    for name, value in given.items():
        if name in _OF_KERAS:
            value = _OF_KERAS[name].get(value)
        elif name == "pattern" and not isinstance(value, str):
            value = np.asarray(value)
        setattr(layer, name, value)
    layer.argument_names = tuple(given)


def config(layer: keras.layers.Layer) -> dict[str, Any]:
    """Returns the arguments that a layer keeps, to be saved."""
    found = {name: getattr(layer, name) for name in layer.argument_names}
    for name, value in found.items():
        if name in _OF_KERAS:
            found[name] = _OF_KERAS[name].serialize(value)
        elif name == "pattern" and not isinstance(value, str):
            found[name] = value.astype(int).tolist()
    return found


def drawn(seed: int | None) -> int:
    """Returns a seed, drawn as Keras draws those of its layers if there is none."""
    return random.randrange(2**31) if seed is None else seed
