"""Puts together what the towers of all hosts have of a tensor.

Hosts add where towers do: sums in one message for each phase, rows one after another.
So all hosts have the same values at home, and do the same there.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.analysis.axes.position import axis_of
from towers.analysis.dependence import EXTREMES
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
)
from towers.analysis.layer_calls import key
from towers.collectives import batch, packing, reduce
from towers.partition.errors import PartitionError
from towers.partition.placement.placement import Placement
from towers.plan import Plan

# Where TensorBoard shows what adds over towers: the name is used as it stands.
REDUCE_SCOPE = "reduce/"
# Where the number of rows is among the numbers of a shape.
_PLACES = {SHAPE: 0, TURNED: 1}


class Travelled(NamedTuple):
    """Tensors that towers have sent in one piece, to be added.

    Attributes:
        names: The keys of the tensors of the traced function.
        packed: How they have travelled; `places` are those among `names`.
    """

    names: Sequence[Any]
    packed: reduce.Packed


class Combination:
    """Makes the whole batch's values of what the towers have, where it is called.

    Attributes:
        travelled: What has come in one piece.
    """

    def __init__(
        self,
        plan: Plan,
        placement: Placement,
        sizes: Sequence[int | tf.Tensor],
        fractions: Sequence[tf.Tensor],
        over_hosts: Callable[..., tuple[Any, Any]] = lambda add, mine: add(),
    ):
        """Takes what tells the kinds of tensors, and what each tower has of a batch.

        Args:
            plan: The towers and hosts that compute it.
            placement: Tells the kinds.
            sizes: Number of examples of each tower of this host.
            fractions: What part of the batch that is.
            over_hosts: Measures how long hosts take to add; see `StepTimers`.
        """
        self._over_hosts = over_hosts
        self._plan, self._hosts, self._placement = plan, plan.hosts, placement
        self._sizes, self._fractions = sizes, fractions
        self._calls = 0
        self.travelled: list[Travelled] = []

    def __call__(
        self, tensors: Sequence[tf.Tensor], parts: Sequence[Sequence[tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Returns the whole batch's values of some tensors.

        Args:
            tensors: Those of the traced function.
            parts: What this host's towers have of each.

        Raises:
            PartitionError: One of them cannot be put together.
        """
        mine = self._of_this_host(tensors, parts)
        if self._hosts.count == 1 or not mine:
            return mine
        self._calls += 1
        kinds = [*map(self._placement.kind, tensors)]
        mine = self._added(tensors, kinds, mine)
        return [*map(self._of_hosts, tensors, kinds, mine)]

    def _of_this_host(self, tensors, parts):
        """What this host's towers make of tensors; sums travel in one piece."""
        plan, sums = self._plan, {}
        packed = {
            i: self._to_add(tensor, parts[i])
            for i, tensor in enumerate(tensors)
            if any(map(plan.packs, plan.devices)) and self._is_packed(tensor)
        }
        # What is added in turn has a part for each device, all else for each tower.
        # Gradients travel by themselves, so that the guard may look at what is sent.
        groups = collections.defaultdict(dict)
        for i, of_towers in packed.items():
            sources = plan.devices[:: len(plan.devices) // len(of_towers)]
            if plan.pipeline.stages > 1:
                # A stage has made them, which need not be the first.
                sources = tuple(each.device for each in of_towers)
            group = sources, self._placement.is_gradient(tensors[i])
            groups[group][i] = of_towers
        for (sources, is_gradient), mine in groups.items():
            names = [key(tensors[i]) for i in mine]
            scope = REDUCE_SCOPE if is_gradient else "home/"
            of_towers = [*zip(*mine.values(), strict=True)]
            with tf.name_scope(scope):
                found = reduce.sum_packed(
                    *(of_towers, sources, plan.merge, plan.home),
                    seen=lambda each, names=names: self.travelled.append(
                        Travelled(names, each)
                    ),
                )
            sums |= zip(mine, found, strict=True)
        return [
            sums[i] if i in sums else self._of_host(tensor, parts[i])
            for i, tensor in enumerate(tensors)
        ]

    def _is_packed(self, tensor):
        kind = self._placement.kind(tensor)
        floating = tensor.dtype.is_floating
        return floating and packing.fits(tensor) and kind in (MEAN, SIZE, SUM)

    def _to_add(self, tensor, parts):
        """The towers' parts of a tensor of known shape, which add up to the batch's."""
        if self._placement.kind(tensor) is not MEAN:
            return parts
        weighted = []
        for part, fraction in zip(parts, self._fractions, strict=True):
            with tf.device(part.device):
                weighted.append(reduce.part_of_mean(part, fraction))
        return weighted

    def _of_host(self, tensor, parts):
        kind = self._placement.kind(tensor)
        if kind is NONE:
            return parts[0]
        if kind is ROWS:
            blocks = self._placement.blocks(tensor)
            if blocks is None:
                # Of rows of a table, each tower has as many as it looked up.
                return batch.join(parts, [tf.shape(part)[0] for part in parts])
            return self._joined(parts, blocks)
        if kind in (COLUMNS, LAST):
            axis = axis_of(tensor, kind)
            if None not in (*tensor.shape[:axis], *tensor.shape[axis + 1 :]):
                return tf.concat(parts, axis)
            # A tower without rows does not know the other dimensions.
            rows = [_swapped(part, axis) for part in parts]
            return _swapped(batch.join(rows, [tf.shape(p)[0] for p in rows]), axis)
        if kind in _PLACES:
            rows = tf.add_n([_rows_in(part, kind) for part in parts])
            return _with_rows(parts[0], kind, rows)
        if kind in (MEAN, SIZE, SUM) and not tensor.shape.is_fully_defined():
            parts = self._of_one_shape(parts)
        if self._placement.is_gradient(tensor) and kind is SUM:
            with tf.device(self._plan.merge), tf.name_scope(REDUCE_SCOPE):
                return reduce.add(parts)
        if kind in (SUM, SIZE):
            return reduce.add(parts)
        if kind is MEAN:
            return tf.add_n([*map(reduce.part_of_mean, parts, self._fractions)])
        if kind is COUPLED:
            # What a tower without rows has counts for nothing.
            some = [
                tf.where(size > 0, part, parts[0])
                for part, size in zip(parts, self._sizes, strict=True)
            ]
            return EXTREMES[tensor.op.type](tf.stack(some), axis=0)
        # Home takes all others from the batch, unless towers have it in parts alone.
        raise PartitionError(
            "Received a ragged or sparse tensor in a batch that was placed ahead, of "
            "which one device needs all rows; expected dense tensors, such as of "
            "`to_tensor()` or `tf.sparse.to_dense`, or a batch that was not placed."
        )

    def _of_one_shape(self, parts):
        """Gives a tower without rows, which knows no shape, zeros like the first's."""
        first = parts[0]

        def of_tower(part, size):
            has = tf.convert_to_tensor(size) > 0
            found = tf.cond(has, lambda: part, lambda: tf.zeros_like(first))
            found.set_shape(first.shape)
            return found

        return [first, *map(of_tower, parts[1:], self._sizes[1:])]

    def _joined(self, parts, blocks):
        """Joins the rows of all towers, block by block."""
        cut = [
            tf.split(part, [count * size for count in blocks])
            for part, size in zip(parts, self._sizes, strict=True)
        ]
        joined = [
            batch.join(each, [count * size for size in self._sizes])
            for count, each in zip(blocks, zip(*cut, strict=True), strict=True)
        ]
        return tf.concat(joined, axis=0)

    def _added(self, tensors, kinds, mine):
        """Adds what is to be added over hosts, in one sum."""
        sums = {
            i: _rows_in(each, kind) if kind in _PLACES else each
            for i, (kind, each) in enumerate(zip(kinds, mine, strict=True))
            if kind in (MEAN, SIZE, SUM, *_PLACES)
        }
        gradients = [
            each for i, each in sums.items() if self._placement.is_gradient(tensors[i])
        ]
        mine_of_all, purpose = [*sums.values()], f"partial sums {self._calls}"

        def add():
            totals = self._hosts.sum(mine_of_all, purpose, gradients)
            return totals, totals

        totals, _ = self._over_hosts(add, gradients or mine_of_all)
        sums = dict(zip(sums, totals, strict=True))
        return [
            _with_rows(each, kind, sums[i]) if kind in _PLACES else sums.get(i, each)
            for i, (kind, each) in enumerate(zip(kinds, mine, strict=True))
        ]

    def _of_hosts(self, tensor, kind, mine):
        hosts, purpose = self._hosts, f"'{tensor.name}'"
        if kind is NONE:
            # Of a host without rows, it is nothing.
            return hosts.first([mine], purpose)[0]
        if kind in _PLACES and mine.shape[0] != 1:
            (first,) = hosts.first([mine], purpose)
            return _with_rows(first, kind, _rows_in(mine, kind))
        if kind is ROWS:
            blocks = self._placement.blocks(tensor) or (1,)
            size = tf.add_n([*map(tf.convert_to_tensor, self._sizes)])
            parts = [mine]
            if len(blocks) > 1:
                parts = tf.split(mine, [count * size for count in blocks])
            return tf.concat([hosts.gather(p, None, purpose) for p in parts], axis=0)
        if kind in (COLUMNS, LAST):
            axis = axis_of(tensor, kind)
            rows = _swapped(mine, axis)
            return _swapped(hosts.gather(rows, None, purpose), axis)
        if kind is COUPLED:
            some = tf.reduce_any([size > 0 for size in self._sizes])
            has, each = hosts.stack(some, purpose), hosts.stack(mine, purpose)
            has = tf.reshape(has, [hosts.count, *[1] * (each.shape.rank - 1)])
            return EXTREMES[tensor.op.type](tf.where(has, each, each[:1]), axis=0)
        return mine


def _rows_in(shape, kind):
    """The number of rows in a shape, as a vector."""
    return shape[_PLACES[kind] : _PLACES[kind] + 1]


def _with_rows(shape, kind, rows):
    """A shape with another number of rows."""
    place = _PLACES[kind]
    return tf.concat([shape[:place], rows, shape[place + 1 :]], axis=0)


def _swapped(tensor, axis):
    """With an axis and the first one exchanged."""
    order = [*range(tensor.shape.rank)]
    order[0], order[axis] = axis, 0
    return tf.transpose(tensor, order)
