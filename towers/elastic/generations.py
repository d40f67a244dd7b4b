"""Which towers a run has had, and why they have changed."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from towers.program import words


@dataclasses.dataclass(frozen=True)
class Generation:
    """The time between two changes of the towers.

    Attributes:
        step: The steps that were done before.
        towers: The devices of its towers.
        why: Why it began, in a few words.
        seconds: From the end of the last step before to that of its first one; `None`
            for the first generation.
        steps_lost: Steps before that had to be computed again.
    """

    step: int
    towers: Sequence[str]
    why: str
    seconds: float | None = None
    steps_lost: int = 0

    def line(self, before: "Generation") -> str:
        """Says what has changed since the generation before, in a sentence."""
        was, now = len(before.towers), words.count(len(self.towers), "tower")
        names = ", ".join(self.towers)
        return (
            f"Step {self.step:,}: {was} -> {now} ({names}), by {self.why}; "
            f"{self.seconds:.2f} s from step to step, "
            f"{words.count(self.steps_lost, 'step')} lost."
        )


class Generations:
    """The generations of a run, the present one last.

    Attributes:
        every: All of them.
        marks: What is to be told of changes, in sentences.
    """

    def __init__(self):
        self.every: list[Generation] = []
        self.marks: list[str] = []

    def begin(self, generation: Generation) -> str | None:
        """Notes a generation; returns what to say of the change, if it is one."""
        self.every.append(generation)
        if generation.seconds is None or len(self.every) == 1:
            return None
        return generation.line(self.every[-2])

    def as_json(self) -> list[dict[str, Any]]:
        """Returns them as JSON."""
        return [dataclasses.asdict(each) for each in self.every]

    def recall(self, saved: Sequence[dict[str, Any]]) -> None:
        """Puts those of an earlier run, as `as_json` has returned them, first."""
        before = [Generation(**each) for each in saved]
        if self.every[-1:] != before[-1:]:
            before += self.every[-1:]
        self.every[:] = before
