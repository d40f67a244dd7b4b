"""Counts classes and records of files by labels, once for all runs.

Counts of files without their bad records are not kept: an error of the file system
would leave out a good record for ever.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from towers.input_pipeline.sources.base import sizes_and_times
from towers.program import small_file, voice, whole_file

_VERSION = 1


class LabelCounts(NamedTuple):
    """The counts of a split's files.

    Attributes:
        classes: the classes that have a record, sorted: int64 [C].
        records: number of records of each file, or empty.
    """

    classes: np.ndarray
    records: list[int]


def of_labels(labels: Sequence[np.ndarray]) -> LabelCounts:
    """Counts classes and records.

    Args:
        labels: the labels of each file, int64 [N].
    """
    return LabelCounts(np.unique(np.concatenate(labels)), [*map(len, labels)])


def kept(
    path: str | None,
    files: Mapping[str, Sequence[str]],
    options: object,
    read: Callable[[], dict[str, LabelCounts]],
) -> tuple[dict[str, LabelCounts], bool]:
    """Returns the counts that an earlier run has kept, or else counts now.

    Args:
        path: the file that keeps them; `None` to keep nothing.
        files: the files whose labels are counted, for each split.
        options: the options of reading; other options give other counts.
        read: reads all labels, and returns the counts of each split.

    Returns:
        The counts of each split, and whether an earlier run kept them.
    """
    if path is None:
        return read(), False
    stamp = _stamp(files, options)
    counts = _restore(path, stamp)
    if counts is not None:
        return counts, True
    counts = read()
    _write(path, stamp, counts)
    return counts, False


def _stamp(files: Mapping[str, Sequence[str]], options: object) -> str:
    """Returns a text that changes with the files' names, sizes and times."""
    paths = [*files.values()]
    states = [[*zip(some, sizes_and_times(some), strict=True)] for some in paths]
    facts = _VERSION, [*files], states, options
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()


def _restore(path: str, stamp: str) -> dict[str, LabelCounts] | None:
    """Reads the counts of an earlier run; `None` if missing, or for other data."""
    try:
        content = small_file.read_json(path, dict)
        if content["stamp"] != stamp:
            return None
        return {
            split: LabelCounts(np.array(classes, np.int64), [*map(int, records)])
            for split, (classes, records) in content["splits"].items()
        }
    except FileNotFoundError:
        return None
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        voice.warn(f"{path} cannot be read ({error}): all labels are read again.")
        return None


def _write(path: str, stamp: str, counts: Mapping[str, LabelCounts]) -> None:
    """Keeps the counts for later runs, if possible."""
    splits = {
        split: [of_split.classes.tolist(), of_split.records]
        for split, of_split in counts.items()
    }
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        whole_file.write_json(path, {"stamp": stamp, "splits": splits})
    except OSError as error:
        voice.warn(
            f"The counts of labels cannot be written to {path} ({error.strerror}): the "
            "next run reads all labels again."
        )
