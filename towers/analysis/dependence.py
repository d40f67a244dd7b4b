"""Tells how a traced value depends on the examples of the batch.

A mean over examples is the weighted mean of the local batches' means. A sum is the sum
of their sums. A value that no example touches is the same on every tower. Anything else
(a maximum, a variance, a ratio of sums) cannot be put together from local batches. To
tell which it is, the graph is read from the value back to the batch. Only what is
proved counts: an operation that is not listed here makes a value unknown, never wrong.

Keras's own layers are known to treat every example by itself (`trust.py`), but for
BatchNormalization, which differs by design. What cannot be read in another layer is
taken to do so, too, and listed: numbers have to show it then (`compare.py`). Losses
that layers add, and state that they assign, are read operation by operation.

A ratio of sums, such as a mean over what a mask leaves, can be put together if one of
the sums is that of the whole batch. The compiled loss may ask for such totals, if they
depend on the data alone: towers add them up before they compute (`loss_graph.py`).
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.analysis import effects
from towers.analysis.axes.blocks import RowBlocks
from towers.analysis.axes.counts import RowCounts
from towers.analysis.axes.own import Decided, OwnRows
from towers.analysis.axes.sizes import DRAWS, STATELESS_DRAWS
from towers.analysis.kinds import (
    COUPLED,
    MEAN,
    NONE,
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
from towers.analysis.layer_calls import LayerCall, key, parts
from towers.analysis.operations import of_layer, of_operation, of_target
from towers.keras_adapter.graphs import function_graph

# How totals of local batches make that of the whole batch, by the type of operation.
EXTREMES = {
    "All": tf.reduce_all,
    "Any": tf.reduce_any,
    "Max": tf.reduce_max,
    "Min": tf.reduce_min,
}


# Operations that call functions, by the attributes that name these.
_CALLS = {
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
}


class Culprit(NamedTuple):
    """What makes a tensor coupled or unknown.

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
        seeds: Iterable[tf.Tensor] = (),
        meets: Callable[[tf.Operation], bool] | None = None,
        decided: Decided | None = None,
    ):
        """Takes a local batch, and what `recorded_layers` remembered.

        Its tensors have one row an example; the graph must not know how many. `known`
        has what else is known, by the key of the tensor. `seeds` are those of random
        numbers that each tower has its own of. `meets` tells of an operation whether
        it may take totals of the whole batch, whatever they depend on; then random
        numbers are those of the whole batch, too, and no layer of the user's is taken
        to keep rows apart. With `decided`, what lets examples meet is a tower's own.
        """
        self._seeds = {key(seed) for _, seed in parts([*seeds])}
        self._calls = calls
        self._culprits = {}
        self._unread = []
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

    @contextlib.contextmanager
    def with_totals(self) -> Iterator[dict[Edge, Total]]:
        """Inside, what is read may ask for totals of the whole batch.

        Yields:
            Those that were asked for, by who takes them.
        """
        self._totals = {}
        try:
            yield self._totals
        finally:
            self._totals = None

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

    def rows_of(self, tensor: tf.Tensor) -> int | None:
        """Returns how many rows of a tensor each example has, `None` if unknown."""
        return self.counts.of(tensor) if self.of(tensor) is ROWS else None

    def is_seeded(self, tensor: tf.Tensor) -> bool:
        """Tells whether a tensor is made of a seed that each tower has its own of."""
        return _is_made_of(tensor, self._seeds)

    def why(self, tensor: tf.Tensor) -> Culprit:
        """Returns what made `tensor` coupled or unknown, or else what made it."""
        return self._culprits.get(key(tensor), Culprit(tensor.op))

    @property
    def unread(self) -> list[Culprit]:
        """What could not be read in layers that are taken to keep rows apart."""
        return self._unread

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
            found = self._of(call.inputs, of_layer, tensor, call.packed)
            kinds = [self._known[key(t)] for t in call.inputs]
            self.counts.keep(tensor, found, call.inputs, kinds, by_layer=True)
            self._blame(tensor, call)
            return found
        seen = self._of(tensor.op.inputs, self._of_operation, tensor)
        self._blame(tensor, call)
        if seen is not UNKNOWN or self._meets is not None:
            return seen
        # That an operation cannot be read says nothing against the layer.
        culprit = self._culprits.pop(key(tensor))
        taken = self._of(call.inputs, of_layer, tensor, call.packed)
        if taken is ROWS and culprit not in self._unread:
            self._unread.append(culprit)
        self._blame(tensor, call)
        return taken

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
        found = self._of_examples(inputs, kinds, rule, tensor, *extra)
        if self.own is None:
            return found
        return self.own.read(tensor, list(inputs), kinds, found)

    def _of_examples(self, inputs, kinds, rule, tensor, *extra):
        if any(map(self._is_for_all_rows, inputs)):
            self._culprits[key(tensor)] = Culprit(tensor.op)
            return UNKNOWN
        kinds = [*kinds]
        whole = self._meets is not None and kinds[1:] and kinds[1] in (COUPLED, UNKNOWN)
        if tensor.op.type == "Reshape" and rule == self._of_operation and not whole:
            kinds[1] = of_target(tensor, kinds[1])
        for kind in (COUPLED, UNKNOWN):
            if kind in kinds:
                self._culprits[key(tensor)] = self.why(inputs[kinds.index(kind)])
                return kind
        found = rule(tensor, list(inputs), kinds, *extra)
        if self.blocks is not None:
            by_layer = rule is of_layer
            found = self.blocks.read(tensor, list(inputs), kinds, found, by_layer)
        if found in (COUPLED, UNKNOWN) and self._totals is not None:
            found = self._by_totals(tensor, list(inputs), kinds) or found
        if found in (COUPLED, UNKNOWN):
            self._culprits[key(tensor)] = Culprit(tensor.op)
        return found

    def _of_operation(self, tensor, inputs, kinds):
        attributes = _CALLS.get(tensor.op.type)
        if attributes is None:
            found = of_operation(tensor, inputs, kinds)
            draws = tensor.op.type in STATELESS_DRAWS and self._meets is None
            if draws and not self.is_seeded(inputs[1]):
                # By the same seed, each tower would draw the first rows of one device.
                found = UNKNOWN
            if self._is_of_unknown_count(tensor.op):
                # Whoever draws for all towers could not cut them.
                found = UNKNOWN
            elif found is UNKNOWN:
                found = self.counts.read(tensor, inputs, kinds)
            self.counts.keep(tensor, found, inputs, kinds)
            return found
        if self._meets is not None and any(effects.of([tensor.op])):
            # It runs once, for all rows.
            return UNKNOWN
        if len(attributes) > 1:
            # What decides between branches must not depend on examples.
            if kinds[0] is not NONE:
                return UNKNOWN
            inputs, kinds = inputs[1:], kinds[1:]
        called = [
            self._of_function(tensor.op, name, inputs, kinds) for name in attributes
        ]
        found = [{*each} for each in zip(*called, strict=True)]
        if self._meets is not None:
            # It runs in one place, so where it returns one such thing, all are.
            odd = any(len(each) > 1 or each & {COUPLED, UNKNOWN} for each in found)
            return UNKNOWN if odd else found[tensor.value_index].pop()
        mine = found[tensor.value_index]
        return mine.pop() if len(mine) == 1 else UNKNOWN

    def _is_of_unknown_count(self, op):
        """Tells whether it draws for a whole batch a number that is not known."""
        whole = self._meets is not None and op.type in DRAWS
        return whole and self.counts.of(op.inputs[0]) is None

    def _of_function(self, op, attribute, inputs, kinds):
        """What a function that an operation calls returns."""
        name = op.get_attr(attribute).name
        graph = function_graph(name, [each.shape for each in inputs])
        known = zip(map(key, graph.inputs), kinds, strict=True)
        pairs = zip(graph.inputs, inputs, strict=True)
        seeds = [inner for inner, outer in pairs if self.is_seeded(outer)]
        reader = Reader((), {}, dict(known), seeds)
        return [*map(reader.of, graph.outputs)]

    def _by_totals(self, tensor, inputs, kinds):
        """What an operation returns if it takes totals of the whole batch.

        Returns `None` if that does not help.
        """
        op = tensor.op
        if self._meets is not None and not self._meets(op):
            return None
        if self.own is not None and not self.own.may_take_totals(tensor, inputs, kinds):
            return None
        if op.type in EXTREMES and kinds[0] is ROWS and self._may_be_total(tensor):
            total = Total(tensor, COUPLED)
            self.extremes[key(tensor)] = total
            for consumer in tensor.consumers():
                for index, taken in enumerate(consumer.inputs):
                    if taken is tensor:
                        self._totals[Edge(consumer.name, index)] = total
            self._of_totals.add(key(tensor))
            return NONE
        totals = [
            index
            for index, (each, kind) in enumerate(zip(inputs, kinds, strict=True))
            if kind in (SUM, SIZE, MEAN) and self._may_be_total(each)
        ]
        # As few as possible, and rather a divisor than what is divided.
        ways = [
            taken
            for count in range(1, len(totals) + 1)
            for taken in itertools.combinations(totals[::-1], count)
        ]
        if self._meets is not None:
            # Those that variables decide as well may all be needed.
            of_data = [i for i in totals if self.is_of_data(inputs[i])]
            ways = [taken for taken in ways if {*taken} <= {*of_data}]
            ways += [totals] if len(of_data) < len(totals) else []
        for taken in ways:
            assumed = [
                NONE if index in taken else kind for index, kind in enumerate(kinds)
            ]
            found = NONE
            if any(kind is not NONE for kind in assumed):
                found = self._of_operation(tensor, inputs, assumed)
            if found not in (COUPLED, UNKNOWN):
                self._totals |= {
                    Edge(op.name, i): Total(inputs[i], kinds[i]) for i in taken
                }
                if found is NONE:
                    self._of_totals.add(key(tensor))
                return found
        return None

    def _is_for_all_rows(self, tensor):
        """Tells whether it may be a shape of all rows, or have as many."""
        whole = tensor.dtype.is_integer or not tensor.shape.is_fully_defined()
        return whole and key(tensor) in self._of_totals

    def _may_be_total(self, tensor):
        return self._meets is not None or self.is_of_data(tensor)


def _is_made_of(tensor, keys):
    """Tells whether something that has one of the keys is behind a tensor."""
    waiting, seen = [tensor], set()
    while waiting:
        current = waiting.pop()
        if key(current) in keys:
            return True
        if key(current) not in seen:
            seen.add(key(current))
            waiting.extend(current.op.inputs)
    return False
