"""Creates what Keras creates late: variables of layers, losses, metrics and optimizer.

A tower cannot create a variable, so all have to exist before one is traced.
"""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from towers.keras_adapter.models import (
    compiled_loss,
    compiled_loss_as_built,
    compute_loss_replaced,
    overrides,
    symbolic_build,
)
from towers.tower.errors import explained_build
from towers.tower.preprocess import Preprocess

_SPARSE = tf.SparseTensor | tf.SparseTensorSpec
_RAGGED = tf.RaggedTensor | tf.RaggedTensorSpec


def from_symbols(
    model: keras.Model, data: Any, preprocess: Preprocess | None = None
) -> None:
    """Creates the variables of a model, its compiled losses, metrics and optimizer.

    Args:
        model: A compiled Keras model.
        data: A batch as Keras's `train_step` gets it, or its `tf.TypeSpec`s.
        preprocess: What towers do to the batch before the model sees it, if anything.
    """
    if preprocess is None:
        _build(model, data)
        return
    data = keras.utils.unpack_x_y_sample_weight(data)
    x, y, weight = preprocess.spec(data, training=True)
    # Metrics take y as it was given, the loss what has been made of it.
    with compiled_loss_as_built(model):
        _build(model, (x, data[1], weight))
    _build(model, (x, y, weight))


def symbols(data: Any) -> Any:
    """Returns Keras's symbols for a nest of tensors, or of their `tf.TypeSpec`s."""
    return tf.nest.map_structure(_symbol, data)


def _build(model, data):
    def losses(x, y, y_pred, sample_weight, training):
        """Stands in for a `compute_loss` of the user's, which need not use these."""
        with contextlib.suppress(Exception):
            compiled_loss(model)(y, y_pred, sample_weight)

    of_the_user = contextlib.nullcontext()
    if overrides(model, "compute_loss"):
        # It may need more than symbols, such as a gradient.
        of_the_user = compute_loss_replaced(model, losses)
    with of_the_user, explained_build(model):
        symbolic_build(model, tf.nest.map_structure(_symbol_or_spec, data))


def _symbol_or_spec(tensor):
    if isinstance(tensor, _SPARSE):
        return tf.SparseTensorSpec(tensor.shape, tensor.dtype)
    if isinstance(tensor, tf.RaggedTensor):
        return tf.type_spec_from_value(tensor)
    return tensor if isinstance(tensor, tf.RaggedTensorSpec) else _symbol(tensor)


def _symbol(tensor):
    if tensor is None:
        return None
    return keras.KerasTensor(
        tensor.shape,
        tf.as_dtype(tensor.dtype).name,
        sparse=isinstance(tensor, _SPARSE),
        ragged=isinstance(tensor, _RAGGED),
    )
