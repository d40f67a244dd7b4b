"""Tells whether a callback may change variables between two calls of training.

Any callback may, except those that are known. Only an object of the known class itself
counts: a subclass may do anything, and so may an object that replaces a function of its
class.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

# By class, its functions as they were when it became known.
_KNOWN: dict[type, dict[str, Callable]] = {}


def changes_no_variable(kind: type) -> type:
    """Declares, as a decorator, that a callback changes no variable between batches.

    It may do so as an epoch begins or ends. That does not hold for its subclasses.
    """
    _KNOWN[kind] = _functions(kind)
    return kind


def may_change_variables(callbacks: Any) -> bool:
    """Tells whether a callback of `fit`'s may change variables between batches."""
    return not all(_is_known(each) for each in flat(callbacks))


def flat(callbacks: Any) -> Iterator[Any]:
    """Yields all callbacks of what `fit` takes, with those in a `CallbackList`."""
    for callback in keras.tree.flatten(callbacks or ()):
        yield callback
        if isinstance(callback, keras.callbacks.CallbackList):
            yield from flat(callback.callbacks)


def _is_known(callback):
    kind = callback.__class__  # also of one that a proxy stands for
    known = _KNOWN.get(kind)
    if known is None or known.keys() & vars(callback).keys():
        return False
    return known == _functions(kind)


def _functions(kind):
    return {
        name: value
        for base in reversed(kind.__mro__)
        for name, value in vars(base).items()
        if inspect.isfunction(value)
    }


for _kind in (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.Callback,
    keras.callbacks.CallbackList,
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ModelCheckpoint,
    # Keras has it since 3.14.
    *filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]),
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TensorBoard,
    keras.callbacks.TerminateOnNaN,
):
    changes_no_variable(_kind)
