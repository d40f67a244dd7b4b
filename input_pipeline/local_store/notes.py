"""Describes the data that a local store keeps, and the data that it does not."""

import math
from collections.abc import Sequence

from towers.input_pipeline.local_store.packs import Taken
from towers.input_pipeline.local_store.places import is_far
from towers.program import words

# The fraction of the space for data; the rest is for tables and growing files.
FILLED = 0.97


def of_data(
    name: str, size: int, fraction: float, folder: str, paths: Sequence[str]
) -> str:
    """Describes how much of a data set is kept, before it is read.

    Args:
        name: the name of the data set.
        size: its bytes.
        fraction: the fraction of it that is kept.
        folder: the folder of the store.
        paths: some of its files.
    """
    kept = "all of it"
    if fraction < 1:
        kept = (
            f"{100 * fraction:.3g}% of it, spread evenly, and what is left "
            "is read from where it lies in each epoch"
        )
    if paths and not any(map(is_far, paths)):
        kept += (
            "; its files lie on a local disk, where a store is of no use: leave "
            "out --local_store (in Python, local_store)"
        )
    return f"{name} has {words.size(size)}: {folder} keeps {kept}."


def of_limit(folder: str, taken: Taken, size: int, left: int) -> str:
    """Describes the data without room, once all is read.

    Args:
        folder: the folder of the store.
        taken: the current use of the folder.
        size: the bytes of all data that were read through it.
        left: the bytes of these that have found no room.
    """
    needed = taken.others + size / FILLED
    gb = math.ceil(10 * needed / 2**30) / 10
    more = f"--local_store={gb:g}:FOLDER (in Python, limit_gb) would hold all"
    if needed > taken.disk:
        more = f"a disk with {gb:g} GB for it would hold all"
    return (
        f"The local store {folder} has no room for {words.size(left)} of "
        f"{words.size(size)} ({left / size:.0%}), which are read from where they lie "
        f"in each epoch; {more}."
    )
