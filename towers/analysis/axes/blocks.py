"""Follows rows of examples that stand one behind the other in several blocks.

A generative adversarial network joins made pictures and real ones to one batch of twice
the rows, and takes the halves apart later. Each tower does so with its rows: then its
first half is of its rows of the first block.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers.analysis.axes.counts import RowCounts
from towers.analysis.kinds import (
    COLUMNS,
    LAST,
    NONE,
    ROWS,
    SHAPE,
    SIZE,
    UNKNOWN,
    Dependence,
)
from towers.analysis.layer_calls import key
from towers.analysis.static_values import integers

# How many rows of each example there are in each block.
Blocks = tuple[int, ...]

_KEEP_SHAPES = set(
    "Cast ConcatV2 GatherV2 Identity Pack Shape SplitV StridedSlice Unpack".split()
)
# Their rows are all alike, so that it does not matter where the blocks are.
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
        """Reads the blocks of what an operation or a layer returns.

        Args:
            tensor: What it returns.
            inputs: What it takes.
            kinds: How that depends on the examples.
            kind: How `tensor` does, as far as blocks do not matter.
            by_layer: Whether a layer returns it, which keeps rows apart.

        Returns:
            How it does.
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
        """Reads what is made of a shape alone."""
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
                # Of twice as many rows as examples, most often for two blocks.
                self._blocks[key(tensor)] = (1,) * count
        return kind

    def _joined(self, tensor, inputs, kinds):
        axis, rank = tf.get_static_value(tensor.op.inputs[-1]), tensor.shape.rank
        if {*kinds} != {ROWS} or axis is None or not rank or int(axis) % rank:
            return None
        blocks: list[int] = []
        for each in inputs:
            count = self._counts.of(each)
            if count is None:
                return None
            blocks += self.of(each) or (count,)
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
            each, left = divmod(len(blocks), op.get_attr("num_split"))
            groups = [blocks[i : i + each] for i in range(0, len(blocks), each or 1)]
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
    """Whether a reshape makes other rows than there were, as far as is known."""
    old, new = (t.shape[1:].num_elements() for t in (tensor.op.inputs[0], tensor))
    return old is None or old != new
