"""The states of values that go into a function, and of those that come out.

A loop is read until a turn changes nothing of what is known: what is known of its
values goes into its body, and what comes out is merged with it. Then it is proved for
any number of turns. What decides whether there is another turn must depend on no
example.
"""

from collections.abc import Sequence
from typing import NamedTuple

from towers.analysis.axes.blocks import Blocks
from towers.analysis.kinds import (
    COLUMNS,
    COUPLED,
    LAST,
    MEAN,
    NONE,
    ROWS,
    SHAPE,
    SIZE,
    SUM,
    TURNED,
    UNKNOWN,
    Dependence,
)

_COUNTED = {COLUMNS, LAST, ROWS, SHAPE, SIZE, TURNED}


class ValueState(NamedTuple):
    """All that is known of a value.

    Attributes:
        kind: How it depends on the examples.
        count: How many rows each example has, as `RowCounts` tells.
        blocks: In which blocks, as `RowBlocks` tells.
        empty: Whether it is a list of which no tensor is set.
        zero: Whether it is zeros.
        of_totals: Whether it is made of totals, and of nothing else of the examples.
    """

    kind: Dependence
    count: int | None = None
    blocks: Blocks | None = None
    empty: bool = False
    zero: bool = False
    of_totals: bool = False

    @property
    def is_countless(self) -> bool:
        """Whether it has rows, and nobody knows how many for each example."""
        return self.kind in _COUNTED and self.count is None


LOST = ValueState(UNKNOWN)


def merged(
    first: Sequence[ValueState], second: Sequence[ValueState]
) -> list[ValueState]:
    """Returns what is known of values that are one or the other: of branches, say."""
    return [_either(*pair) for pair in zip(first, second, strict=True)]


def after_a_turn(
    before: Sequence[ValueState], after: Sequence[ValueState]
) -> list[ValueState]:
    """Returns what may be known of a loop's values, of what a turn makes of them.

    They are proved if a turn leaves them as they are.

    Args:
        before: What is known before the turn.
        after: Behind it, if the former is right.
    """
    states = merged(before, after)
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        # A sum is added to zeros, which only are those of a sum if it is known as one.
        if old.zero and new.kind is COUPLED:
            states[i] = ValueState(SUM)
    return states


def _either(first, second):
    of_totals = first.of_totals or second.of_totals
    return _known_of_both(first, second)._replace(of_totals=of_totals)


def _known_of_both(first, second):
    # There is no tensor that could be of another kind.
    if first.empty:
        return second
    if second.empty:
        return first
    if first.zero and second.kind is SUM:
        return second
    if second.zero and first.kind is SUM:
        return first
    kinds = {first.kind, second.kind}
    if kinds == {MEAN, NONE}:
        return ValueState(MEAN)
    alike = first.count == second.count and first.blocks == second.blocks
    if len(kinds) > 1 or not alike:
        return LOST
    return first._replace(zero=first.zero and second.zero)
