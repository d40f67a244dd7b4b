"""Which batch sizes to try: few, since each costs a process that imports TensorFlow.

It is assumed that what fits fits with fewer examples, too. Sizes are multiples of a
unit, so that no tower has an example more than its share.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

GRAIN = 1 / 32
"""The largest that fits is found to within so much of it, or to a unit."""

# Images/s have fallen off if so much of the best is not reached, twice in succession: a
# single figure may be noise.
_SLOW = 0.75


@dataclasses.dataclass(frozen=True)
class Probe:
    """What became of one batch size.

    Attributes:
        batch_size: Examples in the global batch.
        fits: Whether it was trained on.
        examples_per_sec: Median speed, `None` if it does not fit.
        step_ms: The time of a step.
        peak_memory_mb: Most memory that was taken: of the fullest GPU, or of the
            process.
        why: Why it does not fit.
    """

    batch_size: int
    fits: bool
    examples_per_sec: float | None = None
    step_ms: float | None = None
    peak_memory_mb: float | None = None
    why: str = ""


def unit(split_ratios: Sequence[int], micro_batches: int = 1) -> int:
    """Returns the fewest examples of which each tower gets exactly its share.

    So does each of its micro-batches.
    """
    return micro_batches * sum(split_ratios) // math.gcd(*split_ratios)


def search(
    probe: Callable[[int], Probe], first: Probe, step: int, most: int | None = None
) -> Iterator[Probe]:
    """Tries batch sizes until the largest that fits is known.

    The size is doubled while it fits, halved while it does not, and then bisected.
    Doubling ends early at `most`, and where examples/sec fall off clearly. At last, the
    smallest that fits is halved as long as it is the fastest.

    Args:
        probe: Tries a batch size.
        first: The first one that was tried, a multiple of `step`.
        step: What sizes are multiples of, see `unit`.
        most: The largest size to try, `None` for any.

    Yields:
        All that were tried, in order, with `first`.
    """
    yield first
    most = most and most // step
    tried = [first]
    units = first.batch_size // step
    good, bad = (units, None) if first.fits else (0, units)
    while (units := _following(good, bad, most)) and not (
        bad is None and falls_off(tried)
    ):
        tried.append(probe(units * step))
        yield tried[-1]
        good, bad = (units, bad) if tried[-1].fits else (good, units)
    while units := _below_the_fastest(tried, step):
        tried.append(probe(units * step))
        yield tried[-1]


def _below_the_fastest(tried: Sequence[Probe], step: int) -> int | None:
    """The half of the smallest size, in units, if none is faster than that one."""
    fitting = [each for each in tried if each.fits]
    smallest = min((each.batch_size for each in fitting), default=0)
    if not fitting or fastest(fitting).batch_size > smallest:
        return None
    half = smallest // step // 2
    # Not once more, should it not have fitted after all.
    return half if half * step < min(each.batch_size for each in tried) else None


def _following(good: int, bad: int | None, most: int | None) -> int | None:
    """The next size to try, in units.

    Args:
        good: The largest known to fit, 0 if none is.
        bad: The smallest known not to fit.
        most: The largest to try.
    """
    if bad is None:
        return min(2 * good, most or 2 * good) if good != most else None
    if good == 0:
        return bad // 2 or None
    return (good + bad) // 2 if bad - good > max(1, good * GRAIN) else None


def falls_off(tried: Sequence[Probe]) -> bool:
    """Tells whether examples/sec, of sizes that grow, have clearly fallen."""
    speeds = [probe.examples_per_sec for probe in tried]
    return max(speeds[-2:]) < _SLOW * max(speeds)


def largest(tried: Sequence[Probe]) -> Probe | None:
    """Returns the largest that fits, `None` if none does."""
    fitting = [probe for probe in tried if probe.fits]
    return max(fitting, key=lambda probe: probe.batch_size, default=None)


def fastest(tried: Sequence[Probe]) -> Probe:
    """Returns the one with the most examples/sec; at least one has to fit."""
    fitting = [probe for probe in tried if probe.fits]
    return max(fitting, key=lambda probe: probe.examples_per_sec)


def too_large(tried: Sequence[Probe]) -> Probe | None:
    """Returns the smallest that does not fit, `None` if all do."""
    others = [probe for probe in tried if not probe.fits]
    return min(others, key=lambda probe: probe.batch_size, default=None)
