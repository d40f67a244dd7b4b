"""Finds which tower is slow, and which parts of a batch would let all end together."""

import math
import operator
from collections.abc import Sequence

from towers.machine import limits

# A tower is slow if it needs so much longer than the mean of all.
_SLOW = 1.15

# A tower's part is rounded to so many parts of the batch, all together.
_MOST_PARTS = 24
# Simple ratios win if the step with them is at most so much longer.
_AS_GOOD = 1.01


def comparable(towers: int, on_gpus: bool) -> bool:
    """Tells whether the times of towers are their own.

    Logical CPUs that are more than the cores take turns there, so that the times say
    which was last, not which is slow.

    Args:
        towers: How many there are on this host.
        on_gpus: Whether they are on GPUs.
    """
    return on_gpus or towers <= limits.cpu_count()


def slowest(towers_ms: Sequence[float]) -> int | None:
    """Returns the tower that the others wait for.

    Args:
        towers_ms: Milliseconds of a step in which each tower computes.

    Returns:
        Its index; `None` if no tower is clearly slower than the others.
    """
    if len(towers_ms) < 2:
        return None
    longest = max(towers_ms)
    mean = sum(towers_ms) / len(towers_ms)
    return towers_ms.index(longest) if longest > _SLOW * mean else None


def better_ratios(
    towers_ms: Sequence[float],
    split_ratios: Sequence[int],
    most: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Finds split ratios with which all towers compute for about as long.

    The time of a tower is taken to be in proportion to its part of the batch.

    Args:
        towers_ms: Milliseconds of a step in which each tower computes.
        split_ratios: The parts of a batch that the towers have had meanwhile.
        most: The largest part of a batch that each tower has memory for, 0 to 1 or
            more; by default the whole one.

    Returns:
        Positive integers without a common divisor, at most 24 together unless there
        are more towers than that. The present ones, if no others have room.
    """
    speeds = [
        ratio / max(ms, 1e-9) for ratio, ms in zip(split_ratios, towers_ms, strict=True)
    ]
    most = most or [1.0] * len(speeds)
    best, best_time = split_ratios, math.inf
    for parts in range(len(speeds), max(_MOST_PARTS, len(speeds)) + 1):
        ratios = _divide(parts, speeds, [part * parts for part in most])
        if ratios is None:
            continue
        time = _time(ratios, speeds)
        if time * _AS_GOOD < best_time:
            best, best_time = ratios, time
    return simplest(best)


def simplest(ratios: Sequence[int]) -> tuple[int, ...]:
    """Returns the same ratios without a common divisor."""
    divisor = math.gcd(*ratios)
    return tuple(ratio // divisor for ratio in ratios)


def step_with(
    towers_ms: Sequence[float], split_ratios: Sequence[int], others: Sequence[int]
) -> float:
    """Returns how long the slowest tower would take with other ratios, to what it does.

    Args:
        towers_ms: Milliseconds of a step in which each tower computes.
        split_ratios: The parts of a batch that the towers have had meanwhile.
        others: The parts that they would have.
    """
    part, other = sum(split_ratios), sum(others)
    each_ms = [
        ms * (new / other) / (old / part)
        for ms, old, new in zip(towers_ms, split_ratios, others, strict=True)
    ]
    return max(each_ms) / max(towers_ms)


def sentence(towers_ms: Sequence[float], split_ratios: Sequence[int]) -> str:
    """Says which tower is slow, and what to do; empty if none is.

    Args:
        towers_ms: Milliseconds of a step in which each tower computes.
        split_ratios: The parts of a batch that the towers have had meanwhile.
    """
    slow = slowest(towers_ms)
    if slow is None:
        return ""
    others_ms = [ms for index, ms in enumerate(towers_ms) if index != slow]
    mean_ms = sum(others_ms) / len(others_ms)
    said = f"tower {slow} is slowest: {towers_ms[slow]:.1f} ms, others {mean_ms:.1f} ms"
    ratios = better_ratios(towers_ms, split_ratios)
    if ratios == tuple(split_ratios):
        return said
    return f"{said}; try --split_ratios={','.join(map(str, ratios))}"


def _divide(parts, speeds, most):
    """Divides so many parts in proportion to the speeds, at least one for each.

    No tower gets more than its `most`; `None` if that cannot be.
    """
    ratios = [1] * len(speeds)
    for _ in range(parts - len(speeds)):
        # The one that would be done first with another part gets it.
        times = [
            (ratio + 1) / speed if ratio + 1 <= limit else math.inf
            for ratio, speed, limit in zip(ratios, speeds, most, strict=True)
        ]
        if min(times) == math.inf:
            return None
        ratios[times.index(min(times))] += 1
    return ratios if all(map(operator.le, ratios, most)) else None


def _time(ratios, speeds):
    """The time of the slowest, for a whole batch."""
    each = [ratio / speed for ratio, speed in zip(ratios, speeds, strict=True)]
    return max(each) / sum(ratios)
