"""Counts the rows of examples, in one block or several, and finds tower-local tensors.

A generative adversarial network concatenates generated and real images into a batch of
twice the rows, and splits the result later. Each tower does so with its own rows: the
first half then holds the tower's rows of the first block (`RowCounts`, `RowBlocks`).

With `loss_placement="tower"`, a tower takes its rows for the batch (`OwnRows`). A
matrix of all pairs of examples then has one row, and one column, for each row of the
tower. Such rows are reduced like any others: a sum over them is a sum, a mean over them
a mean. Any other scalar counts as a mean, weighted by the tower's fraction of the
batch.

The inputs of a tower's own tensor must be the tower's own, too: a tower that divides by
its number of pairs must not divide by the number of all pairs. A function is therefore
traced again until no total of the whole batch feeds a tower's own tensor
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

# Operations whose result is a shape, or part of one, with the row count of the inputs.
_OF_SHAPES = set(
    """Cast ConcatV2 ExpandDims GatherV2 Identity Pack Pad PadV2 Reshape Shape ShapeN
    Slice SplitV Squeeze StridedSlice TensorListGetItem TensorListPopBack
    TensorListPushBack TensorListSetItem Unpack""".split()
)
_MASKS = "begin", "ellipsis", "new_axis", "shrink_axis"


class RowCounts:
    """Row counts of tensors.

    The count of ROWS is the number of rows an example (of COLUMNS or LAST: columns or
    last elements). The count of a SIZE or SHAPE is its factor of the batch size.
    """

    def __init__(self, of_one_row: Iterable[tf.Tensor]):
        """Initializes the counts.

        Args:
            of_one_row: Tensors with one row an example.
        """
        self._counts: dict[tuple[int, str], int] = {key(t): 1 for t in of_one_row}

    def of(self, tensor: tf.Tensor) -> int | None:
        """Returns the count of a tensor, `None` if unknown."""
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
        """Determines the dependence of a result that follows from counts.

        Args:
            tensor: A result of an operation.
            inputs: The inputs of the operation.
            kinds: How the inputs depend on the examples.
        """
        op, kinds = tensor.op, [*kinds]
        if op.type in ("Equal", "NotEqual") and kinds in ([SHAPE, SHAPE], [SIZE, SIZE]):
            # The two sizes are equal for any number of examples.
            first, second = map(self.of, inputs)
            return NONE if first is not None and first == second else UNKNOWN
        if op.type == "FloorDiv" and kinds == [SIZE, NONE]:
            return SIZE if self._divides(*inputs) else UNKNOWN
        if op.type == "Reshape" and kinds == [ROWS, NONE]:
            batch_first = tensor.shape.rank is not None and tensor.shape[0] is None
            return (
                ROWS if batch_first and self.reshaped(tensor) is not None else UNKNOWN
            )
        if op.type == "StridedSlice" and kinds == [ROWS, NONE, SHAPE, NONE]:
            masks = [op.get_attr(f"{name}_mask") & 1 for name in _MASKS]
            begin = [0] if masks[0] else leading(inputs[1], 1)
            contiguous = not any(masks[1:]) and leading(inputs[3], 1) == [1]
            return ROWS if contiguous and self._all(begin, *inputs[::2]) else UNKNOWN
        if op.type == "Slice" and kinds == [ROWS, NONE, SHAPE]:
            return ROWS if self._all(leading(inputs[1], 1), *inputs[::2]) else UNKNOWN
        return UNKNOWN

    def _all(self, begin, rows, end):
        """Checks whether a slice takes all rows, from `begin` to the count of `end`."""
        count = self._counts.get(key(rows))
        return begin == [0] and count is not None and count == self.of(end)

    def _divides(self, size, divisor):
        """Checks whether a constant divides a size for any number of examples."""
        count, value = self._counts.get(key(size)), _whole(divisor)
        return count is not None and value is not None and count % value == 0

    def reshaped(self, tensor: tf.Tensor, axis: int = 0) -> int | None:
        """Returns the number of rows an example after a reshape; `None` if unknown.

        Args:
            tensor: The result of a `Reshape` whose batch axis alone has an unknown
                size.
            axis: The batch axis, before and after.
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
        """Stores the count of a result of an operation or a layer, if known.

        Args:
            tensor: The result.
            kind: How the result depends on the examples.
            inputs: The inputs of the operation or the layer.
            kinds: How the inputs depend on the examples.
            by_layer: Whether a trusted layer returns the result.
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
        """Returns the common count of the tensors that depend on examples, if any."""
        counts = {self._counts.get(key(t)) for t, kind in pairs if kind is not NONE}
        return counts.pop() if len(counts) == 1 else None

    def _of_operation(self, tensor, kind, pairs, count):
        if tensor.op.type == "Reshape" and LAST in (kind, pairs[0][1]):
            return count  # the reshape keeps the last axis
        if tensor.op.type == "Reshape" and kind in (ROWS, COLUMNS):
            target, target_kind = pairs[1]
            if target_kind is SHAPE:
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
    """Returns the elements of a row of the measured tensor, `None` if unknown."""
    shape = op.inputs[0].op if op.type == "Prod" else op
    measured = shape.type in ("Shape", "Size")
    return shape.inputs[0].shape[1:].num_elements() if measured else None


def _whole(tensor):
    """Returns the value of a constant positive integer scalar, or `None`."""
    value = integers(tensor) if tensor.shape.rank == 0 else None
    is_count = value is not None and value[0] >= 1 and value[0] % 1 == 0
    return int(value[0]) if is_count else None


# The number of rows an example in each block.
Blocks = tuple[int, ...]

_KEEP_SHAPES = set(
    "Cast ConcatV2 GatherV2 Identity Pack Shape SplitV StridedSlice Unpack".split()
)
# All rows of these results are equal, so the order of the blocks does not matter.
_ALIKE = "Fill", "OnesLike", "ZerosLike"
_MOST = 8


class RowBlocks:
    """The row blocks of tensors that have several blocks."""

    def __init__(self, counts: RowCounts):
        self._counts = counts
        self._blocks: dict[object, Blocks] = {}
        self._alike: set[object] = set()

    def of(self, tensor: tf.Tensor) -> Blocks | None:
        """Returns the blocks of a tensor; `None` if it has a single block."""
        return self._blocks.get(key(tensor))

    def set(self, tensor: tf.Tensor, blocks: Blocks) -> None:
        """Sets the blocks of a tensor."""
        self._blocks[key(tensor)] = blocks

    def same(self, tensor: tf.Tensor, like: tf.Tensor) -> None:
        """Copies the blocks of another tensor to a tensor."""
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
            inputs: The inputs of the operation or the layer.
            kinds: How the inputs depend on the examples.
            kind: How the result depends on the examples if blocks are ignored.
            by_layer: Whether a trusted layer returns the result.

        Returns:
            How the result depends on the examples.
        """
        rows = [
            t
            for t, k in zip(inputs, kinds, strict=True)
            if k in (COLUMNS, LAST, ROWS) and key(t) not in self._alike
        ]
        layouts = {self.of(t) for t in rows}
        if not by_layer:
            special = None
            if tensor.op.type == "ConcatV2" and kind is UNKNOWN:
                special = self._joined(tensor, inputs[:-1], kinds[:-1])
            elif layouts - {None}:
                special = self._taken_apart(tensor, inputs, kinds)
            if special is not None:
                return special
        if not layouts - {None}:
            return self._of_shapes(tensor, inputs, kinds, kind)
        if len(layouts) > 1 or kind in (COLUMNS, LAST):
            return UNKNOWN
        if tensor.op.type == "Reshape" and not by_layer and _other_rows(tensor):
            # Rows of two blocks would be merged, or one row would be split.
            return UNKNOWN
        if kind in (ROWS, SHAPE):
            self._blocks[key(tensor)] = layouts.pop()
        return kind

    def _of_shapes(self, tensor, inputs, kinds, kind):
        """Determines the dependence of a result that is made from shapes alone."""
        shapes = [t for t, k in zip(inputs, kinds, strict=True) if k in (SHAPE, SIZE)]
        if not shapes or ROWS in kinds:
            return kind
        layouts = {self.of(t) for t in shapes} - {None}
        if kind in (SHAPE, SIZE) and tensor.op.type in _KEEP_SHAPES:
            if len(layouts) == 1 and len(shapes) == 1:
                self._blocks[key(tensor)] = layouts.pop()
        elif kind is ROWS and tensor.op.type in _ALIKE:
            self._alike.add(key(tensor))
        elif kind is ROWS:
            count = self._counts.of(shapes[0]) or 1
            if len(layouts) == 1:
                self._blocks[key(tensor)] = layouts.pop()
            elif 1 < count <= _MOST:
                # Twice as many rows as examples most often are two blocks.
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
        """Returns a slice's bound as a number of rows an example, `None` if unknown."""
        if kind is SHAPE:
            return self._counts.of(tensor)
        values = integers(tensor)
        return 0 if values is not None and int(values[0]) == 0 else None


def _other_rows(tensor):
    """Checks whether a reshape may merge or split rows."""
    old, new = (t.shape[1:].num_elements() for t in (tensor.op.inputs[0], tensor))
    return old is None or old != new


# Prefixes of operations that draw random numbers for all rows.
_DRAWS = "StatelessRandom", "StatelessTruncated"
# The index of the input whose rows the result has, by type of operation.
_ROWS_OF = {
    "BatchMatMulV2": 0,
    "GatherV2": 1,
    "MatMul": 0,
    "SparseSoftmaxCrossEntropyWithLogits": 0,
    "SoftmaxCrossEntropyWithLogits": 0,
}

_SUMS = "Add", "AddN", "AddV2", "Sub"


class Decided(NamedTuple):
    """Decisions from an earlier trace of the same function.

    Attributes:
        no_totals: Names of operations that must not take a total of the whole batch.
        at_home: Names of operations that run at home on the rows of all towers.
    """

    no_totals: frozenset[str] = frozenset()
    at_home: frozenset[str] = frozenset()


class OwnRows:
    """Finds the tensors that are a tower's own, and how these depend on its rows.

    Attributes:
        firsts: The operations that make a tower's own tensor of other tensors.
        by_hand: The names of operations that may not make one: gradient operations
            that are read one by one.
        contested: The keys of totals that operations must not take.
        at_home: The names of operations whose result is needed for the whole batch.
    """

    def __init__(
        self,
        decided: Decided,
        counts: RowCounts,
        blocks: RowBlocks,
        meets: Callable[[tf.Operation], bool],
    ):
        """Takes earlier decisions, and the counts and blocks of a graph's tensors.

        `meets` returns whether an operation is read by itself, outside all regions.
        """
        self._decided, self._meets = decided, meets
        self._counts, self._blocks = counts, blocks
        self.firsts: list[tf.Operation] = []
        self.by_hand: set[str] = set()
        self.contested: set[Any] = set()
        self.at_home: set[str] = set()
        self._kinds: dict[Any, Dependence] = {}
        self._operations: list[tf.Operation] = []
        # Tensors divided by a number of the tower's rows, or the like. Their sums must
        # not be added over towers.
        self._scaled: set[Any] = set()
        # Tensors whose number of rows is known.
        self._aligned: set[Any] = set()

    def __contains__(self, tensor: tf.Tensor) -> bool:
        """Checks whether a tensor is a tower's own."""
        return key(tensor) in self._kinds

    def may_take_totals(
        self,
        tensor: tf.Tensor,
        inputs: Sequence[tf.Tensor],
        kinds: Sequence[Dependence],
    ) -> bool:
        """Checks whether an operation may take totals of the whole batch as inputs."""
        if tensor.op.name in self._decided.no_totals | self._decided.at_home:
            return False
        if any(t in self for t in inputs):
            # A metric adds a result to its value: for all towers, at home. A sum of
            # several losses is such a case, too: its gradient takes each loss by
            # itself.
            totals = [kind for kind in kinds if kind is not NONE]
            addable = len(totals) == 1 or tensor.op.type in _SUMS
            allowed = addable and {*totals} <= {MEAN, SIZE, SUM}
            return allowed and tensor.shape.is_fully_defined()
        # If a tensor has a row for each example, a tower has a row for each of its own
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
            tensor: The tensor.
            inputs: The inputs of its operation.
            kinds: How the inputs depend on the examples.
            kind: How the tensor depends on the examples of the whole batch, if known.

        Returns:
            How the tensor depends on the tower's rows; `kind` if it is not a tower's
            own.
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
        """Records that the gradient of an own tensor has the rows of its source."""
        self._kinds[key(gradient)] = ROWS
        if source not in self or key(source) in self._aligned:
            self._aligned.add(key(gradient))

    def is_part(self, tensor: tf.Tensor) -> bool:
        """Checks whether the towers' values of a tensor make up the full value."""
        kind = self._kinds.get(key(tensor))
        if kind is OWN:
            return False
        if kind not in (COLUMNS, LAST, ROWS):
            return True
        others = {ROWS: tensor.shape[1:], COLUMNS: tensor.shape[:1]}
        others = others.get(kind, tensor.shape[:-1])
        return key(tensor) in self._aligned and None not in others

    def need(self, tensor: tf.Tensor) -> None:
        """Requires the value of a tensor for the whole batch."""
        if not self.is_part(tensor):
            self.send_home(tensor)

    def send_home(self, tensor: tf.Tensor) -> None:
        """Sends a tensor home, and the tower's own tensors that it is made from."""
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
            known: Returns whether an operation is in a region with known results.
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
        # Without these totals, fewer operations may have to run at home.
        return before._replace(no_totals=before.no_totals | names)

    def _totals_behind(self, totals, extremes, known) -> Iterable[Any]:
        """Yields the keys of totals that feed a tower's own tensors."""
        waiting, seen = [*self._operations], set()
        while waiting:
            op = waiting.pop()
            if op.name in seen or op.name in self.by_hand or known(op):
                continue
            seen.add(op.name)
            # A scalar that is added to a tower's own tensor need not be the tower's
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
            # The operation runs at home, as its inputs do.
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
        """Returns the dependence of a tensor that a rule derives from a tower's own."""
        shape = tensor.shape
        if tensor.op.type in ("Shape", "Size"):
            # The number of columns may be the number of rows, and differ between
            # towers.
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
        """Returns the input that provably has the rows of a tensor, or `None`."""
        op = tensor.op
        candidates = [
            t
            for t, kind in zip(inputs, kinds, strict=True)
            if kind is ROWS and (t not in self or key(t) in self._aligned)
        ]
        if op.type == "Range":
            start, step = integers(op.inputs[0]), integers(op.inputs[2])
            all_rows = kinds[1] is SIZE and self._counts.of(inputs[1]) == 1
            return inputs[1] if all_rows and (start, step) == ([0], [1]) else None
        if op.type in ELEMENTWISE:
            same = [t for t in candidates if t.shape.rank == tensor.shape.rank]
            return same[0] if same else None
        index = _ROWS_OF.get(op.type)
        if index is None or not any(t is inputs[index] for t in candidates):
            return None
        if op.type == "GatherV2" and integers(inputs[2]) != [0]:
            return None
        transposed = op.type == "MatMul" and op.get_attr("transpose_a")
        is_matrix = op.type == "BatchMatMulV2" and tensor.shape.rank < 3
        return None if transposed or is_matrix else inputs[index]
