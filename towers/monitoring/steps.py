"""Counts the steps of a run: intervals between reports, calls, and the time left."""

import time
from collections.abc import Callable
from typing import NamedTuple

import keras

from towers.keras_adapter.models import batches_done
from towers.layers.variables import steps_done


class Interval:
    """A number of optimizer steps between two reports.

    Attributes:
        step: The optimizer's step at the last call.
    """

    def __init__(self, log_steps: int):
        if log_steps < 1:
            raise ValueError(f"Received log_steps={log_steps}; expected at least 1.")
        self._log_steps, self.step = log_steps, 0

    def begin(self, model: keras.Model) -> None:
        """Continues the count of a model's optimizer."""
        self.step = steps_done(model)

    def is_over(self, model: keras.Model) -> bool:
        """Tells whether an interval has ended since the last call."""
        before = self.step
        self.begin(model)
        return before // self._log_steps != self.step // self._log_steps


class Call(NamedTuple):
    """A call of training, of one or several steps.

    Attributes:
        first: The index of its first batch in the epoch.
        end: The index after its last batch.
        seconds: Time inside the call.
        warm: Whether it began after the warm-up, with the towers of the call before.
    """

    first: int
    end: int
    seconds: float
    warm: bool


class Calls:
    """Measures the time of training calls; the first steps are the warm-up."""

    def __init__(self, warmup_steps: int, clock: Callable[[], float]):
        self._warmup_steps, self._clock = warmup_steps, clock
        self._steps = self._first = 0
        self._begun_s, self._builder = 0.0, None

    def begin(self, batch: int) -> None:
        """Starts the clock; `batch` is the first of the call's batches."""
        self._first, self._begun_s = batch, self._clock()

    def end(self, model: keras.Model, batch: int) -> Call:
        """Stops the clock; `batch` is Keras's argument of `on_train_batch_end`."""
        seconds = self._clock() - self._begun_s
        end, warm = batches_done(model, batch), self._steps >= self._warmup_steps
        # New towers trace another graph in their first call.
        builder = getattr(model, "builder", None)
        warm, self._builder = warm and builder is self._builder, builder
        self._steps += end - self._first
        return Call(self._first, end, seconds, warm)


class TimeLeft:
    """Estimates the time left from the steps so far.

    It counts from the end of the first call on, as that call builds the graphs. All
    that happens between steps counts, once it has happened: validation and saving, too.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Starts the clock.

        Args:
            clock: Returns seconds.
        """
        self._clock = clock
        self._begun_s = clock()
        self._first: tuple[int, float] | None = None
        self._last_step = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._begun_s

    def count(self, step: int) -> None:
        """Takes the number of steps that are done, after each call of training."""
        self._last_step = step
        if self._first is None:
            self._first = step, self._clock()

    def left_s(self, steps: int) -> float | None:
        """Returns the seconds that more steps take; `None` before the second call."""
        if self._first is None or self._last_step == self._first[0]:
            return None
        step, begun_s = self._first
        return steps * (self._clock() - begun_s) / (self._last_step - step)
