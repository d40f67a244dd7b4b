"""The order of a table that does not fit in memory: blocks, then rows of a few of them.

Any place of it is found without reading what comes before.
"""

from collections.abc import Sequence

import numpy as np


def groups(
    blocks: Sequence[int], at_once: int, seeds: np.ndarray
) -> list[Sequence[int]]:
    """Returns blocks in a shuffled order, as groups that are read together.

    Args:
        blocks: their places.
        at_once: how many of them a group has, but for the last one.
        seeds: int64 [2] of the order; empty for the fixed one.
    """
    shuffled = [blocks[place] for place in order(len(blocks), seeds)]
    return [shuffled[i : i + at_once] for i in range(0, len(shuffled), at_once)]


def locate(rows: Sequence[int], start: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns in which group a row of the order is, and its place in that group.

    Args:
        rows: how many rows each group has.
        start: the place of the row among those of all groups.
    """
    ends = np.cumsum([0, *rows])
    group = int(np.searchsorted(ends, start, side="right")) - 1
    return np.int64(group), np.int64(start - ends[group])


def order(count: int, seeds: np.ndarray, *group: int) -> np.ndarray:
    """Returns an order of so many things: the numbers below `count`.

    Args:
        count: how many there are.
        seeds: int64 [2]; the same ones give the same order. Empty: as they are.
        group: tells orders of the same seeds apart.
    """
    if not len(seeds):
        return np.arange(count)
    # The numbers that `RandomState` draws are the same in every version of NumPy
    # (NEP 19), so a run may go on with another one.
    key = np.array([*seeds, *group], np.int64)
    random = np.random.RandomState(np.frombuffer(key.tobytes(), np.uint32))
    return random.permutation(count)
