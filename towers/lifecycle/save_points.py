"""When a run is saved inside of an epoch."""

import time
from collections.abc import Callable


class SavePoints:
    """Tells when the next checkpoint is due, by steps or by minutes.

    Attributes:
        steps: Batches between two checkpoints, if they are counted.
    """

    def __init__(
        self,
        steps: int | None,
        minutes: float | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """See `Checkpoint` for the arguments.

        Raises:
            ValueError: One of them is not as described.
        """
        if steps is not None and (type(steps) is not int or steps < 1):
            raise ValueError(
                f"Received save_steps={steps!r}; expected an integer of at least 1."
            )
        if minutes is not None and not (
            isinstance(minutes, int | float) and minutes >= 0
        ):
            raise ValueError(
                f"Received save_minutes={minutes!r}; expected a number of at least 0, "
                "or None."
            )
        self.steps, self._minutes, self._clock = steps, minutes, clock

    def count_from(self, step: int) -> None:
        """Counts from now on; `step` is the number of the step that is done."""
        self._step, self._time_s = step, self._clock()

    def steps_are_done(self, step: int) -> bool:
        """Tells whether the run is to be saved after a step, by its number."""
        return bool(self.steps) and step - self._step >= self.steps

    def minutes_are_over(self) -> bool:
        """Tells whether the run is to be saved by the clock."""
        if self._minutes is None:
            return False
        return self._clock() - self._time_s >= 60 * self._minutes
