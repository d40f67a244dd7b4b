"""Counts the rows that tensors have for each example, where that is known.

Attention in windows makes several rows of each example, and then one of several. To
tell that these are of the same example, it has to be known how many they are.
"""

from collections.abc import Iterable, Sequence

import tensorflow as tf

from towers.analysis.kinds import (
    COLUMNS,
    LAST,
    NONE,
    ROWS,
    SHAPE,
    SIZE,
    TURNED,
    UNKNOWN,
    Dependence,
)
from towers.analysis.layer_calls import key
from towers.analysis.static_values import integers, leading

# They make a shape, or a part of one, of what is as long or has as many rows.
_OF_SHAPES = set(
    """Cast ConcatV2 ExpandDims GatherV2 Identity Pack Pad PadV2 Reshape Shape ShapeN
    Slice SplitV Squeeze StridedSlice TensorListGetItem TensorListPopBack
    TensorListPushBack TensorListSetItem Unpack""".split()
)
_MASKS = "begin", "ellipsis", "new_axis", "shrink_axis"


class RowCounts:
    """Rows (or columns) for each example; of sizes and shapes, the times of them."""

    def __init__(self, of_one_row: Iterable[tf.Tensor]):
        """Takes tensors with one row an example."""
        self._counts: dict[tuple[int, str], int] = {key(t): 1 for t in of_one_row}

    def of(self, tensor: tf.Tensor) -> int | None:
        """Returns the count of a tensor, `None` if it is not known."""
        return self._counts.get(key(tensor))

    def set(self, tensor: tf.Tensor, count: int) -> None:
        """Sets the count of a tensor."""
        self._counts[key(tensor)] = count

    def read(
        self,
        tensor: tf.Tensor,
        inputs: Sequence[tf.Tensor],
        kinds: Sequence[Dependence],
    ) -> Dependence:
        """Reads what an operation returns, where that hangs on counts.

        Args:
            tensor: What it returns.
            inputs: What it takes.
            kinds: How that depends on the examples.
        """
        op, kinds = tensor.op, [*kinds]
        if op.type in ("Equal", "NotEqual") and kinds in ([SHAPE, SHAPE], [SIZE, SIZE]):
            # Whatever number of examples there is, both have it.
            first, second = map(self.of, inputs)
            return NONE if first is not None and first == second else UNKNOWN
        if op.type == "FloorDiv" and kinds == [SIZE, NONE]:
            return SIZE if self._divides(*inputs) else UNKNOWN
        if op.type == "Reshape" and kinds == [ROWS, NONE]:
            known = tensor.shape.rank is not None and tensor.shape[0] is None
            return ROWS if known and self.reshaped(tensor) is not None else UNKNOWN
        if op.type == "StridedSlice" and kinds == [ROWS, NONE, SHAPE, NONE]:
            masks = [op.get_attr(f"{name}_mask") & 1 for name in _MASKS]
            begin = [0] if masks[0] else leading(inputs[1], 1)
            whole = not any(masks[1:]) and leading(inputs[3], 1) == [1]
            return ROWS if whole and self._all(begin, *inputs[::2]) else UNKNOWN
        if op.type == "Slice" and kinds == [ROWS, NONE, SHAPE]:
            return ROWS if self._all(leading(inputs[1], 1), *inputs[::2]) else UNKNOWN
        return UNKNOWN

    def _all(self, begin, rows, end):
        """Whether what begins there, and ends where a shape does, is all rows."""
        count = self._counts.get(key(rows))
        return begin == [0] and count is not None and count == self.of(end)

    def _divides(self, size, divisor):
        """Whether a divisor is known to divide a size, however many examples it has."""
        count, value = self._counts.get(key(size)), _whole(divisor)
        return count is not None and value is not None and count % value == 0

    def reshaped(self, tensor: tf.Tensor, axis: int = 0) -> int | None:
        """Returns how many rows an example has after a reshape; `None` if unknown.

        Args:
            tensor: What `Reshape` returns, all of whose elements the axis tells.
            axis: That of the examples, before and after.
        """
        count = self._counts.get(key(tensor.op.inputs[0]))
        old = tensor.op.inputs[0].shape[axis + 1 :].num_elements()
        new = tensor.shape[axis + 1 :].num_elements()
        if None in (count, old, new) or not new or count * old % new:
            return None
        return count * old // new

    def keep(
        self,
        tensor: tf.Tensor,
        kind: Dependence,
        inputs: Sequence[tf.Tensor],
        kinds: Sequence[Dependence],
        by_layer: bool = False,
    ) -> None:
        """Keeps how many rows an example has in what an operation or a layer returns.

        Args:
            tensor: What it returns.
            kind: How that depends on the examples.
            inputs: What it takes.
            kinds: How that depends on them.
            by_layer: Whether a layer returns it, which keeps rows apart.
        """
        if kind not in (ROWS, COLUMNS, LAST, SHAPE, SIZE, TURNED):
            return
        pairs = [*zip(inputs, kinds, strict=True)]
        count = self._of_all(pairs)
        if not by_layer:
            count = self._of_operation(tensor, kind, pairs, count)
        if count is not None:
            self._counts[key(tensor)] = count

    def _of_all(self, pairs):
        """Returns the count of tensors that depend on the examples, if all have one."""
        counts = {self._counts.get(key(t)) for t, kind in pairs if kind is not NONE}
        return counts.pop() if len(counts) == 1 else None

    def _of_operation(self, tensor, kind, pairs, count):
        if tensor.op.type == "Reshape" and LAST in (kind, pairs[0][1]):
            return count  # its last axis stays
        if tensor.op.type == "Reshape" and kind in (ROWS, COLUMNS):
            target, how = pairs[1]
            if how is SHAPE:
                return self._counts.get(key(target))
            return self.reshaped(tensor, int(kind is COLUMNS))
        if count is None:
            return None
        if kind in (ROWS, COLUMNS, LAST) or tensor.op.type in _OF_SHAPES:
            return count
        if tensor.op.type in ("Prod", "Size"):
            others = _of_others(tensor.op)
            return count * others if others else None
        values = [_whole(t) for t, k in pairs if k is NONE]
        if len(values) != 1 or values[0] is None:
            return None
        if tensor.op.type == "Mul":
            return count * values[0]
        return count // values[0] if tensor.op.type == "FloorDiv" else None


def _of_others(op):
    """How many numbers a row has whose shape is multiplied, `None` if unknown."""
    shape = op.inputs[0].op if op.type == "Prod" else op
    known = shape.type in ("Shape", "Size")
    return shape.inputs[0].shape[1:].num_elements() if known else None


def _whole(tensor):
    """The known value of a scalar, where it is a whole number of at least one."""
    value = integers(tensor) if tensor.shape.rank == 0 else None
    known = value is not None and value[0] >= 1 and value[0] % 1 == 0
    return int(value[0]) if known else None
