"""Eager execution: towers take turns, in plain Python, each with its local batch.

Layers and losses may then print, look at values and stop in a debugger. What has to be
known of a model, because towers add up what they make of local batches, is still read
from a graph, where one can be traced. Such a trace is nobody's step: it prints nothing,
does not stop in a debugger, and leaves Python attributes as they were.
"""

import contextlib
import functools
import pdb
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.analysis.rules import Rules
from towers.collectives import batch
from towers.keras_adapter.layers import layers_of
from towers.keras_adapter.patching import Target, patched
from towers.tower.errors import ModelError

# What `breakpoint()` calls.
_SET_TRACE = Target(pdb, "set_trace")
_PLAIN = bool, int, float, complex, str, bytes, type(None), np.generic


class Proofs:
    """The rules of eager towers, by what the towers are called with.

    They hold as long as nothing that they may depend on can have changed: the batch's
    structure, the Python attributes of layers, or what a user's code changes between
    two calls of Keras's loop.
    """

    def __init__(self) -> None:
        self._rules: dict[tuple[str, str], Rules] = {}
        self._plain: list[Any] = []

    def forget(self) -> None:
        """Is told that anything may have changed."""
        self._rules.clear()

    def of(self, model: keras.Model, step: str, data: Any, rules: Rules) -> Rules:
        """Returns the rules for one step, to be read if they are not complete.

        Args:
            model: The model.
            step: Name of the step.
            data: What the towers get of the batch: a nest of tensors and arrays.
            rules: Rules without an entry.
        """
        plain = Attributes(model).plain()
        if plain != self._plain:
            self.forget()
            self._plain = plain
        data = tf.nest.map_structure(batch.as_tensor, data)
        key = step, str(batch.local_spec(data, None))
        return self._rules.setdefault(key, rules)


class Attributes:
    """The Python attributes of a user's layers, at one moment."""

    def __init__(self, model: keras.Model):
        # The model is one of its layers.
        self._before = [
            (layer, _own(layer))
            for layer in layers_of(model)
            if not type(layer).__module__.startswith("keras.")
        ]

    def plain(self) -> list[Any]:
        """Returns those that are plain values or functions, to be compared."""
        return [
            (id(layer), name, value if isinstance(value, _PLAIN) else id(value))
            for layer, before in self._before
            for name, (value, _) in before.items()
            if isinstance(value, _PLAIN) or _is_function(value)
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

    def changed(self) -> dict[tuple[str, str], Any]:
        """Returns what has changed since: the values now, by layer and attribute."""
        return {
            (layer.name, name): value
            for layer, before in self._before
            for name, (value, content) in _own(layer).items()
            if name not in before or not _same(before[name], (value, content))
        }


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


def _is_function(value):
    return callable(value) and not isinstance(value, keras.layers.Layer)


class Turns:
    """Has towers take turns: all begin with the same plain attributes.

    What all towers make alike of an attribute then counts once, as on one device.
    """

    def __init__(self, model: keras.Model):
        self._before = Attributes(model)
        self._found: list[dict[tuple[str, str], Any]] = []

    def take(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a tower's function.

        Raises:
            ModelError: If a layer assigns a `tf.Variable` that is not Keras's.
        """
        if self._found:
            self._before.restore(_PLAIN)
        result = function(*arguments)
        self._found.append(self._before.changed())
        for (layer, name), value in self._found[-1].items():
            if isinstance(value, tf.Variable):
                self._before.restore(tf.Variable)
                raise ModelError(
                    f"Layer '{layer}' assigns the tf.Variable '{name}' while it is "
                    "called; towers can only combine Keras variables, so create it "
                    "with `self.add_weight(trainable=False)`."
                )
        return result

    def lines(self) -> list[str]:
        """Returns a sentence for each attribute that the towers have changed."""
        if len(self._found) < 2:
            return []
        names = dict.fromkeys(name for found in self._found for name in found)
        return [
            _alike(*name)
            if all(_equal(found.get(name), last.get(name)) for found in self._found)
            else _apart(*name, len(self._found))
            for last in self._found[-1:]
            for name in names
        ]

    def kept(self) -> str:
        """Names an attribute that a tower has left a tensor in; "" if there is none."""
        found = self._found or [self._before.changed()]
        names = [name for name, value in found[-1].items() if tf.is_tensor(value)]
        return "'{1}' of layer '{0}'".format(*names[0]) if names else ""

    def lines_of_all(self, parts: int) -> list[str]:
        """Returns the sentences for so many towers, which have not taken turns."""
        if parts < 2:
            return []
        return [_apart(*name, parts) for name in self._before.changed()]


def _equal(value, other):
    return isinstance(value, _PLAIN) and repr(value) == repr(other)


def _alike(layer, name):
    return (
        f"Layer '{layer}' changes its Python attribute '{name}' while it is called. "
        "Each part of a batch begins with the same value and changes it alike, so it "
        "changes once a batch, as on one device. Without run_eagerly it does not "
        "change; use `self.add_weight(trainable=False)` for a value that has to."
    )


def _apart(layer, name, parts):
    return (
        f"Layer '{layer}' changes its Python attribute '{name}' while it is called. "
        f"It is called with {parts} parts of a batch, and each changes it, so its "
        "value is not that of one device with the whole batch; use a variable, by "
        "`self.add_weight(trainable=False)`, or return an output."
    )


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
