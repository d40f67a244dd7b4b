"""Which towers a run has had, and why they have changed."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

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
        split_ratios: The parts of a batch that the towers get; empty on several hosts,
            and in runs of earlier versions.
    """

    step: int
    towers: Sequence[str]
    why: str
    seconds: float | None = None
    steps_lost: int = 0
    split_ratios: Sequence[int] = dataclasses.field(default_factory=list)

    def line(self, before: "Generation") -> str:
        """Says what has changed since the generation before, in a sentence."""
        return (
            f"Step {self.step:,}: {self._change(before)}, by {self.why}; "
            f"{self.seconds:.2f} s from step to step, "
            f"{words.count(self.steps_lost, 'step')} lost."
        )

    def _change(self, before):
        was, now = before.split_ratios, self.split_ratios
        if [*self.towers] == [*before.towers] and was and now and was != now:
            was, now = (":".join(map(str, each)) for each in (was, now))
            return f"split ratios {was} -> {now}"
        now = words.count(len(self.towers), "tower")
        return f"{len(before.towers)} -> {now} ({', '.join(self.towers)})"


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


# A wish for other towers.


def _nothing(*_: Any) -> None:
    pass


class Wish(NamedTuple):
    """Other towers for a run.

    Attributes:
        why: Who or what wants it, in a few words.
        gpus: The devices, as `TowerModel.resize` takes them.
        split_ratios: As of `TowerModel.resize`.
        applied: Is called once the towers are these, before their first step.
        done: Is told, in a sentence, what has become of the wish.
        refused: Is told, in a sentence, why it cannot be.
    """

    why: str
    gpus: Sequence[str]
    split_ratios: Sequence[int] | None = None
    applied: Callable[[], None] = _nothing
    done: Callable[[str], None] = _nothing
    refused: Callable[[str], None] = _nothing


class WishSource(Protocol):
    """Where wishes for other towers come from."""

    def look(self) -> Wish | None:
        """Returns a wish, if there is one."""
