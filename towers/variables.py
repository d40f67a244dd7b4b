"""All variables that training changes: their values, kept and given back."""

import contextlib
from collections.abc import Iterator, Sequence

import keras
import numpy as np


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


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """Leaves the values of all that training changes as they are."""
    start = values(model)
    try:
        yield
    finally:
        assign(model, start)
