"""Refuses models that towers cannot compute, by a `ModelError` in a sentence."""

from collections.abc import Sequence

import keras

from towers.keras_adapter.layers import layers_of
from towers.partition import trace
from towers.tower.errors import ModelError


def check_variables(model: keras.Model) -> None:
    """Refuses variables whose gradients on several towers cannot be combined."""
    others = trace.overwritten_unlike_float8(model)
    if others:
        raise ModelError(
            f"Model '{model.name}' has a variable '{others[0].path}' that is "
            "overwritten with its gradient (overwrite_with_gradient), and Towers does "
            "not know how to combine the gradients; expected only those of Keras's "
            "float8, so pass strict=False to multi_gpu_model to take the largest."
        )


def refuse_stateful(model: keras.Model) -> None:
    """Refuses layers that keep a state for each row of the batch: a `ModelError`."""
    for layer in layers_of(model):
        if getattr(layer, "stateful", False):
            raise ModelError(
                f"The layer '{layer.name}' is stateful: it keeps a value for each row "
                "of the batch, which towers do not carry; use stateful=False."
            )


def refuse_stateful_draws(model: keras.Model, phrases: Sequence[str]) -> None:
    """Refuses random numbers of TensorFlow's own state, on several hosts.

    Args:
        model: The model.
        phrases: They tell where a step draws such numbers; none if it does not.
    """
    if phrases:
        raise ModelError(
            f"Model '{model.name}' draws random numbers of TensorFlow's own state"
            f"{phrases[0]}, which differs between hosts; expected a step that draws "
            "by keras.random with a seed generator, or run_eagerly=True."
        )


def is_synchronized(model: keras.Model) -> bool:
    """Tells whether a layer normalizes by all rows of a batch."""
    return any(getattr(layer, "synchronized", False) for layer in layers_of(model))
