"""Determines how the tensors of a traced step depend on the examples of the batch.

A mean over examples is the weighted mean of the local batches' means. A sum is the sum
of the local sums. A value that depends on no example is the same on every tower. No
other value (a maximum, a variance, a ratio of sums) can be computed from the values of
local batches. To classify a tensor, `Reader` reads the graph from the tensor back to
the batch. Only proofs count: an operation without a rule makes a tensor UNKNOWN, never
wrongly classified.

Keras's own layers are known to treat each example by itself (`layer_calls.py`), except
for BatchNormalization, which differs by design. All other layers are read operation by
operation.

A ratio of sums, such as a masked mean, can be computed from local batches if one of the
sums is a total of the whole batch: the towers all-reduce that total before they go on.
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

# Reductions of the towers' totals to that of the whole batch, by type of operation.
EXTREMES = {
    "All": tf.reduce_all,
    "Any": tf.reduce_any,
    "Max": tf.reduce_max,
    "Min": tf.reduce_min,
}


# Operations that call functions, and the attributes that name the functions. The body
# of a loop comes first, then its condition.
_CALLS = {
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
    **dict.fromkeys(("While", "StatelessWhile"), ("body", "cond")),
}
_BRANCHES = ("then_branch", "else_branch")
_LOOP = ("body", "cond")
_COUNTED = {COLUMNS, LAST, ROWS, SHAPE, SIZE, TURNED}
# Kinds that the tensors of a list may have, beside NONE.
_OF_TENSORS = {COLUMNS, LAST, MEAN, ROWS, SHAPE, SIZE, SUM, TURNED}
_SIZES = {SHAPE, SIZE, TURNED}
# The index of the input that the operation writes to the list, by type of operation.
_PUT = {"TensorListPushBack": 1, "TensorListSetItem": 2}
_MAKE = {"TensorListFromTensor", "TensorListScatterV2"}
_SAME = {"Identity", "TensorListResize", "ZerosLike"}
_STACK = {"TensorListGather", "TensorListStack"}
_TAKE = {"TensorListGetItem", "TensorListPopBack"}


class Culprit(NamedTuple):
    """The operation that makes a tensor coupled or unknown.

    Attributes:
        operation: The operation.
        layer: The innermost layer that contains the operation, if any.
    """

    operation: tf.Operation
    layer: keras.layers.Layer | None = None

    def __str__(self) -> str:
        """Returns the layer and the operation as a noun phrase."""
        operation = f"'{self.operation.name}' ({self.operation.type})"
        if self.layer is None:
            return f"operation {operation}"
        name, kind = self.layer.name, type(self.layer).__name__
        category = "model" if isinstance(self.layer, keras.Model) else "layer"
        return f"{category} '{name}' ({kind}), operation {operation}"


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
                not know the number of rows.
            calls: The layer calls that `recorded_layers` recorded.
            known: How other tensors depend on the examples, by their keys.
            meets: Returns whether an operation may take totals of the whole batch;
                random numbers then are drawn for the whole batch, too. `None` within a
                function that an operation calls.
            decided: Decisions about tensors that are each tower's own where examples
                mix; `None` if there are no such tensors.
            at_home: The names of operations whose results count as UNKNOWN.
        """
        self._calls, self._at_home = calls, at_home
        # States of the outputs of functions, by calling operation and kinds of its
        # inputs.
        self._returned: dict[Any, Sequence[ValueState]] = {}
        # Lists without elements, among the inputs of a function.
        self._empty: set[Any] = set()
        self._culprits = {}
        # Totals of the whole batch that operations take; `None` within a function.
        self._totals: dict[Edge, Total] | None = None if meets is None else {}
        # Tensors that depend on the examples by totals of the whole batch alone.
        self._of_totals: set[Any] = set()
        self._meets = meets
        # Largest and smallest values over the rows; every consumer takes the batch's.
        self.extremes: dict[Any, Total] = {}
        self._of_data = {key(part) for _, part in parts(local_batch)}
        self.counts = RowCounts(
            part for packed, part in parts(local_batch) if not packed
        )
        # Rows in several blocks are supported where towers compute parts of one step.
        self.blocks = None if meets is None else RowBlocks(self.counts)
        self.own: OwnRows | None = None
        if decided is not None:
            self.own = OwnRows(decided, self.counts, self.blocks, meets)
        self._known = {
            key(part): PACKED if packed else NONE if part.shape.rank == 0 else ROWS
            for packed, part in parts(local_batch)
        } | {**(known or {})}
        # The first integer of a sparse tensor's dense shape is the number of examples.
        for leaf in tf.nest.flatten(local_batch):
            if isinstance(leaf, tf.SparseTensor):
                self._known[key(leaf.dense_shape)] = SHAPE

    def of(self, tensor: tf.Tensor) -> Dependence:
        """Returns how `tensor` depends on the examples."""
        # Iterative: a network is deeper than Python's stack.
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
        """Adds known dependences of tensors, by their keys."""
        self._known |= kinds

    @property
    def totals(self) -> dict[Edge, Total]:
        """The totals of the whole batch, by the operation inputs that take these."""
        return {} if self._totals is None else self._totals

    def is_of_data(self, tensor: tf.Tensor) -> bool:
        """Checks whether a tensor depends on the local batch alone, not on a variable.

        Every shape counts as one of the local batch.
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
            # A stateful operation without inputs may read a variable.
            if not op.inputs and op.type != "Const":
                return False
            waiting.extend(op.inputs)
        self._of_data = seen
        return True

    def why(self, tensor: tf.Tensor) -> Culprit:
        """Returns the operation that made a tensor COUPLED or UNKNOWN, or its own."""
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
        """Attributes a COUPLED or UNKNOWN tensor to the layer where it became so."""
        culprit = self._culprits.get(key(tensor))
        if culprit is None or culprit.layer is not None:
            return
        for layer_call in call, *call.around:
            if not {self._known.get(key(t)) for t in layer_call.inputs} & {
                COUPLED,
                UNKNOWN,
            }:
                self._culprits[key(tensor)] = culprit._replace(layer=layer_call.layer)
                return

    def _of(self, inputs, rule, tensor, *extra):
        kinds = [self._known[key(t)] for t in inputs]
        if all(kind is NONE for kind in kinds):
            if any(key(t) in self._of_totals for t in inputs):
                self._of_totals.add(key(tensor))
            return NONE
        dependence = self._of_examples(inputs, kinds, rule, tensor, *extra)
        if self.own is None:
            return dependence
        return self.own.read(tensor, list(inputs), kinds, dependence)

    def _of_examples(self, inputs, kinds, rule, tensor, *extra):
        if any(map(self._is_for_all_rows, inputs)):
            self._culprits[key(tensor)] = Culprit(tensor.op)
            return UNKNOWN
        kinds = [*kinds]
        keep_target = (
            self._meets is not None and kinds[1:] and kinds[1] in (COUPLED, UNKNOWN)
        )
        if (
            tensor.op.type == "Reshape"
            and rule == self._of_operation
            and not keep_target
        ):
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
            # Within a function, each tower would draw the first rows of one device's
            # draw.
            kind = UNKNOWN
        if self._is_of_unknown_count(op):
            # A draw for the whole batch could not be split between towers.
            kind = UNKNOWN
        elif kind is UNKNOWN:
            kind = self.counts.read(tensor, inputs, kinds)
        self.counts.keep(tensor, kind, inputs, kinds)
        return kind

    def _of_call(self, tensor, inputs, kinds):
        """Returns the dependence of an output of an operation that calls functions."""
        op = tensor.op
        names = [op.get_attr(attribute).name for attribute in _CALLS[op.type]]
        # The names are part of the key: a gradient makes a loop keep more values.
        cache_key = op.name, *names, tuple(kinds)
        if cache_key not in self._returned:
            input_states = [*map(self._state_of, inputs, kinds)]
            self._returned[cache_key] = self._of_functions(
                op, names, inputs, input_states
            )
        state = self._returned[cache_key][tensor.value_index]
        self._take(tensor, state)
        return state.kind

    def _of_functions(self, op, names, inputs, given):
        """Returns the states of the outputs of an operation that calls functions."""
        all_lost = [LOST for _ in op.outputs]
        if self._meets is not None and any(effects.of([op])):
            # A function with side effects runs once, for all rows.
            return all_lost
        if _CALLS[op.type] == _LOOP:
            states = self._of_loop(op, names, inputs, given)
        else:
            if _CALLS[op.type] == _BRANCHES:
                # The condition of a branch must not depend on the examples.
                if given[0].kind is not NONE:
                    return all_lost
                inputs, given = inputs[1:], given[1:]
            shapes = [tensor.shape for tensor in inputs]
            graphs = [function_graph(name, inputs, shapes) for name in names]
            states = functools.reduce(
                merged, [self._of_function(graph, given) for graph in graphs]
            )
        if self._meets is None:
            return states
        states = [LOST if state.is_countless else state for state in states]
        # The operation runs either on towers or at home: one COUPLED or UNKNOWN output
        # makes all outputs UNKNOWN. Lists are exempt: some only serve a gradient, and
        # home may ask for these later.
        lost = any(
            state.kind in (COUPLED, UNKNOWN) and output.dtype != tf.variant
            for state, output in zip(states, op.outputs, strict=True)
        )
        return all_lost if lost else states

    def _of_loop(self, op, names, inputs, given):
        """Returns states of the outputs of a loop that hold after every iteration."""
        # An iteration may change the shape of a value.
        shapes = [
            before.shape.most_specific_compatible_shape(after.shape)
            for before, after in zip(inputs, op.outputs, strict=True)
        ]
        body, condition = (function_graph(name, inputs, shapes) for name in names)
        before, states = None, given
        while states != before:
            before = states
            states = after_a_turn(before, self._of_function(body, before))
        (goes_on,) = self._of_function(condition, states)
        # The number of iterations must not depend on the examples.
        return states if goes_on.kind is NONE else [LOST for _ in states]

    def _of_function(self, graph, given):
        """Returns the states of the outputs of a function."""
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
        """Returns the state of a tensor of the given kind."""
        return ValueState(
            kind,
            self.counts.of(tensor),
            None if self.blocks is None else self.blocks.of(tensor),
            empty=self._is_empty(tensor),
            zero=kind is NONE and is_zero(tensor),
            of_totals=key(tensor) in self._of_totals,
        )

    def _take(self, tensor, state):
        """Stores the state of a tensor, except for its kind."""
        if state.count is not None:
            self.counts.set(tensor, state.count)
        if state.blocks is not None and self.blocks is not None:
            self.blocks.set(tensor, state.blocks)
        if state.empty:
            self._empty.add(key(tensor))
        if state.of_totals:
            self._of_totals.add(key(tensor))

    def _is_empty(self, tensor):
        """Checks whether a tensor is a list without elements."""
        return key(tensor) in self._empty or (
            is_new(tensor.op) and self._known[key(tensor)] is NONE
        )

    def _is_of_unknown_count(self, op):
        """Checks whether an operation draws for a batch with an unknown row count."""
        draws = self._meets is not None and op.type in DRAWS
        return draws and self.counts.of(op.inputs[0]) is None

    def _by_totals(self, tensor, inputs, kinds):
        """Returns the dependence of a result if inputs are totals of the whole batch.

        Returns `None` if no choice of such inputs helps.
        """
        op = tensor.op
        if _CALLS.get(op.type) == _LOOP:
            # The values kept for the gradient of the loop would depend on totals, too.
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
        # Prefer few totals, and a divisor to a dividend.
        ways = [
            taken
            for count in range(1, len(totals) + 1)
            for taken in itertools.combinations(totals[::-1], count)
        ]
        # Totals that depend on variables as well may all be needed.
        of_data = [i for i in totals if self.is_of_data(inputs[i])]
        ways = [taken for taken in ways if {*taken} <= {*of_data}]
        ways += [totals] if len(of_data) < len(totals) else []
        first = next((t for t in op.outputs if t.dtype != tf.variant), tensor)
        if tensor.dtype == tf.variant and first is not tensor:
            # All results of an operation use the same totals. A list, which may serve
            # a gradient alone, uses those of the first other result.
            self.of(first)
            ways = [[i for i in totals if Edge(op.name, i) in self._totals]]
        for taken in ways:
            assumed = [
                NONE if index in taken else kind for index, kind in enumerate(kinds)
            ]
            result = NONE
            if any(kind is not NONE for kind in assumed):
                result = self._of_operation(tensor, inputs, assumed)
            if result not in (COUPLED, UNKNOWN):
                self._totals |= {
                    Edge(op.name, i): Total(inputs[i], kinds[i]) for i in taken
                }
                if result is NONE:
                    self._of_totals.add(key(tensor))
                return result
        return None

    def _is_for_all_rows(self, tensor):
        """Checks whether a tensor may be a shape of all rows, or may have all rows."""
        fixed_shape = tensor.shape.is_fully_defined() and tensor.dtype != tf.variant
        may_have_rows = tensor.dtype.is_integer or not fixed_shape
        return may_have_rows and key(tensor) in self._of_totals


# States of values that enter and leave functions.
#
# A loop is read until the states reach a fixed point: the states of its values enter
# the body, and the resulting states are merged with the former. The fixed point holds
# for any number of iterations. The condition of the loop must depend on no example.


class ValueState(NamedTuple):
    """Everything known about a value.

    Attributes:
        kind: How the value depends on the examples.
        count: Its row count, as in `RowCounts`.
        blocks: Its row blocks, as in `RowBlocks`.
        empty: Whether the value is a list without elements.
        zero: Whether the value is zeros.
        of_totals: Whether the value depends on the examples by totals alone.
    """

    kind: Dependence
    count: int | None = None
    blocks: Blocks | None = None
    empty: bool = False
    zero: bool = False
    of_totals: bool = False

    @property
    def is_countless(self) -> bool:
        """Whether the value has rows, but an unknown number for each example."""
        return self.kind in _COUNTED and self.count is None


LOST = ValueState(UNKNOWN)


def merged(
    first: Sequence[ValueState], second: Sequence[ValueState]
) -> list[ValueState]:
    """Returns states that hold for either of two lists of values, as from branches."""
    return [_either(*pair) for pair in zip(first, second, strict=True)]


def after_a_turn(
    before: Sequence[ValueState], after: Sequence[ValueState]
) -> list[ValueState]:
    """Returns candidate states of a loop's values after one more iteration.

    The states are proved once an iteration leaves them unchanged.

    Args:
        before: States before the iteration.
        after: States after the iteration, given `before`.
    """
    states = merged(before, after)
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        # The addition of a sum to zeros is a SUM only if the zeros count as one, too.
        if old.zero and new.kind is COUPLED:
            states[i] = ValueState(SUM)
    return states


def _either(first, second):
    of_totals = first.of_totals or second.of_totals
    return _known_of_both(first, second)._replace(of_totals=of_totals)


def _known_of_both(first, second):
    # An empty list has no element of another kind.
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


# Rules for lists of tensors, which loops write and read.
#
# A list depends on the examples as each of its elements does. The length of a list and
# its element shape must be the same on every tower: a rule for creating or extending a
# list holds only if nothing but the elements depends on the examples.


def is_of_lists(op: tf.Operation) -> bool:
    """Checks whether an operation takes or returns lists of tensors."""
    return any(t.dtype == tf.variant for t in (*op.inputs, *op.outputs))


def is_new(op: tf.Operation) -> bool:
    """Checks whether an operation creates a list without elements."""
    return op.type in ("EmptyTensorList", "TensorListReserve")


def of_list(
    tensor: tf.Tensor,
    inputs: Sequence[tf.Tensor],
    kinds: Sequence[Dependence],
    empty: bool,
) -> Dependence:
    """Determines how a result of an operation on lists depends on the examples.

    Args:
        tensor: The result.
        inputs: The inputs of the operation.
        kinds: How the inputs depend on the examples: at least one does, and none is
            COUPLED or UNKNOWN.
        empty: Whether the first input is a list without elements.
    """
    type_, first, others = tensor.op.type, kinds[0], {*kinds[1:]}
    if type_ in _PUT:
        written = kinds[_PUT[type_]]
        known = written in _OF_TENSORS and [*kinds[1:]].count(NONE) == _PUT[type_] - 1
        return written if known and (empty or written is first) else UNKNOWN
    if first not in _OF_TENSORS:
        return UNKNOWN
    if type_ == "AddN":
        return first if {*kinds} == {first} and first not in _SIZES else UNKNOWN
    if type_ in _TAKE and first is ROWS:
        # Elements that were not written are zeros of the given shape.
        others -= {SHAPE}
    if not others <= {NONE}:
        return UNKNOWN
    if type_ in ("TensorListElementShape", "TensorListLength"):
        return NONE
    if first in _SIZES and type_ in ("TensorListGetItem", "ZerosLike"):
        # The zeros of elements that were not written are no sizes.
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
    """Returns the kind of tensors that gain or lose a leading axis."""
    if kind in (MEAN, SUM):
        return kind
    if axis is None or axis + by < 0:
        return UNKNOWN
    return with_examples_at(axis + by, None if rank is None else rank + by)
