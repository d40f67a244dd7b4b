"""All that a checkpoint has, but for the variables."""

from collections.abc import Mapping, Sequence
from typing import Any

from towers.lifecycle.checkpoints import saved_model, states
from towers.lifecycle.checkpoints.best import Monitor
from towers.lifecycle.checkpoints.store import Contents, Position
from towers.lifecycle.current_fit import CurrentEpoch, CurrentFit


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
