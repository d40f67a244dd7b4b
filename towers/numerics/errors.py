"""Errors of runs whose numbers are not finite."""

from typing import Any

from towers._deprecated import accepts_old_names


class NotFinite(Exception):
    """A number of the run is infinite or not a number; what was saved before is not."""


@accepts_old_names
class NotFiniteStep(NotFinite):
    """A step of training is not finite; its batch was left out, and training ended.

    Attributes:
        step: Number of the step.
        origin: What was not finite first, a `NonFiniteOrigin`.
        file: What `locate` reads, if it was written.
        checkpoint: The last checkpoint, "" before the first, `None` if none are made.
    """

    def __init__(self, step: int, origin: Any, text: str, file: str | None):
        super().__init__(text)
        self.step, self.origin, self.file = step, origin, file
        self.checkpoint: str | None = None

    def __str__(self) -> str:
        saved = ""
        if self.checkpoint is not None:
            saved = "; nothing was saved yet"
            if self.checkpoint:
                saved = f"; the last checkpoint, from before, is {self.checkpoint}"
        return f"{super().__str__()}{saved}."
