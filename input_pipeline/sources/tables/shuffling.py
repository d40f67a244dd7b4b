"""Orders a table that does not fit in memory: blocks, then rows of a few of them.

Any position is found without reading the positions before it.
"""

from collections.abc import Sequence

import numpy as np


def groups(
    blocks: Sequence[int], at_once: int, seeds: np.ndarray
) -> list[Sequence[int]]:
    """Returns blocks in a shuffled order, as groups that are read together.

    Args:
        blocks: the indices of the blocks.
        at_once: the number of blocks in a group, except the last one.
        seeds: int64 [2], the seeds of the order; empty for the fixed order.
    """
    shuffled = [blocks[index] for index in order(len(blocks), seeds)]
    return [shuffled[i : i + at_once] for i in range(0, len(shuffled), at_once)]


def locate(rows: Sequence[int], start: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the group of a row of the order, and its position in that group.

    Args:
        rows: the number of rows of each group.
        start: the position of the row among those of all groups.
    """
    ends = np.cumsum([0, *rows])
    group = int(np.searchsorted(ends, start, side="right")) - 1
    return np.int64(group), np.int64(start - ends[group])


def order(count: int, seeds: np.ndarray, *group: int) -> np.ndarray:
    """Returns a shuffled order of the numbers below `count`.

    Args:
        count: the length of the order.
        seeds: int64 [2]; equal seeds give the same order. Empty: no shuffling.
        group: distinguishes orders with the same seeds.
    """
    if not len(seeds):
        return np.arange(count)
    # The draws of `RandomState` are the same in every version of NumPy (NEP 19), so a
    # run may go on with another version.
    key = np.array([*seeds, *group], np.int64)
    random = np.random.RandomState(np.frombuffer(key.tobytes(), np.uint32))
    return random.permutation(count)
