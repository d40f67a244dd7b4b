"""Which classes the labels of files name, and how many records; read once for runs."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from towers.input_pipeline.sources.base import size_and_time
from towers.program import small_file, voice, whole_file

_VERSION = 1


class LabelCounts(NamedTuple):
    """What the labels of a split's files tell.

    Attributes:
        classes: those that have a record, sorted: int64 [C].
        records: how many each file has.
    """

    classes: np.ndarray
    records: list[int]


def of_labels(labels: Sequence[np.ndarray]) -> LabelCounts:
    """Counts classes and records.

    Args:
        labels: of each file, int64 [N].
    """
    return LabelCounts(np.unique(np.concatenate(labels)), [*map(len, labels)])


def stamp_of(files: Mapping[str, Sequence[str]], *options: object) -> list:
    """Returns what changes with the files' names, sizes and times, and with options."""
    states = {
        split: [[path, *size_and_time(path)] for path in paths]
        for split, paths in files.items()
    }
    return [_VERSION, states, *map(repr, options)]


def kept(
    path: str | None, stamp: list, read: Callable[[], dict[str, LabelCounts]]
) -> tuple[dict[str, LabelCounts], bool]:
    """Returns the counts that an earlier run kept, else those that are read now.

    Args:
        path: of the file in which they are kept; `None` if they are not.
        stamp: see `stamp_of`.
        read: reads all labels.

    Returns:
        Counts of each split, and whether an earlier run kept them.
    """
    counts = None if path is None else _restore(path, stamp)
    if counts is not None:
        return counts, True
    counts = read()
    if path is not None:
        _write(path, stamp, counts)
    return counts, False


def _restore(path: str, stamp: list) -> dict[str, LabelCounts] | None:
    """Reads what an earlier run kept; `None` if that is not there, or of other data."""
    if not os.path.lexists(path):
        return None
    try:
        content = small_file.read_json(path, dict)
        if content["stamp"] != stamp:
            return None
        return {
            split: LabelCounts(np.array(classes, np.int64), [*map(int, records)])
            for split, (classes, records) in content["splits"].items()
        }
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        voice.warn(f"{path} cannot be read ({error}): all labels are read again.")
        return None


def _write(path: str, stamp: list, counts: Mapping[str, LabelCounts]) -> None:
    """Keeps the counts for later runs, where that is possible."""
    splits = {
        split: [some.classes.tolist(), some.records] for split, some in counts.items()
    }
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        whole_file.write_json(path, {"stamp": stamp, "splits": splits})
    except OSError as error:
        voice.warn(
            f"The counts of labels cannot be written to {path} ({error.strerror}): the "
            "next run reads all labels again."
        )
