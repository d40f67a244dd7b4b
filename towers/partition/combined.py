"""Combines the values that the towers of all hosts have of a tensor.

Hosts reduce where towers do: sums in one all-reduce for each phase, rows by all-gather.
All hosts therefore have the same values at home, and do the same there.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.analysis.axes import axis_of
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
from towers.loop.timers import StepTimers
from towers.partition.placement import Placement
from towers.plan import Plan
from towers.tower.errors import PartitionError

# The scope of reductions over towers in TensorBoard; the slash keeps the name as it is.
REDUCE_SCOPE = "reduce/"
# The index of the number of rows in a shape.
_PLACES = {SHAPE: 0, TURNED: 1}


class Travelled(NamedTuple):
    """Tensors that towers have sent packed, to be summed.

    Attributes:
        names: The keys of the tensors of the traced function.
        packed: The layout of the message; its `places` are indices into `names`.
    """

    names: Sequence[Any]
    packed: reduce.Packed


class Combination:
    """Computes the whole batch's values from the values of the towers.

    Attributes:
        travelled: The packed messages so far.
    """

    def __init__(
        self,
        plan: Plan,
        placement: Placement,
        sizes: Sequence[int | tf.Tensor],
        fractions: Sequence[tf.Tensor],
        timers: StepTimers | None = None,
    ):
        """Takes the kinds of tensors, and the share of the batch that each tower has.

        Args:
            plan: The towers and hosts that compute the step.
            placement: Determines the kinds of tensors.
            sizes: Number of examples of each tower of this host.
            fractions: The fraction of the batch that each tower has.
            timers: Measure how long reductions over hosts take, if given.
        """
        self._timers = timers
        self._plan, self._hosts, self._placement = plan, plan.hosts, placement
        self._sizes, self._fractions = sizes, fractions
        self._cast: dict[tf.DType, list[tf.Tensor]] = {}
        self._calls = 0
        self.travelled: list[Travelled] = []

    def __call__(
        self, tensors: Sequence[tf.Tensor], parts: Sequence[Sequence[tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Returns the whole batch's values of some tensors.

        Args:
            tensors: The tensors of the traced function.
            parts: The values of each tensor on this host's towers.

        Raises:
            PartitionError: The values of a tensor cannot be combined.
        """
        values = self._of_this_host(tensors, parts)
        if self._hosts.count == 1 or not values:
            return values
        self._calls += 1
        kinds = [*map(self._placement.kind, tensors)]
        values = self._added(tensors, kinds, values)
        return [*map(self._of_hosts, tensors, kinds, values)]

    def _of_this_host(self, tensors, parts):
        """Combines the values of this host's towers; sums are packed."""
        plan, sums = self._plan, {}
        to_add = {
            i: self._to_add(tensor, parts[i])
            for i, tensor in enumerate(tensors)
            if any(map(plan.packs, plan.devices)) and self._is_packed(tensor)
        }
        # Sums over micro-batches have a part for each device, all others one for each
        # tower. Gradients are sent separately, so that the guard can check the packed
        # messages.
        groups = collections.defaultdict(dict)
        for i, of_towers in to_add.items():
            sources = plan.devices[:: len(plan.devices) // len(of_towers)]
            if plan.pipeline.stages > 1:
                # The stage that computed the parts need not be the first.
                sources = tuple(part.device for part in of_towers)
            group = sources, self._placement.is_gradient(tensors[i])
            groups[group][i] = of_towers
        for (sources, is_gradient), of_group in groups.items():
            names = [key(tensors[i]) for i in of_group]
            scope = REDUCE_SCOPE if is_gradient else "home/"
            of_towers = [*zip(*of_group.values(), strict=True)]
            with tf.name_scope(scope):
                (_, totals), packed = reduce.all_reduce(
                    of_towers, sources, [plan.merge, plan.home], "device"
                )
            if packed is not None:
                self.travelled.append(Travelled(names, packed))
            sums |= zip(of_group, totals, strict=True)
        return [
            sums[i] if i in sums else self._of_host(tensor, parts[i])
            for i, tensor in enumerate(tensors)
        ]

    def _is_packed(self, tensor):
        kind = self._placement.kind(tensor)
        floating = tensor.dtype.is_floating
        return floating and packing.fits(tensor) and kind in (MEAN, SIZE, SUM)

    def _to_add(self, tensor, parts):
        """Returns the towers' parts of a tensor, which add up to the batch's value."""
        if self._placement.kind(tensor) is not MEAN:
            return parts
        weighted = []
        for part, fraction in zip(parts, self._fractions, strict=True):
            with tf.device(part.device):
                weighted.append(reduce.part_of_mean(part, fraction))
        return weighted

    def _fractions_in(self, dtype):
        """Returns the fractions in a type, cast once for all means."""
        if dtype not in self._cast:
            self._cast[dtype] = [
                tf.cast(fraction, dtype) for fraction in self._fractions
            ]
        return self._cast[dtype]

    def _of_host(self, tensor, parts):
        """Combines the values of this host's towers for one tensor."""
        kind = self._placement.kind(tensor)
        if kind is NONE:
            return parts[0]
        if kind is ROWS:
            blocks = self._placement.blocks(tensor)
            if blocks is None:
                # The rows of a table are as many as each tower looked up.
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
            fractions = self._fractions_in(tensor.dtype)
            return tf.add_n([*map(reduce.part_of_mean, parts, fractions)])
        if kind is COUPLED:
            # The value of a tower without rows must not count.
            values = [
                tf.where(size > 0, part, parts[0])
                for part, size in zip(parts, self._sizes, strict=True)
            ]
            return EXTREMES[tensor.op.type](tf.stack(values), axis=0)
        # Home has all of a packed batch, unless only the towers have the batch.
        raise PartitionError(
            "Received a ragged or sparse tensor in a batch that was placed ahead, of "
            "which one device needs all rows; expected dense tensors, such as of "
            "`to_tensor()` or `tf.sparse.to_dense`, or a batch that was not placed."
        )

    def _of_one_shape(self, parts):
        """Replaces the value of a tower without rows by zeros of the right shape."""
        first = parts[0]

        def of_tower(part, size):
            has_rows = tf.convert_to_tensor(size) > 0
            value = tf.cond(has_rows, lambda: part, lambda: tf.zeros_like(first))
            value.set_shape(first.shape)
            return value

        return [first, *map(of_tower, parts[1:], self._sizes[1:])]

    def _joined(self, parts, blocks):
        """Concatenates the rows of all towers, block by block."""
        cut = [
            tf.split(part, [count * size for count in blocks])
            for part, size in zip(parts, self._sizes, strict=True)
        ]
        joined = [
            batch.join(of_towers, [count * size for size in self._sizes])
            for count, of_towers in zip(blocks, zip(*cut, strict=True), strict=True)
        ]
        return tf.concat(joined, axis=0)

    def _added(self, tensors, kinds, values):
        """All-reduces, in one go, the values of this host that are parts of totals."""
        sums = {
            i: _rows_in(value, kind) if kind in _PLACES else value
            for i, (kind, value) in enumerate(zip(kinds, values, strict=True))
            if kind in (MEAN, SIZE, SUM, *_PLACES)
        }
        gradients = [
            part for i, part in sums.items() if self._placement.is_gradient(tensors[i])
        ]
        parts, purpose = [*sums.values()], f"partial sums {self._calls}"

        timed = self._timers is not None
        if not timed or (not gradients and self._timers.has_sum):
            # The sum of the gradients is what a step waits for.
            totals = self._hosts.all_reduce(parts, purpose, gradients)
        else:
            begun = self._timers.begin_sum(gradients or parts)
            totals = self._hosts.all_reduce(parts, purpose, gradients)
            self._timers.end_sum(begun, totals)
        sums = dict(zip(sums, totals, strict=True))
        return [
            _with_rows(value, kind, sums[i]) if kind in _PLACES else sums.get(i, value)
            for i, (kind, value) in enumerate(zip(kinds, values, strict=True))
        ]

    def _of_hosts(self, tensor, kind, value):
        """Combines the values of all hosts for one tensor; sums are reduced already."""
        hosts, purpose = self._hosts, f"'{tensor.name}'"
        if kind is NONE:
            # The value of a host without rows would be empty.
            return hosts.broadcast([value], purpose)[0]
        if kind in _PLACES and value.shape[0] != 1:
            (first,) = hosts.broadcast([value], purpose)
            return _with_rows(first, kind, _rows_in(value, kind))
        if kind is ROWS:
            blocks = self._placement.blocks(tensor) or (1,)
            size = tf.add_n([*map(tf.convert_to_tensor, self._sizes)])
            parts = [value]
            if len(blocks) > 1:
                parts = tf.split(value, [count * size for count in blocks])
            return tf.concat(
                [hosts.all_gather(p, None, purpose) for p in parts], axis=0
            )
        if kind in (COLUMNS, LAST):
            axis = axis_of(tensor, kind)
            rows = _swapped(value, axis)
            return _swapped(hosts.all_gather(rows, None, purpose), axis)
        if kind is COUPLED:
            has_rows = tf.reduce_any([size > 0 for size in self._sizes])
            hosts_with_rows, values = (
                hosts.stack(has_rows, purpose),
                hosts.stack(value, purpose),
            )
            hosts_with_rows = tf.reshape(
                hosts_with_rows, [hosts.count, *[1] * (values.shape.rank - 1)]
            )
            return EXTREMES[tensor.op.type](
                tf.where(hosts_with_rows, values, values[:1]), axis=0
            )
        return value


def _rows_in(shape, kind):
    """Returns the number of rows in a shape, as a vector."""
    return shape[_PLACES[kind] : _PLACES[kind] + 1]


def _with_rows(shape, kind, rows):
    """Returns a shape with another number of rows."""
    axis = _PLACES[kind]
    return tf.concat([shape[:axis], rows, shape[axis + 1 :]], axis=0)


def _swapped(tensor, axis):
    """Returns a tensor with an axis and the first axis exchanged."""
    order = [*range(tensor.shape.rank)]
    order[0], order[axis] = axis, 0
    return tf.transpose(tensor, order)
