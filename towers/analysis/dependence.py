"""Tells how a traced value depends on the examples of the batch.

A mean over examples is the weighted mean of the local batches' means. A sum is the sum
of their sums. A value that no example touches is the same on every tower. Anything else
(a maximum, a variance, a ratio of sums) cannot be put together from local batches. To
tell which it is, the graph is read from the value back to the batch. Only what is
proved counts: an operation that is not listed here makes a value unknown, never wrong.

Keras's own layers are known to treat every example by itself (`layer_calls.py`), but
for BatchNormalization, which differs by design. All else is read by operations.

A ratio of sums, such as a mean over what a mask leaves, can be put together if one of
the sums is that of the whole batch: such a total is added up before towers go on.
"""

import functools
import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.analysis import effects
from towers.analysis.axes import DRAWS, STATELESS_DRAWS, axis_of, with_examples_at
from towers.analysis.kinds import (
    COLUMNS,
    COUPLED,
    LAST,
    MEAN,
    NONE,
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
from towers.analysis.layer_calls import LayerCall, key, parts
from towers.analysis.operations import is_zero, of_layer, of_operation, of_target
from towers.analysis.rows import Blocks, Decided, OwnRows, RowBlocks, RowCounts
from towers.keras_adapter.graphs import function_graph

# How totals of local batches make that of the whole batch, by the type of operation.
EXTREMES = {
    "All": tf.reduce_all,
    "Any": tf.reduce_any,
    "Max": tf.reduce_max,
    "Min": tf.reduce_min,
}


# Operations that call functions, by the attributes that name these. Of a loop, a turn
# comes first, and then what decides whether there is another one.
_CALLS = {
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
    **dict.fromkeys(("While", "StatelessWhile"), ("body", "cond")),
}
_BRANCHES = ("then_branch", "else_branch")
_LOOP = ("body", "cond")
_COUNTED = {COLUMNS, LAST, ROWS, SHAPE, SIZE, TURNED}
# What tensors of a list may be, beside NONE.
_OF_TENSORS = {COLUMNS, LAST, MEAN, ROWS, SHAPE, SIZE, SUM, TURNED}
_SIZES = {SHAPE, SIZE, TURNED}
# By type, the place of what is put into the list that comes first.
_PUT = {"TensorListPushBack": 1, "TensorListSetItem": 2}
_MAKE = {"TensorListFromTensor", "TensorListScatterV2"}
_SAME = {"Identity", "TensorListResize", "ZerosLike"}
_STACK = {"TensorListGather", "TensorListStack"}
_TAKE = {"TensorListGetItem", "TensorListPopBack"}


class Culprit(NamedTuple):
    """The operation that makes a tensor coupled or unknown.

    Attributes:
        operation: An operation.
        layer: The innermost layer that it is a part of, if it is of one.
    """

    operation: tf.Operation
    layer: keras.layers.Layer | None = None

    def __str__(self) -> str:
        """Names it, as a phrase."""
        operation = f"'{self.operation.name}' ({self.operation.type})"
        if self.layer is None:
            return f"operation {operation}"
        name, kind = self.layer.name, type(self.layer).__name__
        what = "model" if isinstance(self.layer, keras.Model) else "layer"
        return f"{what} '{name}' ({kind}), operation {operation}"


class Reader:
    """Reads from a graph how its tensors depend on the examples."""

    def __init__(
        self,
        local_batch: Any,
        calls: dict[Any, LayerCall],
        known: Mapping[Any, Dependence] | None = None,
        meets: Callable[[tf.Operation], bool] | None = None,
        decided: Decided | None = None,
        at_home: Container[str] = (),
    ):
        """Starts to read a graph.

        Args:
            local_batch: A nest of tensors, each with one row an example. The graph must
                not know how many.
            calls: The calls of layers that `recorded_layers` remembered.
            known: How other tensors depend on the examples, by their keys.
            meets: Tells whether an operation may take totals of the whole batch. Then
                random numbers are those of the whole batch, too. `None` within a
                function that an operation calls.
            decided: Which tensors are each tower's own where examples meet; `None` if
                none is to be.
            at_home: The names of operations of which nothing is to be known.
        """
        self._calls, self._at_home = calls, at_home
        # What is known of what functions return, by who calls them, and of what kinds.
        self._returned: dict[Any, Sequence[ValueState]] = {}
        # Lists of which no tensor is set, of those that a function is given.
        self._empty: set[Any] = set()
        self._culprits = {}
        # What the compiled loss takes of the whole batch, if it is being read.
        self._totals: dict[Edge, Total] | None = None if meets is None else {}
        # What is made of totals, and of nothing else of the examples.
        self._of_totals: set[Any] = set()
        self._meets = meets
        # Largest and smallest values over the rows, of which all take the batch's.
        self.extremes: dict[Any, Total] = {}
        self._of_data = {key(part) for _, part in parts(local_batch)}
        self.counts = RowCounts(
            part for packed, part in parts(local_batch) if not packed
        )
        # Where each tower computes as one device does, of rows in several blocks, too.
        self.blocks = None if meets is None else RowBlocks(self.counts)
        self.own: OwnRows | None = None
        if decided is not None:
            self.own = OwnRows(decided, self.counts, self.blocks, meets)
        self._known = {
            key(part): PACKED if packed else NONE if part.shape.rank == 0 else ROWS
            for packed, part in parts(local_batch)
        } | {**(known or {})}
        # The first number of a sparse tensor's shape is that of the examples.
        for leaf in tf.nest.flatten(local_batch):
            if isinstance(leaf, tf.SparseTensor):
                self._known[key(leaf.dense_shape)] = SHAPE

    def of(self, tensor: tf.Tensor) -> Dependence:
        """Returns how `tensor` depends on the examples."""
        # No recursion: a network is deeper than Python's stack.
        waiting = [tensor]
        while waiting:
            current = waiting[-1]
            inputs = self._inputs(current)
            missing = [t for t in inputs if key(t) not in self._known]
            if key(current) not in self._known and missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            if key(current) not in self._known:
                self._known[key(current)] = self._combine(current)
        return self._known[key(tensor)]

    def know(self, kinds: Mapping[Any, Dependence]) -> None:
        """Takes over how tensors depend on the examples, by their keys."""
        self._known |= kinds

    @property
    def totals(self) -> dict[Edge, Total]:
        """The totals of the whole batch that operations take, by who takes them."""
        return {} if self._totals is None else self._totals

    def is_of_data(self, tensor: tf.Tensor) -> bool:
        """Tells whether the local batch alone decides a tensor, and no variable.

        Shapes count as the local batch's, whatever they are of.
        """
        waiting, seen = [tensor], {*self._of_data}
        while waiting:
            current = waiting.pop()
            if key(current) in seen:
                continue
            seen.add(key(current))
            op = current.op
            if op.type in ("Shape", "Size", "Rank"):
                continue
            if op.type in ("Placeholder", "PlaceholderWithDefault"):
                return False
            # Whatever is stateful may read a variable.
            if not op.inputs and op.type != "Const":
                return False
            waiting.extend(op.inputs)
        self._of_data = seen
        return True

    def why(self, tensor: tf.Tensor) -> Culprit:
        """Returns what made `tensor` coupled or unknown, or else what made it."""
        return self._culprits.get(key(tensor), Culprit(tensor.op))

    def _inputs(self, tensor):
        call = self._calls.get(key(tensor))
        if call is None:
            return list(tensor.op.inputs)
        return [*call.inputs, *(() if call.trusted else tensor.op.inputs)]

    def _combine(self, tensor):
        call = self._calls.get(key(tensor))
        if call is None:
            return self._of(tensor.op.inputs, self._of_operation, tensor)
        if call.trusted:
            kind = self._of(call.inputs, of_layer, tensor, call.packed)
            kinds = [self._known[key(t)] for t in call.inputs]
            self.counts.keep(tensor, kind, call.inputs, kinds, by_layer=True)
            self._blame(tensor, call)
            return kind
        kind = self._of(tensor.op.inputs, self._of_operation, tensor)
        self._blame(tensor, call)
        return kind

    def _blame(self, tensor, call):
        """Names the layer in which a tensor has become coupled or unknown."""
        culprit = self._culprits.get(key(tensor))
        if culprit is None or culprit.layer is not None:
            return
        for each in call, *call.around:
            if not {self._known.get(key(t)) for t in each.inputs} & {COUPLED, UNKNOWN}:
                self._culprits[key(tensor)] = culprit._replace(layer=each.layer)
                return

    def _of(self, inputs, rule, tensor, *extra):
        kinds = [self._known[key(t)] for t in inputs]
        if all(kind is NONE for kind in kinds):
            if any(key(t) in self._of_totals for t in inputs):
                self._of_totals.add(key(tensor))
            return NONE
        whole = self._of_examples(inputs, kinds, rule, tensor, *extra)
        if self.own is None:
            return whole
        return self.own.read(tensor, list(inputs), kinds, whole)

    def _of_examples(self, inputs, kinds, rule, tensor, *extra):
        if any(map(self._is_for_all_rows, inputs)):
            self._culprits[key(tensor)] = Culprit(tensor.op)
            return UNKNOWN
        kinds = [*kinds]
        whole = self._meets is not None and kinds[1:] and kinds[1] in (COUPLED, UNKNOWN)
        if tensor.op.type == "Reshape" and rule == self._of_operation and not whole:
            kinds[1] = of_target(tensor, kinds[1])
        for lost in (COUPLED, UNKNOWN):
            if lost in kinds:
                self._culprits[key(tensor)] = self.why(inputs[kinds.index(lost)])
                return lost
        kind = rule(tensor, list(inputs), kinds, *extra)
        by_layer = rule is of_layer
        if self.blocks is not None and (by_layer or tensor.op.type not in _CALLS):
            kind = self.blocks.read(tensor, list(inputs), kinds, kind, by_layer)
        if kind in (COUPLED, UNKNOWN) and self._totals is not None:
            kind = self._by_totals(tensor, list(inputs), kinds) or kind
        if kind in (COUPLED, UNKNOWN):
            self._culprits[key(tensor)] = Culprit(tensor.op)
        return kind

    def _of_operation(self, tensor, inputs, kinds):
        op = tensor.op
        if op.name in self._at_home:
            return UNKNOWN
        if op.type in _CALLS:
            return self._of_call(tensor, inputs, kinds)
        if is_of_lists(op):
            kind = of_list(tensor, inputs, kinds, self._is_empty(inputs[0]))
        else:
            kind = of_operation(tensor, inputs, kinds)
        if op.type in STATELESS_DRAWS and self._meets is None:
            # In a function, each tower would draw the first rows of one device.
            kind = UNKNOWN
        if self._is_of_unknown_count(op):
            # Whoever draws for all towers could not cut them.
            kind = UNKNOWN
        elif kind is UNKNOWN:
            kind = self.counts.read(tensor, inputs, kinds)
        self.counts.keep(tensor, kind, inputs, kinds)
        return kind

    def _of_call(self, tensor, inputs, kinds):
        """Reads how the result of an operation that calls functions depends on them."""
        op = tensor.op
        names = [op.get_attr(each).name for each in _CALLS[op.type]]
        # A gradient has a loop keep more than before.
        asked = op.name, *names, tuple(kinds)
        if asked not in self._returned:
            given = [*map(self._state_of, inputs, kinds)]
            self._returned[asked] = self._of_functions(op, names, inputs, given)
        state = self._returned[asked][tensor.value_index]
        self._take(tensor, state)
        return state.kind

    def _of_functions(self, op, names, inputs, given):
        """Returns what is known of each output of the functions of an operation."""
        nothing = [LOST for _ in op.outputs]
        if self._meets is not None and any(effects.of([op])):
            # It runs once, for all rows.
            return nothing
        if _CALLS[op.type] == _LOOP:
            states = self._of_loop(op, names, inputs, given)
        else:
            if _CALLS[op.type] == _BRANCHES:
                # What decides between branches must not depend on examples.
                if given[0].kind is not NONE:
                    return nothing
                inputs, given = inputs[1:], given[1:]
            shapes = [each.shape for each in inputs]
            graphs = [function_graph(name, inputs, shapes) for name in names]
            states = functools.reduce(
                merged, [self._of_function(graph, given) for graph in graphs]
            )
        if self._meets is None:
            return states
        states = [LOST if state.is_countless else state for state in states]
        # It runs in one place, so where it returns one such thing, all are. Not so
        # lists, some of which only serve a gradient: home may ask for them later.
        odd = any(
            state.kind in (COUPLED, UNKNOWN) and made.dtype != tf.variant
            for state, made in zip(states, op.outputs, strict=True)
        )
        return nothing if odd else states

    def _of_loop(self, op, names, inputs, given):
        """Returns what is known of each output of a loop: what stays true each turn."""
        # A turn may make another shape than there was before the first.
        shapes = [
            before.shape.most_specific_compatible_shape(after.shape)
            for before, after in zip(inputs, op.outputs, strict=True)
        ]
        turn, decides = (function_graph(name, inputs, shapes) for name in names)
        before, states = None, given
        while states != before:
            before = states
            states = after_a_turn(before, self._of_function(turn, before))
        (another,) = self._of_function(decides, states)
        # How many turns there are must not depend on examples.
        return states if another.kind is NONE else [LOST for _ in states]

    def _of_function(self, graph, given):
        """Returns what is known of each output of a function."""
        known = {
            key(tensor): state.kind
            for tensor, state in zip(graph.inputs, given, strict=True)
        }
        reader = Reader((), {}, known)
        reader.blocks = None if self.blocks is None else RowBlocks(reader.counts)
        for tensor, state in zip(graph.inputs, given, strict=True):
            reader._take(tensor, state)
        return [reader._state_of(tensor, reader.of(tensor)) for tensor in graph.outputs]

    def _state_of(self, tensor, kind):
        """Returns all that is known of a tensor that depends on the examples so."""
        return ValueState(
            kind,
            self.counts.of(tensor),
            None if self.blocks is None else self.blocks.of(tensor),
            empty=self._is_empty(tensor),
            zero=kind is NONE and is_zero(tensor),
            of_totals=key(tensor) in self._of_totals,
        )

    def _take(self, tensor, state):
        """Takes over what is known of a tensor beside how it depends on examples."""
        if state.count is not None:
            self.counts.set(tensor, state.count)
        if state.blocks is not None and self.blocks is not None:
            self.blocks.set(tensor, state.blocks)
        if state.empty:
            self._empty.add(key(tensor))
        if state.of_totals:
            self._of_totals.add(key(tensor))

    def _is_empty(self, tensor):
        """Tells whether a tensor is a list of which no tensor is set."""
        return key(tensor) in self._empty or (
            is_new(tensor.op) and self._known[key(tensor)] is NONE
        )

    def _is_of_unknown_count(self, op):
        """Tells whether it draws for a whole batch a number that is not known."""
        whole = self._meets is not None and op.type in DRAWS
        return whole and self.counts.of(op.inputs[0]) is None

    def _by_totals(self, tensor, inputs, kinds):
        """Returns how a result depends on the examples if inputs are totals.

        Those are then of the whole batch. `None` if that does not help.
        """
        op = tensor.op
        if _CALLS.get(op.type) == _LOOP:
            # What it keeps for its gradient would be of totals, too.
            return None
        if not self._meets(op):
            return None
        if self.own is not None and not self.own.may_take_totals(tensor, inputs, kinds):
            return None
        if op.type in EXTREMES and kinds[0] is ROWS:
            total = Total(tensor, COUPLED)
            self.extremes[key(tensor)] = total
            for consumer in tensor.consumers():
                for index, taken in enumerate(consumer.inputs):
                    if taken is tensor:
                        self._totals[Edge(consumer.name, index)] = total
            self._of_totals.add(key(tensor))
            return NONE
        totals = [
            index for index, kind in enumerate(kinds) if kind in (SUM, SIZE, MEAN)
        ]
        # As few as possible, and rather a divisor than what is divided.
        ways = [
            taken
            for count in range(1, len(totals) + 1)
            for taken in itertools.combinations(totals[::-1], count)
        ]
        # Those that variables decide as well may all be needed.
        of_data = [i for i in totals if self.is_of_data(inputs[i])]
        ways = [taken for taken in ways if {*taken} <= {*of_data}]
        ways += [totals] if len(of_data) < len(totals) else []
        for taken in ways:
            assumed = [
                NONE if index in taken else kind for index, kind in enumerate(kinds)
            ]
            made = NONE
            if any(kind is not NONE for kind in assumed):
                made = self._of_operation(tensor, inputs, assumed)
            if made not in (COUPLED, UNKNOWN):
                self._totals |= {
                    Edge(op.name, i): Total(inputs[i], kinds[i]) for i in taken
                }
                if made is NONE:
                    self._of_totals.add(key(tensor))
                return made
        return None

    def _is_for_all_rows(self, tensor):
        """Tells whether it may be a shape of all rows, or have as many."""
        known = tensor.shape.is_fully_defined() and tensor.dtype != tf.variant
        whole = tensor.dtype.is_integer or not known
        return whole and key(tensor) in self._of_totals


# The states of values that go into a function, and of those that come out.
#
# A loop is read until a turn changes nothing of what is known: what is known of its
# values goes into its body, and what comes out is merged with it. Then it is proved for
# any number of turns. What decides whether there is another turn must depend on no
# example.


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


# Tells of an operation what it makes of lists of tensors, which loops fill and read.
#
# A list depends on the examples as each of its tensors does. How many these are, and
# what shape the list asks of them, is alike everywhere: what makes a list, or adds to
# one, is only known where nothing but the tensors depends on the examples.


def is_of_lists(op: tf.Operation) -> bool:
    """Tells whether an operation takes or makes lists."""
    return any(t.dtype == tf.variant for t in (*op.inputs, *op.outputs))


def is_new(op: tf.Operation) -> bool:
    """Tells whether an operation makes a list of which no tensor is set."""
    return op.type in ("EmptyTensorList", "TensorListReserve")


def of_list(
    tensor: tf.Tensor,
    inputs: Sequence[tf.Tensor],
    kinds: Sequence[Dependence],
    empty: bool,
) -> Dependence:
    """Tells how what an operation returns depends on the examples.

    Args:
        tensor: What it returns.
        inputs: What it takes.
        kinds: How each input depends on them: one does, none is COUPLED or UNKNOWN.
        empty: Whether the first input is a list of which no tensor is set.
    """
    type_, first, others = tensor.op.type, kinds[0], {*kinds[1:]}
    if type_ in _PUT:
        put = kinds[_PUT[type_]]
        known = put in _OF_TENSORS and [*kinds[1:]].count(NONE) == _PUT[type_] - 1
        return put if known and (empty or put is first) else UNKNOWN
    if first not in _OF_TENSORS:
        return UNKNOWN
    if type_ == "AddN":
        return first if {*kinds} == {first} and first not in _SIZES else UNKNOWN
    if type_ in _TAKE and first is ROWS:
        # What is not set is zeros, of a shape that is given.
        others -= {SHAPE}
    if not others <= {NONE}:
        return UNKNOWN
    if type_ in ("TensorListElementShape", "TensorListLength"):
        return NONE
    if first in _SIZES and type_ in ("TensorListGetItem", "ZerosLike"):
        # Zeros, as of what is not set, are no sizes.
        return UNKNOWN
    if type_ in _TAKE or type_ in _SAME:
        return first
    if type_ in _MAKE:
        return _moved(first, axis_of(inputs[0], first), -1, inputs[0].shape.rank)
    if type_ in _STACK:
        rank = tensor.shape.rank
        axes = {ROWS: 0, COLUMNS: 1, LAST: None if rank is None else rank - 2}
        return _moved(first, axes.get(first), 1, rank and rank - 1)
    return UNKNOWN


def _moved(kind, axis, by, rank):
    """Returns what tensors become that get an axis in front, or lose the first one."""
    if kind in (MEAN, SUM):
        return kind
    if axis is None or axis + by < 0:
        return UNKNOWN
    return with_examples_at(axis + by, None if rank is None else rank + by)
