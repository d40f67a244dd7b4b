"""Which key blocks each query block of attention looks at, and how they are read."""

import dataclasses
import functools
from typing import Any

import numpy as np

from towers.models.block_sparse.layout import Layout

NAMES = "local", "strided", "global"


@dataclasses.dataclass(frozen=True, eq=False)
class Gather:
    """Which blocks are read for groups of rows, and by whom each block is read.

    Attributes:
        blocks: For each group the block that each of its places reads, int [rows,
            width]; -1 where a row reads no more. The places of all groups are numbered
            one after the other.
        readers: Groups of blocks, with the places that read each, int [blocks, width];
            the number of places where a block has no more readers.
        order: Where each block is among those of `readers`, int [blocks].
    """

    blocks: tuple[np.ndarray, ...]
    readers: tuple[np.ndarray, ...]
    order: np.ndarray

    @classmethod
    def of_inputs(cls, layout: Layout) -> "Gather":
        """For each output block, its input blocks."""
        blocks, offset = [], 0
        places = np.zeros(layout.num_blocks, int)
        for group in layout.by_output:
            there = group.slots >= 0
            blocks.append(np.where(there, layout.inputs[group.slots], -1))
            places[group.slots[there]] = offset + np.flatnonzero(there)
            offset += there.size
        places = places[np.argsort(layout.inputs, kind="stable")]
        readers = tuple(
            np.where(group.slots >= 0, places[group.slots], offset)
            for group in layout.by_input
        )
        rows = np.concatenate([group.rows for group in layout.by_input])
        return cls(tuple(blocks), readers, np.argsort(rows))

    @classmethod
    def of_outputs(cls, layout: Layout) -> "Gather":
        """For each output block, itself: groups put them into another order."""
        rows = [group.rows for group in layout.by_output]
        places = np.argsort(np.concatenate(rows))
        blocks = tuple(each[:, None] for each in rows)
        return cls(blocks, (places[:, None],), np.arange(places.size))


@dataclasses.dataclass(frozen=True, eq=False)
class Gathers:
    """What groups of query blocks read: their queries, and keys and values."""

    queries: Gather
    keys: Gather

    @property
    def groups(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Query blocks, int [rows], and their key blocks, int [rows, width]."""
        pairs = zip(self.queries.blocks, self.keys.blocks, strict=True)
        return [(rows[:, 0], keys) for rows, keys in pairs]


@functools.lru_cache(maxsize=64)
def gathers(*pattern: Any) -> Gathers:
    """Tells what is read by a pattern; layers with the same pattern share it.

    Args:
        *pattern: As of `layout`; a matrix as tuples of its rows.

    Raises:
        ValueError: As `layout` does.
    """
    made = layout(*pattern)
    return Gathers(Gather.of_outputs(made), Gather.of_inputs(made))


def layout(
    pattern: Any,
    tokens: int,
    block_size: int,
    causal: bool = False,
    window: int = 1,
    stride: int = 4,
    global_blocks: int = 1,
) -> Layout:
    """Makes the layout [key blocks, query blocks] of self-attention.

    Args:
        pattern: One of `NAMES`, or 0 and 1 [query blocks, key blocks].
        tokens: Tokens of an example. They are padded to a whole number of blocks.
        block_size: Tokens of a block.
        causal: Whether no block looks at later ones.
        window: How many blocks on each side of its own a query block looks at.
        stride: With "strided", each such block before and after is looked at, too.
        global_blocks: With "global", how many first blocks look at all, and all at
            them.

    Raises:
        ValueError: A matrix is not for these tokens, or a query block has no key block.
    """
    count = -(-tokens // block_size)
    place = np.arange(count)
    apart = np.abs(place[:, None] - place)
    looks = apart <= window
    if pattern == "strided":
        looks |= apart % stride == 0
    elif pattern == "global":
        looks |= np.minimum(place[:, None], place) < global_blocks
    elif pattern != "local":
        looks = _given(pattern, tokens, block_size, count)
    if causal:
        looks = np.tril(looks)
    nothing = np.flatnonzero(~looks.any(1))
    if nothing.size:
        raise ValueError(
            f"Received a pattern with causal={causal} in which query block "
            f"{nothing[0]} looks at no key block; expected one at least, so set the "
            "diagonal to 1."
        )
    return Layout(looks.T, (block_size, block_size))


def check(pattern: Any, **numbers: Any) -> None:
    """Raises ValueError unless the name of a pattern and all numbers can be used.

    A matrix is checked by `layout`, which knows the tokens.
    """
    if isinstance(pattern, str) and pattern not in NAMES:
        raise ValueError(
            f"Received pattern={pattern!r}; expected one of {', '.join(NAMES)}, or a "
            "matrix [query blocks, key blocks] of 0 and 1."
        )
    for name, value in numbers.items():
        least = 0 if name == "window" else 1
        if not isinstance(value, int) or value < least:
            raise ValueError(
                f"Received {name}={value!r}; expected a whole number of at least "
                f"{least}."
            )


def _given(pattern, tokens, block_size, count):
    """A matrix that the user gave."""
    looks = np.asarray(pattern)
    if looks.shape != (count, count) or not np.isin(looks, (0, 1)).all():
        raise ValueError(
            f"Received a pattern of shape {looks.shape} for {tokens} tokens; expected "
            f"0 and 1 of shape {(count, count)}, for the blocks of {block_size} tokens "
            "as queries and as keys."
        )
    return looks.astype(bool)
