"""Finds tensors that are a tower's own: the tower takes its rows for the batch.

`loss_placement="tower"` asks for this. A matrix that compares each example with each
then has a row for each of the tower's rows, and as many columns. Its rows add up as
rows do: a sum over them is a sum, a mean over them a mean. A scalar that is neither
counts as a mean, weighted by the tower's fraction of the batch.

The inputs of a tower's own tensor must be its own, too: a tower that divides by the
number of its pairs must not take the number of all pairs. So a function is traced
again, until no total of the whole batch goes into a tower's own tensor
(`_totals_behind`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.analysis.axes.blocks import RowBlocks, RowCounts
from towers.analysis.axes.position import ELEMENTWISE
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
    UNKNOWN,
    Dependence,
    Edge,
    Total,
)
from towers.analysis.layer_calls import key
from towers.analysis.static_values import integers
from towers.keras_adapter.graphs import is_stateful

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
