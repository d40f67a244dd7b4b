"""Finds the slow tower, and the split ratios that would let all end together."""

import math
import operator
from collections.abc import Sequence

from towers.machine import limits
from towers.monitoring.bottleneck.verdict import Advice, SpeedFinding

# A tower is slow if it takes this much longer than the mean of all.
_SLOW = 1.15

# The split ratios add up to at most this.
_MOST_PARTS = 24
# Simple ratios win if their step takes at most this much longer.
_AS_GOOD = 1.01


def comparable(towers: int, on_gpus: bool) -> bool:
    """Tells whether the measured times of towers are really their own.

    If there are more logical CPUs than cores, they take turns, and the times tell which
    was last, not which is slow.

    Args:
        towers: The number of towers on this host.
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
        split_ratios: The split ratios during the measurement.
        most: The largest fraction of a batch that each tower has memory for, 0 to 1 or
            more; by default the whole batch.

    Returns:
        Positive integers without a common divisor, which add up to at most 24 unless
        there are more towers than that. The present ones, if no others have room.
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
    """Returns the slowest tower's time with other ratios, relative to its time now.

    Args:
        towers_ms: Milliseconds of a step in which each tower computes.
        split_ratios: The split ratios during the measurement.
        others: The other split ratios.
    """
    part, other = sum(split_ratios), sum(others)
    each_ms = [
        ms * (new / other) / (old / part)
        for ms, old, new in zip(towers_ms, split_ratios, others, strict=True)
    ]
    return max(each_ms) / max(towers_ms)


def finding(
    towers_ms: Sequence[float], split_ratios: Sequence[int]
) -> SpeedFinding | None:
    """Names the slow tower, and better ratios; `None` if no tower is slow.

    Args:
        towers_ms: Milliseconds of a step in which each tower computes.
        split_ratios: The split ratios during the measurement.
    """
    slow = slowest(towers_ms)
    if slow is None:
        return None
    others_ms = [ms for index, ms in enumerate(towers_ms) if index != slow]
    mean_ms = sum(others_ms) / len(others_ms)
    text = f"tower {slow} is slowest: {towers_ms[slow]:.1f} ms, others {mean_ms:.1f} ms"
    ratios = better_ratios(towers_ms, split_ratios)
    if ratios == tuple(split_ratios):
        return SpeedFinding(text)
    tip = f"try --split_ratios={','.join(map(str, ratios))}"
    # Of one topic: if now one tower is slow, now another, other ratios do not help.
    return SpeedFinding(text, Advice("split_ratios", tip))


def _divide(parts, speeds, most):
    """Divides `parts` in proportion to the speeds, at least one for each tower.

    No tower gets more than its `most`; returns `None` if that is impossible.
    """
    ratios = [1] * len(speeds)
    for _ in range(parts - len(speeds)):
        # The next part goes to the tower that would be done first with it.
        times = [
            (ratio + 1) / speed if ratio + 1 <= limit else math.inf
            for ratio, speed, limit in zip(ratios, speeds, most, strict=True)
        ]
        if min(times) == math.inf:
            return None
        ratios[times.index(min(times))] += 1
    return ratios if all(map(operator.le, ratios, most)) else None


def _time(ratios, speeds):
    """Returns the time of the slowest tower for a whole batch."""
    times = [ratio / speed for ratio, speed in zip(ratios, speeds, strict=True)]
    return max(times) / sum(ratios)
