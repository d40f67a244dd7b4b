"""Errors of runs whose numbers are not finite."""

from typing import Any


class NotFinite(Exception):
    """A value of the run is not finite; the checkpoints before it are finite."""


class NotFiniteStep(NotFinite):
    """A training step is not finite; its batch was left out, and training ended.

    Attributes:
        step: The number of the step.
        origin: The first value that was not finite, a `NonFiniteOrigin`.
        file: The file for `locate`, if it was written.
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
