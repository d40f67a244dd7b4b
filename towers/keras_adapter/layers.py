"""Keras layers: their parts, variables and calls, and the tags of tensors."""

import re
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import stateless_scope

from towers.keras_adapter.patching import Target

MASK = "_keras_mask"
TAGS = MASK, "_keras_logits"
"""The attributes that Keras attaches to a tensor: its mask, and its logits."""

OPERATION_CALL = Target(keras.Operation, "__call__")
"""`keras.Operation.__call__`, through which Keras calls every operation."""

LAYER_CALL = Target(keras.layers.Layer, "__call__")
"""`keras.layers.Layer.__call__`, through which Keras calls every layer."""

BATCH_NORMALIZATION_CALL = Target(
    keras.layers.BatchNormalization, "call", unless_replaced=True
)
"""`BatchNormalization.call(inputs, training, mask)`."""

# Keras 3.16 has moved the module.
ARGMAX = Target(getattr(backend, "ops", backend).numpy, "argmax")
"""`argmax(x, axis=None, keepdims=False)` of `keras.ops` on TensorFlow."""

EMBEDDING_CALL = Target(keras.layers.Embedding, "call", unless_replaced=True)
"""`Embedding.call(inputs)`."""


def layers_of(
    layer: keras.layers.Layer, *, include_self: bool = True, recursive: bool = True
) -> list[keras.layers.Layer]:
    """Returns a layer or model and all layers inside it, without duplicates.

    With `include_self`, the layer itself comes first; `recursive` includes sublayers of
    sublayers.
    """
    return layer._flatten_layers(include_self=include_self, recursive=recursive)


def layer_of(model: keras.Model, operation: str) -> str | None:
    """Returns the name of the innermost layer in an operation's name, if any.

    Args:
        model: The model of the layer.
        operation: The full name of an operation of TensorFlow.
    """
    names = {layer.name for layer in layers_of(model)}
    # TensorFlow numbers the scope of a layer that is called again.
    scopes = [(s, re.sub(r"_\d+$", "", s)) for s in operation.split("/")[::-1]]
    return next((name for scope in scopes for name in scope if name in names), None)


def has_training_argument(layer: keras.layers.Layer) -> bool:
    """Checks whether the `call` of a layer or model accepts `training`."""
    return layer._call_has_training_arg


def call_model(model: keras.Model, x: Any, training: bool) -> Any:
    """Calls a model as Keras's own steps do: its `call` need not accept `training`."""
    if has_training_argument(model):
        return model(x, training=training)
    return model(x)


def own_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Returns the variables that a layer holds itself, without its sublayers'."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def own_non_trainable_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Returns those of `own_variables` that the layer created as not trainable."""
    return list(layer._non_trainable_variables)


def own_metrics(layer: keras.layers.Layer) -> list[keras.metrics.Metric]:
    """Returns the metrics that a layer holds itself, without its sublayers'."""
    return list(layer._metrics)


def own_seed_generators(layer: keras.layers.Layer) -> list[keras.random.SeedGenerator]:
    """Returns the seed generators that a layer holds itself."""
    return list(layer._seed_generators)


def embedding_table(layer: keras.layers.Embedding) -> keras.Variable:
    """Returns the variable in which a built Embedding looks up its rows."""
    return layer._embeddings


def renormalizes(layer: keras.layers.BatchNormalization) -> bool:
    """Checks whether a layer uses batch renormalization, which came with Keras 3.14."""
    return getattr(layer, "renorm", False)


def tag(tensor: tf.Tensor, name: str) -> Any:
    """Returns one of the `TAGS` of a tensor, or `None`."""
    return getattr(tensor, name, None)


def set_tag(tensor: tf.Tensor, name: str, value: Any) -> None:
    """Attaches one of the `TAGS` to a tensor, unless the value is `None`."""
    if value is not None:
        setattr(tensor, name, value)


def logits_of(output: tf.Tensor) -> tf.Tensor | None:
    """Returns the logits from which a sigmoid or softmax was computed, if known.

    Keras's losses use them instead of the output.
    """
    return tag(output, "_keras_logits")


def stateless_scope_here() -> keras.StatelessScope | None:
    """Returns the innermost `keras.StatelessScope` of this thread, if there is one."""
    return stateless_scope.get_stateless_scope()


def is_keras_own(thing: Any) -> bool:
    """Checks whether Keras itself defines a class or function."""
    return (getattr(thing, "__module__", None) or "").startswith("keras.src.")
