"""Which records are held out for evaluation where no file or folder says so."""

from typing import Any

from towers.input_pipeline.sources.base import FILE

DEFAULT = 0.1
# Fractions are counted in these: whole numbers give the same everywhere.
_PARTS = 10**6


def check(fraction: float | None) -> float:
    """Returns the fraction to hold out.

    Args:
        fraction: what was asked for; None for the default.

    Raises:
        ValueError: it is not from 0 to 1.
    """
    if fraction is None:
        return DEFAULT
    if not 0 <= fraction < 1:
        raise ValueError(
            f"eval_fraction is {fraction}: expected at least 0 and less than 1, such "
            f"as {DEFAULT}"
        )
    return fraction


def is_held_out(number: Any, fraction: float) -> Any:
    """Tells whether a record is held out: with a fraction of 0.1, every tenth.

    Args:
        number: of a record, as ``Source.batches`` counts: an integer, an array or a
            tensor of them.
        fraction: at least 0, less than 1.
    """
    # Files of one record each are held out in turn, too.
    place, parts = number % FILE + number // FILE, round(fraction * _PARTS)
    return (place + 1) * parts // _PARTS > place * parts // _PARTS


def count_held_out(first: int, count: int, fraction: float) -> int:
    """How many records of a file are held out.

    Args:
        first: number of the file's first record.
        count: its records.
        fraction: see ``is_held_out``.
    """
    place, parts = first % FILE + first // FILE, round(fraction * _PARTS)
    return (place + count) * parts // _PARTS - place * parts // _PARTS


def note(fraction: float, what: str, count: int | None) -> str:
    """Says that records are held out.

    Args:
        fraction: of them.
        what: they are, such as "rows".
        count: how many are held out, if that is known.
    """
    counted = "" if count is None else f", {count:,} in all,"
    return (
        f"{100 * fraction:.4g}% of the {what}{counted} are held out for evaluation; "
        "--eval_fraction (in Python, eval_fraction) takes another part, such as 0."
    )
