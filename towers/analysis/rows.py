"""Rows of examples: several blocks of them in a tensor, and rows of a tower's own.

A generative adversarial network joins generated and real pictures to one batch of twice
the rows, and splits it later. Each tower does so with its own rows: its first half then
holds its rows of the first block (`RowCounts`, `RowBlocks`).

`loss_placement="tower"` has a tower take its rows for the batch (`OwnRows`). A matrix
that compares each example with each then has a row for each of the tower's rows, and as
many columns. Its rows add up as rows do: a sum over them is a sum, a mean over them a
mean. A scalar that is neither counts as a mean, weighted by the tower's fraction of the
batch.

The inputs of a tower's own tensor must be its own, too: a tower that divides by the
number of its pairs must not take the number of all pairs. So a function is traced
again, until no total of the whole batch goes into a tower's own tensor
(`_totals_behind`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.analysis.axes import ELEMENTWISE, integers, leading
from towers.analysis.kinds import (
    COLUMNS,
    COUPLED,
    LAST,
    MEAN,
    NONE,
    OWN,
    PACKED,
    ROWS,
    SHAPE,
    SIZE,
    SUM,
    TURNED,
    UNKNOWN,
    Dependence,
    Edge,
    Total,
)
from towers.analysis.layer_calls import key
from towers.keras_adapter.graphs import is_stateful

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


# They draw random numbers for all rows.
_DRAWS = "StatelessRandom", "StatelessTruncated"
# Their results have the rows of the input at this index.
_ROWS_OF = {
    "BatchMatMulV2": 0,
    "GatherV2": 1,
    "MatMul": 0,
    "SparseSoftmaxCrossEntropyWithLogits": 0,
    "SoftmaxCrossEntropyWithLogits": 0,
}

_SUMS = "Add", "AddN", "AddV2", "Sub"


class Decided(NamedTuple):
    """Decisions about operations from an earlier trace of the same function.

    Attributes:
        no_totals: The operations that take no total of the whole batch.
        at_home: The operations that run at home on the rows of all towers.
    """

    no_totals: frozenset[str] = frozenset()
    at_home: frozenset[str] = frozenset()


class OwnRows:
    """Finds the tensors that are a tower's own, and how they depend on its rows.

    Attributes:
        firsts: The operations that make a tower's own tensor of other tensors.
        by_hand: The names of operations that may make none: operations of gradients
            that are read one by one.
        contested: The keys of totals that operations must not take.
        at_home: The names of operations whose whole result is needed.
    """

    def __init__(
        self,
        decided: Decided,
        counts: RowCounts,
        blocks: RowBlocks,
        meets: Callable[[tf.Operation], bool],
    ):
        """Takes earlier decisions, and the counts and blocks of a graph's tensors.

        `meets` tells whether an operation is read by itself.
        """
        self._decided, self._meets = decided, meets
        self._counts, self._blocks = counts, blocks
        self.firsts: list[tf.Operation] = []
        self.by_hand: set[str] = set()
        self.contested: set[Any] = set()
        self.at_home: set[str] = set()
        self._kinds: dict[Any, Dependence] = {}
        self._operations: list[tf.Operation] = []
        # Tensors divided by a number of the tower's rows, or the like. Sums of them do
        # not add up over towers.
        self._scaled: set[Any] = set()
        # Tensors whose number of rows is known.
        self._aligned: set[Any] = set()

    def __contains__(self, tensor: tf.Tensor) -> bool:
        """Tells whether a tensor is a tower's own."""
        return key(tensor) in self._kinds

    def may_take_totals(
        self,
        tensor: tf.Tensor,
        inputs: Sequence[tf.Tensor],
        kinds: Sequence[Dependence],
    ) -> bool:
        """Tells whether totals of the whole batch may go into a tensor."""
        if tensor.op.name in self._decided.no_totals | self._decided.at_home:
            return False
        if any(t in self for t in inputs):
            # A metric adds a result to its value: for all towers, at home. So does a
            # sum of several losses, whose gradient takes each loss by itself.
            totals = [kind for kind in kinds if kind is not NONE]
            few = len(totals) == 1 or tensor.op.type in _SUMS
            fits = few and {*totals} <= {MEAN, SIZE, SUM}
            return fits and tensor.shape.is_fully_defined()
        # A tensor with a row for each example gets one for each of the tower's
        # examples.
        return tensor.shape.is_fully_defined() or bool({ROWS, COLUMNS, LAST} & {*kinds})

    def read(
        self,
        tensor: tf.Tensor,
        inputs: Sequence[tf.Tensor],
        kinds: Sequence[Dependence],
        kind: Dependence,
    ) -> Dependence:
        """Determines how a tensor depends on a tower's rows, if it is the tower's own.

        Args:
            tensor: A tensor.
            inputs: The inputs.
            kinds: How the inputs depend on the examples.
            kind: How the tensor depends on the examples of the whole batch, if known.

        Returns:
            How the tensor depends on its rows; `kind`, if it is no tower's own.
        """
        own = [t for t in inputs if t in self]
        if not self._may_be_own(tensor.op, kinds, kind, bool(own)):
            return kind
        scaled = any(key(t) in self._scaled for t in own)
        if kind in (COUPLED, UNKNOWN):
            kind = self._made(tensor, inputs, kinds)
            scaled |= any(
                t.dtype.is_floating and k in (MEAN, OWN, SIZE, SUM)
                for t, k in zip(inputs, kinds, strict=True)
            )
        else:
            kind = self._kept(tensor, inputs, kind)
        if kind is SUM and scaled:
            kind = MEAN
        if scaled and tensor.dtype.is_floating:
            self._scaled.add(key(tensor))
        if not own:
            self.firsts.append(tensor.op)
        self._operations.append(tensor.op)
        self._kinds[key(tensor)] = kind
        return kind

    def like(self, gradient: tf.Tensor, source: tf.Tensor) -> None:
        """Notes that a gradient of a tower's own tensor has the rows of its source."""
        self._kinds[key(gradient)] = ROWS
        if source not in self or key(source) in self._aligned:
            self._aligned.add(key(gradient))

    def is_part(self, tensor: tf.Tensor) -> bool:
        """Tells whether the towers' values of a tensor make up that of all rows."""
        kind = self._kinds.get(key(tensor))
        if kind is OWN:
            return False
        if kind not in (COLUMNS, LAST, ROWS):
            return True
        others = {ROWS: tensor.shape[1:], COLUMNS: tensor.shape[:1]}
        others = others.get(kind, tensor.shape[:-1])
        return key(tensor) in self._aligned and None not in others

    def need(self, tensor: tf.Tensor) -> None:
        """Notes that an operation needs a tensor's value of the whole batch."""
        if not self.is_part(tensor):
            self.send_home(tensor)

    def send_home(self, tensor: tf.Tensor) -> None:
        """Excludes all tensors behind a tensor from being a tower's own."""
        waiting, seen = [tensor], set()
        while waiting:
            current = waiting.pop()
            if current in self and key(current) not in seen:
                seen.add(key(current))
                self.at_home.add(current.op.name)
                waiting += current.op.inputs

    def decide(
        self,
        totals: Mapping[Edge, Total],
        extremes: Mapping[Any, Total],
        known: Callable[[tf.Operation], bool],
    ) -> Decided:
        """Returns the decisions so far, for another trace.

        Args:
            totals: The totals that operations take.
            extremes: Largest and smallest values, by their keys.
            known: Tells whether the whole result of an operation is known.
        """
        unwanted = self.contested | {*self._totals_behind(totals, extremes, known)}
        names = {
            edge.operation
            for edge, total in totals.items()
            if key(total.tensor) in unwanted
        }
        of_rows = [total for name, total in extremes.items() if name in unwanted]
        names |= {total.tensor.op.name for total in of_rows}
        before = self._decided
        if names <= before.no_totals:
            return before._replace(at_home=before.at_home | self.at_home)
        # Without these totals, fewer whole results may be needed.
        return before._replace(no_totals=before.no_totals | names)

    def _totals_behind(self, totals, extremes, known) -> Iterable[Any]:
        """Yields the keys of totals that go into a tower's own tensors."""
        waiting, seen = [*self._operations], set()
        while waiting:
            op = waiting.pop()
            if op.name in seen or op.name in self.by_hand or known(op):
                continue
            seen.add(op.name)
            # A number that is added to a tower's own tensor need not be the tower's
            # own.
            adds = op.type in _SUMS and op.outputs[0].shape.rank == 0
            adds &= any(tensor in self for tensor in op.inputs)
            for i, tensor in enumerate(op.inputs):
                if adds and tensor not in self:
                    continue
                if Edge(op.name, i) in totals:
                    yield key(totals[Edge(op.name, i)].tensor)
                elif key(tensor) in extremes:
                    yield key(tensor)
                waiting.append(tensor.op)

    def _may_be_own(self, op, kinds, kind, takes_own):
        if kind is NONE or op.name in self.by_hand:
            return False
        if {COUPLED, PACKED, UNKNOWN} & {*kinds}:
            # The operation runs at home, with its inputs.
            return False
        if kind not in (COUPLED, UNKNOWN):
            return takes_own
        if is_stateful(op) or op.type.startswith(_DRAWS):
            return False
        return op.name not in self._decided.at_home and (takes_own or self._meets(op))

    def _made(self, tensor, inputs, kinds):
        """Returns the dependence of a tensor that mixes examples, or has no rule."""
        shape = tensor.shape
        if shape.rank == 0 and tensor.dtype.is_floating:
            return MEAN
        if not shape.rank or shape[0] is not None:
            return OWN
        source = self._rows_of(tensor, inputs, kinds)
        if source is not None:
            self._aligned.add(key(tensor))
            self._blocks.same(tensor, source)
            if (count := self._counts.of(source)) is not None:
                self._counts.set(tensor, count)
        return ROWS

    def _kept(self, tensor, inputs, kind):
        """Returns the dependence of a tensor that a rule makes of a tower's own."""
        shape = tensor.shape
        if tensor.op.type in ("Shape", "Size"):
            # The number of columns, as many as rows, differs between towers.
            before = inputs[0].shape
            return OWN if before.rank is None or None in before[1:] else kind
        if kind in (SHAPE, SIZE) or (kind in (MEAN, SUM) and shape.is_fully_defined()):
            return kind
        if not shape.rank or (shape[0] is not None and kind in (MEAN, SUM)):
            return OWN
        own = [t for t in inputs if self._kinds.get(key(t)) in (COLUMNS, LAST, ROWS)]
        square = (kind is COLUMNS and shape[0] is None) or (
            kind is LAST and None in shape[:-1]
        )
        if kind in (COLUMNS, LAST, ROWS) and not square:
            if all(key(t) in self._aligned for t in own):
                self._aligned.add(key(tensor))
            return kind
        return ROWS

    def _rows_of(self, tensor, inputs, kinds):
        """Returns the input that has the rows of a tensor, if that is proved."""
        op = tensor.op
        known = [
            t
            for t, kind in zip(inputs, kinds, strict=True)
            if kind is ROWS and (t not in self or key(t) in self._aligned)
        ]
        if op.type == "Range":
            start, step = integers(op.inputs[0]), integers(op.inputs[2])
            whole = kinds[1] is SIZE and self._counts.of(inputs[1]) == 1
            return inputs[1] if whole and (start, step) == ([0], [1]) else None
        if op.type in ELEMENTWISE:
            same = [t for t in known if t.shape.rank == tensor.shape.rank]
            return same[0] if same else None
        index = _ROWS_OF.get(op.type)
        if index is None or not any(t is inputs[index] for t in known):
            return None
        if op.type == "GatherV2" and integers(inputs[2]) != [0]:
            return None
        flipped = op.type == "MatMul" and op.get_attr("transpose_a")
        short = op.type == "BatchMatMulV2" and tensor.shape.rank < 3
        return None if flipped or short else inputs[index]
