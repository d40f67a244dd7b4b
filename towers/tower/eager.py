"""Calls a model outside of any step, such as to build it.

Such calls print nothing, do not stop in a debugger, and restore Python attributes.
"""

import contextlib
import functools
import pdb
import sys
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.collectives import batch
from towers.keras_adapter.layers import layers_of
from towers.keras_adapter.models import (
    compiled_loss,
    compiled_loss_as_built,
    compute_loss_replaced,
    overrides,
    symbolic_build,
)
from towers.keras_adapter.patching import Target, patched
from towers.tower.errors import explained_build
from towers.tower.preprocess import Preprocess

# The function that `breakpoint()` calls.
_SET_TRACE = Target(pdb, "set_trace")
_PLAIN = bool, int, float, complex, str, bytes, type(None), np.generic
_SPARSE = tf.SparseTensor | tf.SparseTensorSpec
_RAGGED = tf.RaggedTensor | tf.RaggedTensorSpec


class Attributes:
    """The Python attributes of a user's layers at one moment."""

    def __init__(self, model: keras.Model):
        # The model is one of its layers.
        self._before = [
            (layer, _own(layer))
            for layer in layers_of(model)
            if not type(layer).__module__.startswith("keras.")
        ]

    def restore(self, what: Any = object) -> None:
        """Restores the attributes that have changed.

        Args:
            what: The type, or types, that an attribute must have, before and now. With
                `object`, new attributes are removed, and lists, dicts, sets and
                `tf.Variable`s get their former contents back.
        """
        for layer, before in self._before:
            for name, (value_now, content_now) in _own(layer).items():
                if not isinstance(value_now, what):
                    continue
                value, content = before.get(name, (None, None))
                if name not in before:
                    if what is object:
                        del vars(layer)[name]
                elif isinstance(value, what):
                    vars(layer)[name] = value
                    if not _same((value, content), (value, content_now)):
                        _refill(value, content)


def _own(layer):
    """Returns a layer's own attributes, as values and copies of mutable contents."""
    return {
        name: (value, _content(value))
        for name, value in vars(layer).items()
        if name not in _of_every_layer()
    }


@functools.cache
def _of_every_layer():
    return vars(keras.layers.Layer()).keys() | vars(keras.Model()).keys()


def _content(value):
    """Returns a copy of a mutable value's contents, `None` for other values."""
    if isinstance(value, list | dict | set):
        kinds = list, dict, set
        return next(kind for kind in kinds if isinstance(value, kind))(value)
    return np.array(value) if isinstance(value, tf.Variable) else None


def _refill(value, content):
    if isinstance(value, tf.Variable):
        value.assign(content)
    elif isinstance(value, list):
        value[:] = content
    else:
        value.clear()
        value.update(content)


def _same(old, new):
    (value, content), (value_now, content_now) = old, new
    if isinstance(value, _PLAIN) and isinstance(value_now, _PLAIN):
        return repr(value) == repr(value_now)
    if value is not value_now:
        return False
    if isinstance(content, np.ndarray):
        return np.array_equal(content, content_now)
    if content is None:
        return True
    # Compares identities, as values may be tensors.
    return _identities(content) == _identities(content_now)


def _identities(content):
    if isinstance(content, dict):
        return {key: id(value) for key, value in content.items()}
    return [*map(id, content)]


@contextlib.contextmanager
def aside(model: keras.Model, builds: bool = False) -> Iterator[None]:
    """Undoes side effects of calls of the model within the context.

    Output of this thread is dropped, `breakpoint()` does not stop, and the attributes
    of layers are restored.

    Args:
        model: The model.
        builds: Whether layers are built. Then only numbers, such as counters, are
            restored, and layers keep what they store when they are built.
    """
    attributes = Attributes(model)
    silent = contextlib.redirect_stdout(_Silent(sys.stdout))
    try:
        with silent, patched(_SET_TRACE, lambda *_, **__: None):
            yield
    finally:
        attributes.restore((int, float) if builds else object)


class _Silent:
    """A stream that drops the output of one thread."""

    def __init__(self, stream):
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text):
        if threading.get_ident() != self._thread:
            return self._stream.write(text)
        return len(text)

    def __getattr__(self, name):
        return getattr(self._stream, name)


# Variables that Keras creates late: those of layers, losses, metrics and optimizer.
#
# A tower cannot create a variable, so all variables must exist before it is traced.


def from_symbols(
    model: keras.Model, data: Any, preprocess: Preprocess | None = None
) -> None:
    """Creates the variables of a model, its compiled losses, metrics and optimizer.

    Args:
        model: A compiled Keras model.
        data: A batch as passed to Keras's `train_step`, or its `tf.TypeSpec`s.
        preprocess: The preprocessing of batches on the towers, if any.
    """
    if preprocess is None:
        _build(model, data)
        return
    data = batch.specs(keras.utils.unpack_x_y_sample_weight(data))
    data = preprocess.widened(data)
    x, y, weight = preprocess.spec(data, training=True)
    # Metrics take the original y, the loss the preprocessed one.
    with compiled_loss_as_built(model):
        _build(model, (x, data[1], weight))
    _build(model, (x, y, weight))


def symbols(data: Any) -> Any:
    """Returns Keras's symbols for a nest of tensors, or of their `tf.TypeSpec`s."""
    return tf.nest.map_structure(_symbol, data)


def _build(model, data):
    def losses(x, y, y_pred, sample_weight, training):
        """Replaces a user's `compute_loss`, which need not use these losses."""
        with contextlib.suppress(Exception):
            compiled_loss(model)(y, y_pred, sample_weight)

    of_the_user = contextlib.nullcontext()
    if overrides(model, "compute_loss"):
        # A user's method may need more than symbols, such as a gradient.
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
