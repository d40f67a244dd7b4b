"""What towers cannot compute of a model: each raises a `ModelError`, in a sentence."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.analysis import effects
from towers.analysis.effects import Effect
from towers.analysis.rules import Rules
from towers.layers import overwritten
from towers.tower.errors import ModelError
from towers.tower.passes import TowerResult


def check_variables(model: keras.Model) -> None:
    """Refuses variables whose gradients on several towers cannot be combined."""
    others = overwritten.others(model)
    if others:
        raise ModelError(
            f"Model '{model.name}' has a variable '{others[0].path}' that is "
            "overwritten with its gradient (overwrite_with_gradient), and Towers does "
            "not know how to combine the gradients; expected only those of Keras's "
            "float8, so pass strict=False to multi_gpu_model to take the largest."
        )


def check_effects(model: keras.Model, found: Iterable[Effect]) -> list[str]:
    """Refuses what a tower may not do besides computing.

    Returns a sentence for each effect that each tower may have.
    """
    lines = []
    for effect in found:
        if effect.type not in effects.REPEATED:
            raise ModelError(effects.sentence(model, effect))
        lines.append(
            f"Model '{model.name}' does more than compute: each tower runs {effect} "
            "for its local batch."
        )
    return lines


def check_coupling(model: keras.Model, rules: Rules) -> None:
    """Refuses a model of which an output was seen to depend on other examples."""
    if rules.coupling is not None:
        raise ModelError(
            f"Model '{model.name}' makes an example's output depend on other "
            f"examples, by {rules.coupling}, but a tower sees only its local "
            "batch; expected a model that treats each example by itself; to accept "
            "other numbers than one device's, pass strict=False to multi_gpu_model."
        )


def check_outputs(model: keras.Model, outputs: Any) -> None:
    """Refuses outputs, traced for any number of rows, that have another number."""
    for output in tf.nest.flatten(outputs):
        if output is not None and (
            output.shape.rank == 0 or output.shape[0] is not None
        ):
            raise _cannot_join(model, output)


def check_results(model: keras.Model, results: Sequence[TowerResult]) -> None:
    """Checks the same of what eager towers return, which may not have been traced."""
    for result in results:
        for output in tf.nest.flatten(result.outputs):
            if output is not None and (
                output.shape.rank == 0
                or (result.size and (output.shape[0] or 0) % result.size)
            ):
                raise _cannot_join(model, output)


def _cannot_join(model, output):
    return ModelError(
        f"Model '{model.name}' returns an output of shape {output.shape} for a batch "
        "of any size, so towers cannot join their outputs; expected one row for each "
        "example."
    )
