"""Converts the state of a run without its variables to JSON, with arrays apart."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.keras_adapter.randomness import random_states, set_random_states
from towers.program.voice import warn

# The attributes of Keras's own callbacks that hold state; others have a `state_dict()`.
# A checkpoint may come from anybody, so it can set only these: numbers, and no path to
# which a callback writes.
_KNOWN = {
    keras.callbacks.EarlyStopping: (
        *("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    ),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best",),
}

# Names for types that JSON lacks; each object in a saved state has one of these.
_ARRAY, _TUPLE, _DICT = "array", "tuple", "dict"


def collect(
    model: keras.Model,
    callbacks: Sequence[keras.callbacks.Callback],
    epochs: int,
    arrays: list[Any],
) -> dict[str, Any]:
    """Returns the history, and the states of callbacks and random generators.

    Args:
        model: The model with the history.
        callbacks: The callbacks of `fit`.
        epochs: The number of finished epochs.
        arrays: Receives the arrays, which are not JSON.

    Raises:
        ValueError: A callback's `state_dict()` has values that cannot be saved.
    """
    return {
        "history": _history(model, epochs),
        "callbacks": [
            [callback.__class__.__name__, _saved_state(callback, arrays)]
            for callback in callbacks
        ],
        "random": random_states(),
    }


def averaging(
    callbacks: Sequence[keras.callbacks.Callback],
) -> list[keras.callbacks.SwapEMAWeights]:
    """Returns the callbacks that replace weights by averages."""
    return [c for c in callbacks if isinstance(c, keras.callbacks.SwapEMAWeights)]


def give_back(
    model: keras.Model,
    callbacks: Sequence[keras.callbacks.Callback],
    states: Mapping[str, Any],
    arrays: Sequence[Any],
) -> None:
    """Restores the states that `collect` has returned.

    The callbacks may be other objects: each gets the state of its class.
    """
    if (history := getattr(model, "history", None)) is not None:
        history.epoch = states["history"]["epoch"]
        history.history = states["history"]["history"]
    known = list(states["callbacks"])
    for callback in callbacks:
        name = callback.__class__.__name__
        saved = next((entry for entry in known if entry[0] == name), [name, None])
        if saved[1] is None:
            continue
        known.remove(saved)
        state = _from_json(saved[1], arrays)
        if hasattr(callback, "load_state_dict"):
            callback.load_state_dict(state)
        else:
            _set_known(callback, state)
    set_random_states(states["random"])


def _set_known(callback, state):
    """Sets known attributes of a Keras callback; warns of other attributes."""
    known = [
        name
        for name in _known_names(callback) or ()
        if name in state and _is_numeric(state[name])
    ]
    for name in known:
        setattr(callback, name, state[name])
    if left := [str(name) for name in state if name not in known]:
        warn(
            f"The checkpoint's {type(callback).__name__} has {', '.join(left)}, which "
            "no checkpoint of ours has; it is left as it is."
        )


def _is_numeric(value):
    """Tells whether a value has only numbers, arrays of numbers and `None`."""
    if isinstance(value, list):
        return all(map(_is_numeric, value))
    if isinstance(value, np.ndarray):
        return value.dtype.kind not in "OSUV"
    return value is None or isinstance(value, bool | int | float)


def state_of(states: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the saved state of the first callback of a class, without arrays."""
    state = next((s for n, s in states.get("callbacks", ()) if n == name), None)
    return _from_json(state, ()) if state else {}


def _history(model, epochs):
    """Returns the history of whole epochs; an interrupted epoch is added later."""
    history = getattr(model, "history", None)
    past = getattr(history, "epoch", [])
    kept = sum(epoch < epochs for epoch in past)
    logs = history.history if past else {}
    plain = {name: _plain(values[:kept]) for name, values in logs.items()}
    return {
        "epoch": past[:kept],
        "history": {k: values for k, values in plain.items() if values is not None},
    }


def _plain(values):
    """Returns a list as JSON or as numbers; None if it is neither."""
    try:
        json.dumps(values)
        return values
    except (TypeError, ValueError):
        pass
    try:
        return [*map(float, values)]
    except (TypeError, ValueError):
        return None


def _saved_state(callback, arrays):
    state = _state(callback)
    try:
        return None if state is None else _to_json(state, arrays)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Cannot save the state_dict() of the callback {type(callback).__name__}: "
            f"{error}; expected numbers, text, None and arrays, in lists and dicts."
        ) from error


def _state(callback):
    if hasattr(callback, "state_dict"):
        return callback.state_dict()
    names = _known_names(callback)
    return names and {name: getattr(callback, name, None) for name in names}


def _known_names(callback):
    """Returns the state attributes of a Keras callback; `None` for other callbacks."""
    for kind, names in _KNOWN.items():
        if isinstance(callback, kind):
            return names
    return None


def _to_json(value, arrays):
    if isinstance(value, dict):
        # As pairs, because the keys of JSON are strings.
        pairs = value.items()
        return {_DICT: [[_to_json(part, arrays) for part in pair] for pair in pairs]}
    if isinstance(value, tuple):
        return {_TUPLE: [_to_json(part, arrays) for part in value]}
    if isinstance(value, list):
        return [_to_json(part, arrays) for part in value]
    if isinstance(value, np.ndarray | tf.Tensor):
        arrays.append(tf.convert_to_tensor(value))
        return {_ARRAY: len(arrays) - 1}
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"it has a {type(value).__name__}")


def _from_json(value, arrays):
    if isinstance(value, list):
        return [_from_json(part, arrays) for part in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return np.asarray(arrays[value[_ARRAY]])
    if _TUPLE in value:
        return tuple(_from_json(value[_TUPLE], arrays))
    # Older checkpoints store dicts directly.
    pairs = value.get(_DICT, value.items())
    return {_from_json(k, arrays): _from_json(v, arrays) for k, v in pairs}
