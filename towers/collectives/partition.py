"""Who owns which part of the variables, where the optimizer's state is sharded.

The variables are laid out one behind the other, and cut into as many parts as there are
owners, of as many bytes: the partition of ZeRO's first stage (Rajbhandari et al. 2020).
So each border cuts at most one variable. What has to stay whole is placed first, the
largest on the least loaded (Graham 1969), and the rest fills them up.

It computes with integers, and makes no operation.
"""

import dataclasses
import math
from collections.abc import Sequence

from towers.collectives.parts import Part
from towers.layers import tables


@dataclasses.dataclass(frozen=True)
class Extent:
    """A variable, as it may be cut.

    Attributes:
        shape: Its shape.
        cost: How many bytes its owner has of it, such as its optimizer's slots.
        unit: Between how many numbers it may be cut; 0 if it has to stay whole. If that
            is the size of a row, a part of it has whole rows.
    """

    shape: tuple[int, ...]
    cost: int
    unit: int = 0

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def by_rows(self) -> bool:
        """Whether its parts are rows."""
        return len(self.shape) > 1 and self.unit == math.prod(self.shape[1:])


def partition(extents: Sequence[Extent], owners: int) -> list[tuple[Part, ...]]:
    """Cuts variables into parts of as many bytes for each owner.

    Args:
        extents: The variables, in order.
        owners: Number of owners.

    Returns:
        The parts of each variable, in order.
    """
    loads = [0] * owners
    found: dict[int, list[Part]] = {}
    whole = [i for i, each in enumerate(extents) if not each.unit or owners == 1]
    for i in sorted(whole, key=lambda i: -extents[i].cost):
        owner = loads.index(min(loads))
        loads[owner] += extents[i].cost
        found[i] = [_part(extents[i], owner, 0, extents[i].size)]
    rest = [i for i in range(len(extents)) if i not in found]
    level = tables.level(loads, sum(extents[i].cost for i in rest))
    owner = 0
    for i in rest:
        parts, owner = _fill(extents[i], loads, level, owner)
        found[i] = parts
    return [tuple(found[i]) for i in range(len(extents))]


def _fill(extent, loads, level, owner):
    """Gives a variable to owners that have room for it, from one on."""
    parts, start, size = [], 0, extent.size
    each = extent.cost / size if size else 0
    while start < size or not parts:
        room = (level - loads[owner]) / each if each else size
        stop = size
        if start + room < size and owner < len(loads) - 1:
            stop = _nearest(start + room, start, extent.unit, size)
        if stop > start or not size:
            parts.append(_part(extent, owner, start, stop))
            loads[owner] += (stop - start) * each
        if stop < size:
            owner += 1
        start = max(start, stop)
    return parts, owner


def _nearest(place, start, unit, end):
    """The place nearest to another of those where a part may end, or `end`."""
    before = start + max(int(place - start), 0) // unit * unit
    after = min(before + unit, end)
    return before if place - before < after - place else after


def _part(extent, owner, start, stop):
    size = stop - start
    if size == extent.size:
        return Part(owner, start, stop, extent.shape, whole=True)
    shape = (size // extent.unit, *extent.shape[1:]) if extent.by_rows else (size,)
    return Part(owner, start, stop, shape)
