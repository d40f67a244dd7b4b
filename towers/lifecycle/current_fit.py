"""The call of `fit` that runs, and the epoch that it is in: what a save is to know."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from towers.layers.variables import steps_done
from towers.lifecycle.checkpoints import saved_model
from towers.lifecycle.checkpoints.store import Position
from towers.model.fit_call import FitCall


@dataclasses.dataclass
class CurrentFit:
    """The call of `fit` that runs.

    Attributes:
        call: The call.
        others: The callbacks whose states are saved.
        data: What is known to decide which records a batch has, as JSON.
        validates: Whether there are data to validate on.
        begun: The position that it has begun at.
        values_before: Values of the variables before callbacks heard of an epoch that
            goes on.
        values_at_end: Values to save at the end, if they are not those of then.
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
        """Describes the variables; a step of the model's own may create some late."""
        parts = saved_model.parts(self.call.model)
        if (counts := [*map(len, parts.values())]) != self._counts:
            self._described = {
                part: saved_model.describe(found) for part, found in parts.items()
            }
            self._counts = counts
        return self._described


@dataclasses.dataclass
class CurrentEpoch:
    """The epoch that runs, or has run last.

    Attributes:
        random: States of random numbers at its beginning.
        read: Batches that were read in it.
        batch_begun: Whether a batch has begun that has not ended.
        metrics: Values of the metrics, while a validation takes their place.
        score: How good it was, once it is over.
        step: Steps that were done before the batch that has begun, where hosts come
            and go.
    """

    random: Mapping[str, Any] | None = None
    read: int = 0
    batch_begun: bool = False
    metrics: Sequence[Any] | None = None
    score: float | None = None
    step: int = 0
