"""Trains with each number of towers in turn, each time in a process of its own."""

import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from towers.find_batch_size import child
from towers.monitoring.bottleneck import uneven
from towers.scaling import trial
from towers.scaling.scaling_flags import Scaling

# Uneven ratios are tried if they promise a step that is at most so long.
_PROMISING = 0.95
# The standard error of a median, to that of the mean of as many normal values.
_OF_MEDIAN = 1.25


@dataclasses.dataclass(frozen=True)
class Trial:
    """What was measured with some towers, in one round or in the median of several.

    Attributes:
        towers: The devices of the towers.
        split_ratios: How much of a batch each tower gets, relative to the others.
        sizes: Examples of a full batch that each tower gets.
        fits: Whether there was memory enough.
        examples_per_sec: Examples per second; `None` if it does not fit.
        error: The standard error of that, of several rounds.
        parts_ms: Milliseconds of a step by part, as in `summary.json`.
        towers_ms: Milliseconds of a step in which each tower computes.
        peak_memory_mb: Most memory of the fullest GPU, or of the process.
        memory: Whose memory that is, "GPU" or "process".
        verdict: What the steps were bound by, in a sentence.
        gradient_bytes: Bytes of the gradients of all variables.
        note: What else is to be known of the devices; may be empty.
        why: Why it does not fit.
    """

    towers: Sequence[str]
    split_ratios: Sequence[int]
    sizes: Sequence[int]
    fits: bool
    examples_per_sec: float | None = None
    error: float = 0.0
    parts_ms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    towers_ms: Sequence[float] = ()
    peak_memory_mb: float | None = None
    memory: str = "process"
    verdict: str = ""
    gradient_bytes: int = 0
    note: str = ""
    why: str = ""

    @property
    def count(self) -> int:
        """Number of towers."""
        return len(self.towers)

    @property
    def is_even(self) -> bool:
        """Whether all towers get equal parts of a batch."""
        return len({*self.split_ratios}) == 1


def trials(
    counts: Sequence[int],
    rounds: int,
    run: Callable[[int, Sequence[int] | None], Trial],
) -> Iterator[Trial]:
    """Tries numbers of towers, up and down in turn, and then uneven split ratios.

    Uneven ratios are tried where towers take unequally long, so with the most towers
    first. A number of towers that does not fit is not tried again.

    Args:
        counts: The numbers, in rising order.
        rounds: How often to try each.
        run: Trains with so many towers and ratios (equal ones if `None`).

    Yields:
        What was measured.
    """
    found: list[Trial] = []
    for index in range(rounds):
        for count in counts if index % 2 == 0 else [*reversed(counts)]:
            if any(each.count == count and not each.fits for each in found):
                continue
            found.append(run(count, None))
            yield found[-1]
    for each in reversed(medians(found)):
        if not (each.fits and uneven.comparable(each.count, each.memory == "GPU")):
            continue
        if uneven.slowest(each.towers_ms) is not None:
            ratios = uneven.better_ratios(each.towers_ms, each.split_ratios)
            step = uneven.step_with(each.towers_ms, each.split_ratios, ratios)
            for _ in range(rounds if step <= _PROMISING else 0):
                yield run(each.count, ratios)


def medians(found: Sequence[Trial]) -> list[Trial]:
    """Puts the rounds of the same towers together.

    Returns:
        For each number of towers and their ratios, in rising order, the round with the
        median speed, with the most memory of all rounds.
    """
    same: dict[Any, list[Trial]] = {}
    for each in found:
        same.setdefault((each.count, tuple(each.split_ratios)), []).append(each)
    return [
        _median(same[key])
        for key in sorted(same, key=lambda key: (key[0], len({*key[1]}), key[1]))
    ]


def _median(rounds):
    failed = [each for each in rounds if not each.fits]
    if failed:
        return failed[0]
    # Of an even number, the slower one in the middle.
    ordered = sorted(rounds, key=lambda each: each.examples_per_sec)
    speeds = [each.examples_per_sec for each in ordered]
    middle, error = ordered[(len(ordered) - 1) // 2], 0.0
    if len(ordered) > 1:
        error = _OF_MEDIAN * statistics.stdev(speeds) / math.sqrt(len(speeds))
    return dataclasses.replace(
        middle, error=error, peak_memory_mb=max(each.peak_memory_mb for each in rounds)
    )


def run(
    settings: Scaling, folder: str, count: int, split_ratios: Sequence[int] | None
) -> Trial:
    """Trains with so many towers in a process of its own.

    Args:
        settings: How to train, and for how long.
        folder: Where processes may write: how variables are updated is chosen once.
        count: Number of towers.
        split_ratios: Their parts of a batch; equal ones if `None`.

    Raises:
        ValueError: If it failed, and not for want of memory.
    """
    name = "_".join(map(str, [count, *(split_ratios or ())]))
    told = child.ask(
        trial.__name__,
        settings.for_a_trial(count, split_ratios, os.path.join(folder, name)),
        f"Training on {count} towers took longer than {child.PROBE_S} s; expected "
        "less, so give a smaller --batch_size.",
    )
    return child.as_value(Trial, told)
