"""Holds out records for validation: by names, or else a fraction of them.

A record's number decides whether it is held out, by integers that are the same in
Python, NumPy and a graph.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from towers.input_pipeline.sources.files.record import FILE

# The splits to evaluate on while training, in order of preference. "test" comes last:
# the labels of a test set are often withheld (ImageNet).
HELD_OUT = ("validation", "valid", "val", "test")

DEFAULT = 0.1
# Fractions are counted in these parts: whole numbers give the same everywhere.
_PARTS = 10**6
_PRIME = 2**31 - 1


def held_out(names: Collection[str]) -> str | None:
    """Returns the name of the split to evaluate on, or None."""
    return next((name for name in HELD_OUT if name in names), None)


def check_fraction(fraction: float | None) -> float:
    """Returns the fraction to hold out; None gives the default.

    Raises:
        ValueError: the fraction is not from 0 to 1.
    """
    if fraction is None:
        return DEFAULT
    if not 0 <= fraction < 1:
        raise ValueError(
            f"eval_fraction is {fraction}: expected at least 0 and less than 1, such "
            f"as {DEFAULT}"
        )
    return fraction


def held_out_by_name(
    fraction: float, name: str, files: Mapping[str, Sequence[str]]
) -> ValueError:
    """Makes an error for a fraction that is not needed, as files are held out."""
    return ValueError(
        f"eval_fraction is {fraction}, but {name} has files that are held out by their "
        f"names, such as {files['test'][0]}: leave it out, or name the other files "
        "alone"
    )


def every_nth(
    paths: Sequence[str], fraction: float, is_bad: Callable[[str], bool] | None = None
) -> list[str]:
    """Returns the files of a list to hold out: for 0.1, every tenth good file.

    Args:
        paths: all paths, in a fixed order.
        fraction: at least 0, less than 1.
        is_bad: tells whether a file is left out of training; None: no file is.
    """
    good = paths if is_bad is None else [path for path in paths if not is_bad(path)]
    groups = np.arange(len(good) + 1) * round(fraction * _PARTS) // _PARTS
    return [good[index] for index in np.flatnonzero(np.diff(groups))]


def is_held_out(number: Any, fraction: float) -> Any:
    """Tells whether a record is held out: for 0.1, one of each ten.

    It is drawn at random, as every tenth record may have the same class.

    Args:
        number: the number of a record, as ``Source.batches`` counts: an integer, an
            array or a tensor of them.
        fraction: at least 0, less than 1.
    """
    place, parts = _place(number), round(fraction * _PARTS)
    if not parts:
        return place < 0
    return place == _drawn(place * parts // _PARTS, parts)


def count_held_out(first: int, count: int, fraction: float) -> int:
    """Counts the held-out records of a file; `first` is its first record's number."""
    parts = round(fraction * _PARTS)
    if not count or not parts:
        return 0
    place = _place(first)
    end = place + count
    first_group, last_group = place * parts // _PARTS, (end - 1) * parts // _PARTS
    at_the_ends = sum(
        place <= _drawn(group, parts) < end for group in {first_group, last_group}
    )
    return max(last_group - first_group - 1, 0) + at_the_ends


def _place(number):
    # Also holds out some of many files with one record each.
    return number % FILE + number // FILE


def _drawn(group, parts):
    """Returns the place that is held out of a group; the same in all libraries."""
    begin, end = -(-group * _PARTS // parts), -(-(group + 1) * _PARTS // parts)
    chance = (group % 1_000_003 * 2_654_435_761 + 40_503) % _PRIME
    return begin + chance * chance % _PRIME % (end - begin)


def note(fraction: float, what: str, count: int | None) -> str:
    """Notes that records, such as "rows", are held out; and how many, if known."""
    counted = "" if count is None else f", {count:,} in all,"
    return (
        f"{100 * fraction:.4g}% of the {what}{counted} are held out for validation; "
        "--eval_fraction (in Python, eval_fraction) changes this."
    )
