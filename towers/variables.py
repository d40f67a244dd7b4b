"""All variables that training changes: their values, kept and given back."""

import contextlib
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf


def of(model: keras.Model) -> list[keras.Variable]:
    """Returns all that training changes: of model, optimizer, metrics and loss."""
    found = [*model.variables, *model.metrics_variables]
    for part in (getattr(model, "optimizer", None), model._compile_loss):
        found += part.variables if part is not None else []
    return list({id(variable): variable for variable in found}.values())


def values(model: keras.Model) -> list[np.ndarray]:
    """Returns the values of the variables `of` a model."""
    return [variable.numpy() for variable in of(model)]


def assign(model: keras.Model, start: Sequence[np.ndarray]) -> None:
    """Assigns what `values` returned."""
    for variable, value in zip(of(model), start, strict=True):
        variable.assign(value)


def beside(model: keras.Model, graph: tf.Graph | None) -> list[tf.Variable]:
    """Returns what a step uses beside those `of` a model, such as a loss's own counter.

    Args:
        model: The model.
        graph: In which the step was traced, if it was.
    """
    own = {id(variable.value) for variable in of(model)}
    used = getattr(graph, "variables", ())
    return [variable for variable in used if id(variable) not in own]


@contextlib.contextmanager
def unchanged(model: keras.Model, others: Sequence[tf.Variable] = ()) -> Iterator[None]:
    """Leaves the values of all that training changes as they are.

    Args:
        model: The model.
        others: What else to leave so; see `beside`.
    """
    start, theirs = values(model), [variable.numpy() for variable in others]
    try:
        yield
    finally:
        assign(model, start)
        for variable, value in zip(others, theirs, strict=True):
            variable.assign(value)
