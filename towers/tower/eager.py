"""Calls of a model that are part of no step, such as to build it.

They print nothing, do not stop in a debugger, and leave Python attributes as they were.
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

from towers.keras_adapter.layers import layers_of
from towers.keras_adapter.patching import Target, patched

# What `breakpoint()` calls.
_SET_TRACE = Target(pdb, "set_trace")
_PLAIN = bool, int, float, complex, str, bytes, type(None), np.generic


class Attributes:
    """The Python attributes of a user's layers, at one moment."""

    def __init__(self, model: keras.Model):
        # The model is one of its layers.
        self._before = [
            (layer, _own(layer))
            for layer in layers_of(model)
            if not type(layer).__module__.startswith("keras.")
        ]

    def restore(self, what: Any = object) -> None:
        """Gives attributes back that have changed.

        Args:
            what: Their type, before and now, or several. Of all objects, new ones are
                taken away, and lists, dicts, sets and `tf.Variable`s have again what
                was in them.
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
    """What a layer has besides what every layer has: values, and contents of some."""
    return {
        name: (value, _content(value))
        for name, value in vars(layer).items()
        if name not in _of_every_layer()
    }


@functools.cache
def _of_every_layer():
    return vars(keras.layers.Layer()).keys() | vars(keras.Model()).keys()


def _content(value):
    """A copy of what can change within a value, `None` if nothing can."""
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
    # Not by the values, which may be tensors.
    return _identities(content) == _identities(content_now)


def _identities(content):
    if isinstance(content, dict):
        return {key: id(value) for key, value in content.items()}
    return [*map(id, content)]


@contextlib.contextmanager
def aside(model: keras.Model, builds: bool = False) -> Iterator[None]:
    """Inside, calls of the model leave no trace, as they are part of no step.

    What this thread prints is dropped, `breakpoint()` does not stop, and the attributes
    of layers get their values back.

    Args:
        model: The model.
        builds: Whether layers are built. Then numbers alone are given back: counters,
            and not what layers keep when they are built.
    """
    attributes = Attributes(model)
    silent = contextlib.redirect_stdout(_Silent(sys.stdout))
    try:
        with silent, patched(_SET_TRACE, lambda *_, **__: None):
            yield
    finally:
        attributes.restore((int, float) if builds else object)


class _Silent:
    """A stream that drops what one thread writes."""

    def __init__(self, stream):
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text):
        if threading.get_ident() != self._thread:
            return self._stream.write(text)
        return len(text)

    def __getattr__(self, name):
        return getattr(self._stream, name)
