"""Holds the state that a save needs of the running `fit` and its epoch."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from towers.layers.variables import steps_done
from towers.lifecycle.checkpoints import saved_model, states
from towers.lifecycle.checkpoints.best import Monitor
from towers.lifecycle.checkpoints.store import Contents, Position
from towers.model.fit_call import FitCall


@dataclasses.dataclass
class CurrentFit:
    """The running call of `fit`.

    Attributes:
        call: The call.
        others: The callbacks whose states are saved.
        data: The known facts that decide which records a batch has, as JSON.
        validates: Whether there are validation data.
        begun: The position at which the call began.
        values_before: For a continued epoch, the variables' values before callbacks
            heard of it.
        values_at_end: Values to save at the end, if other than the variables' then.
    """

    call: FitCall
    others: Sequence[keras.callbacks.Callback]
    data: Mapping[str, Any]
    validates: bool
    begun: Position
    values_before: Mapping[str, Any] | None = None
    values_at_end: Mapping[str, Any] | None = None
    _described: dict[str, list[list[Any]]] | None = None
    _counts: list[int] | None = None

    @property
    def step(self) -> int:
        """The number of the last step."""
        return steps_done(self.call.model)

    def described(self) -> dict[str, list[list[Any]]]:
        """Describes the variables; a model's own step may create some late."""
        parts = saved_model.parts(self.call.model)
        if (counts := [*map(len, parts.values())]) != self._counts:
            self._described = {
                part: saved_model.describe(variables)
                for part, variables in parts.items()
            }
            self._counts = counts
        return self._described


@dataclasses.dataclass
class CurrentEpoch:
    """The running epoch, or the last one.

    Attributes:
        random: The states of random generators at its beginning.
        read: The number of batches read in it.
        batch_begun: Whether a batch has begun and not ended.
        metrics: The values of the training metrics, while validation overwrites them.
        score: Its score, once it is over.
    """

    random: Mapping[str, Any] | None = None
    read: int = 0
    batch_begun: bool = False
    metrics: Sequence[Any] | None = None
    score: float | None = None


def contents(
    fit: CurrentFit,
    epoch: CurrentEpoch,
    position: Position,
    past: Sequence[int] | None,
    monitor: Monitor,
    preprocessing: Mapping[str, Any] | None,
) -> Contents:
    """Collects it.

    Args:
        fit: The call of `fit` that runs.
        epoch: The epoch that runs.
        position: How far the run has come.
        past: As of `RunState`.
        monitor: Tells which epoch was the best.
        preprocessing: As of `RunState`.
    """
    arrays = []
    model, score = fit.call.model, None if position.batch else epoch.score
    about = {
        "variables": fit.described(),
        "built_for": saved_model.built_for(model),
        "data": fit.data,
        "past": None if past is None else [*past],
        "step": fit.step,
        "preprocessing": preprocessing,
        **monitor.describe(score),
        **states.collect(model, fit.others, position.epoch, arrays),
    }
    values = {"callbacks": arrays}
    if position.batch:
        values["metrics"] = epoch.metrics or saved_model.copies(model.metrics_variables)
        about["random_at_begin"] = epoch.random
    return Contents(values, about)
