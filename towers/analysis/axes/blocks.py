"""Follows rows of examples in tensors that hold several blocks of rows.

A generative adversarial network joins generated and real pictures to one batch of twice
the rows, and splits it later. Each tower does so with its own rows: its first half then
holds its rows of the first block.
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


# For each block, the number of rows of each example.
Blocks = tuple[int, ...]

_KEEP_SHAPES = set(
    "Cast ConcatV2 GatherV2 Identity Pack Shape SplitV StridedSlice Unpack".split()
)
# All rows of their results are alike, so the order of blocks does not matter.
_ALIKE = "Fill", "OnesLike", "ZerosLike"
_MOST = 8


class RowBlocks:
    """The blocks of tensors that have several."""

    def __init__(self, counts: RowCounts):
        self._counts = counts
        self._blocks: dict[object, Blocks] = {}
        self._alike: set[object] = set()

    def of(self, tensor: tf.Tensor) -> Blocks | None:
        """Returns the blocks of a tensor; `None` if its rows are one block."""
        return self._blocks.get(key(tensor))

    def set(self, tensor: tf.Tensor, blocks: Blocks) -> None:
        """Sets the blocks of a tensor."""
        self._blocks[key(tensor)] = blocks

    def same(self, tensor: tf.Tensor, like: tf.Tensor) -> None:
        """Gives a tensor the blocks of another."""
        if (blocks := self.of(like)) is not None:
            self._blocks[key(tensor)] = blocks

    def read(
        self,
        tensor: tf.Tensor,
        inputs: Sequence[tf.Tensor],
        kinds: Sequence[Dependence],
        kind: Dependence,
        by_layer: bool,
    ) -> Dependence:
        """Determines the blocks of a result of an operation or a layer.

        Args:
            tensor: The result.
            inputs: The inputs.
            kinds: How the inputs depend on the examples.
            kind: How `tensor` depends on them, apart from blocks.
            by_layer: Whether a layer returns it, which keeps rows apart.

        Returns:
            How `tensor` depends on the examples.
        """
        rows = [
            t
            for t, k in zip(inputs, kinds, strict=True)
            if k in (COLUMNS, LAST, ROWS) and key(t) not in self._alike
        ]
        several = {self.of(t) for t in rows}
        if not by_layer:
            special = None
            if tensor.op.type == "ConcatV2" and kind is UNKNOWN:
                special = self._joined(tensor, inputs[:-1], kinds[:-1])
            elif several - {None}:
                special = self._taken_apart(tensor, inputs, kinds)
            if special is not None:
                return special
        if not several - {None}:
            return self._of_shapes(tensor, inputs, kinds, kind)
        if len(several) > 1 or kind in (COLUMNS, LAST):
            return UNKNOWN
        if tensor.op.type == "Reshape" and not by_layer and _other_rows(tensor):
            # Rows of two blocks would become one, or a row would become several.
            return UNKNOWN
        if kind in (ROWS, SHAPE):
            self._blocks[key(tensor)] = several.pop()
        return kind

    def _of_shapes(self, tensor, inputs, kinds, kind):
        """Determines the dependence of a result that is made from shapes alone."""
        shapes = [t for t, k in zip(inputs, kinds, strict=True) if k in (SHAPE, SIZE)]
        if not shapes or ROWS in kinds:
            return kind
        known = {self.of(t) for t in shapes} - {None}
        if kind in (SHAPE, SIZE) and tensor.op.type in _KEEP_SHAPES:
            if len(known) == 1 and len(shapes) == 1:
                self._blocks[key(tensor)] = known.pop()
        elif kind is ROWS and tensor.op.type in _ALIKE:
            self._alike.add(key(tensor))
        elif kind is ROWS:
            count = self._counts.of(shapes[0]) or 1
            if len(known) == 1:
                self._blocks[key(tensor)] = known.pop()
            elif 1 < count <= _MOST:
                # Twice as many rows as examples are most often two blocks.
                self._blocks[key(tensor)] = (1,) * count
        return kind

    def _joined(self, tensor, inputs, kinds):
        axis, rank = tf.get_static_value(tensor.op.inputs[-1]), tensor.shape.rank
        if {*kinds} != {ROWS} or axis is None or not rank or int(axis) % rank:
            return None
        blocks: list[int] = []
        for part in inputs:
            count = self._counts.of(part)
            if count is None:
                return None
            blocks += self.of(part) or (count,)
        return self._keep(tensor, tuple(blocks))

    def _keep(self, tensor, blocks):
        self._counts.set(tensor, sum(blocks))
        if len(blocks) > 1:
            self._blocks[key(tensor)] = blocks
        return ROWS

    def _taken_apart(self, tensor, inputs, kinds):
        op = tensor.op
        if op.type == "StridedSlice" and kinds[0] is ROWS and self.of(inputs[0]):
            return self._slice(tensor, op, inputs, kinds)
        if op.type == "Split" and kinds == [NONE, ROWS] and self.of(inputs[1]):
            axis, blocks = tf.get_static_value(inputs[0]), self.of(inputs[1])
            if axis is None or int(axis) % inputs[1].shape.rank:
                return None
            size, left = divmod(len(blocks), op.get_attr("num_split"))
            groups = [blocks[i : i + size] for i in range(0, len(blocks), size or 1)]
            if left or len({*map(sum, groups)}) != 1:
                return UNKNOWN
            return self._keep(tensor, groups[tensor.value_index])
        return None

    def _slice(self, tensor, op, inputs, kinds):
        blocks, steps = self.of(inputs[0]), integers(inputs[3])
        masks = [op.get_attr(f"{name}_mask") & 1 for name in ("begin", "end")]
        others = [
            op.get_attr(f"{name}_mask") & 1
            for name in ("new_axis", "ellipsis", "shrink_axis")
        ]
        if steps is None or int(steps[0]) != 1 or any(others):
            return None
        total = sum(blocks)
        begin = 0 if masks[0] else self._edge(inputs[1], kinds[1])
        end = total if masks[1] else self._edge(inputs[2], kinds[2])
        edges = [sum(blocks[:i]) for i in range(len(blocks) + 1)]
        if begin not in edges or end not in edges or begin >= end:
            return None
        return self._keep(tensor, blocks[edges.index(begin) : edges.index(end)])

    def _edge(self, tensor, kind):
        """Returns where a slice begins or ends, in rows of an example, if known."""
        if kind is SHAPE:
            return self._counts.of(tensor)
        values = integers(tensor)
        return 0 if values is not None and int(values[0]) == 0 else None


def _other_rows(tensor):
    """Tells whether a reshape changes the rows, or may change them."""
    old, new = (t.shape[1:].num_elements() for t in (tensor.op.inputs[0], tensor))
    return old is None or old != new
