"""Makes functions of a traced function's operations: of those that run in one go."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.analysis.layer_calls import key
from towers.keras_adapter.graphs import (
    GraphDef,
    add_call,
    add_copy,
    before,
    keep_functions,
    traced,
)
from towers.partition.placement import draws
from towers.partition.placement.late import Group, as_placed
from towers.partition.placement.placement import Place, Placement
from towers.partition.trace import Trace
from towers.tower.traced import nothing_like

_FEED = "towers_feed_"
_ROWS = "towers_rows"


class Taken(NamedTuple):
    """What a phase is called with.

    Attributes:
        tensor: A tensor of the traced function.
        whole: Whether it is the whole batch's, where towers have parts.
    """

    tensor: tf.Tensor
    whole: bool


class _Part:
    """The operations of a phase, as a graph of their own.

    Attributes:
        graph: The graph.
        takes: What it is fed with.
        feeds: The names of that.
        captured: What it takes from outside of the function, by the names of that.
        draws: Whether it draws a tower's rows of random numbers.
    """

    def __init__(self, placement, place, operations):
        self.graph, self.draws = GraphDef(), False
        self.takes: list[Taken] = []
        self.feeds: list[str] = []
        self.captured: dict[str, tf.Tensor] = {}
        self._placement, self._place = placement, place
        self._members = {op.name for op in operations}
        self._names, self._constants = {}, {}
        for op in operations:
            self._add(op)
        for op in self._constants.values():
            add_copy(self.graph, op, ()).device = ""
        keep_functions(self.graph, operations[0].graph)
        if self.draws:
            self.feeds.append(f"{_ROWS}:0")

    def _add(self, op):
        inputs = [self._name(op, i) for i in range(len(op.inputs))]
        waits = [f"^{each}" for each in before(op, self._members)]
        if self._place.on_towers and op.type in draws.SKIPPABLE:
            self.draws = True
            inputs = [*inputs, f"{_ROWS}:0", *waits]
            add_call(self.graph, op, draws.function_of(op), inputs)
        else:
            add_copy(self.graph, op, inputs + waits).device = ""

    def _name(self, op, i):
        """The name of an input of an operation, as the phase has it."""
        tensor, placement = op.inputs[i], self._placement
        whole = self._place.on_towers and placement.takes_total(op, i)
        if tensor.op.name in self._members and not whole:
            return tensor.name
        if tensor.op.type == "Const":
            self._constants[tensor.op.name] = tensor.op
            return tensor.name
        named = key(tensor), whole
        if named not in self._names:
            self._names[named] = feed = f"{_FEED}{len(self._names)}:0"
            if placement.is_captured(tensor):
                self.captured[feed] = placement.outside(tensor)
            else:
                self.takes.append(Taken(tensor, whole))
                self.feeds.append(feed)
        return self._names[named]


@dataclasses.dataclass
class Phase:
    """Operations that run in one go, at home or on each tower.

    Attributes:
        place: Where and when they run.
        part: The operations.
        makes: The tensors that it returns.
        captured: What it takes from outside of the function, by the names of that.
        operations: The names of its operations.
    """

    place: Place
    part: _Part
    makes: list[tf.Tensor]
    captured: dict[str, tf.Tensor]
    operations: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        placement: Placement,
        place: Place,
        operations: Sequence[tf.Operation],
        wanted: set[Any],
        exported: set[str],
    ) -> "Phase":
        """Makes a phase of some operations.

        Args:
            placement: Where the operations of the traced function run.
            place: Where these do.
            operations: In an order in which they may run.
            wanted: The keys of what is needed of all operations.
            exported: The names of those from which others take it here.
        """
        part = _Part(placement, place, operations)
        makes = [
            tensor
            for op in operations
            for tensor in op.outputs
            if op.name in exported and key(tensor) in wanted
        ]
        names = [op.name for op in operations]
        return cls(place, part, makes, part.captured, names)

    def __post_init__(self):
        """Traces a function of the operations."""
        self._function = traced(self._run, *self._specs)

    @property
    def takes(self) -> list[Taken]:
        """What it is called with."""
        return self.part.takes

    @property
    def draws(self) -> bool:
        """Whether it takes, behind all else, the first example's number, and a count.

        The count is that of the examples.
        """
        return self.part.draws

    def of_copy(self, handles: Mapping[int, tf.Tensor]) -> "Phase":
        """Returns the phase for a copy of some variables.

        Args:
            handles: By the `id` of the handle of a variable, that of its copy.
        """
        captured = {
            feed: handles.get(id(each), each) for feed, each in self.captured.items()
        }
        if all(each is self.captured[feed] for feed, each in captured.items()):
            return self
        return dataclasses.replace(self, captured=captured)

    @property
    def _specs(self):
        specs = [
            tf.TensorSpec(taken.tensor.shape, taken.tensor.dtype)
            for taken in self.takes
        ]
        return [*specs, *([tf.TensorSpec([2], tf.int64)] if self.draws else [])]

    def _run(self, *values):
        graph = tf.compat.v1.get_default_graph()
        fed = dict(zip(self.part.feeds, values, strict=True))
        fed |= {feed: graph.capture(each) for feed, each in self.captured.items()}
        names = [tensor.name for tensor in self.makes]
        found = tf.graph_util.import_graph_def(self.part.graph, fed, names, name="")
        for tensor, like in zip(found, self.makes, strict=True):
            tensor.set_shape(like.shape)
        return found

    def __call__(
        self, values: Sequence[tf.Tensor], size: tf.Tensor | None = None
    ) -> Sequence[tf.Tensor]:
        """Adds a call to the graph being built, on the device of the scope.

        Args:
            values: What it takes.
            size: Number of rows, if there may be none, for which nothing is computed.

        Returns:
            What it makes.
        """
        if size is None:
            return self._function(*values)
        return self._guarded(size, *values)

    @functools.cached_property
    def _guarded(self):
        def guarded(size, *values):
            def nothing():
                return [nothing_like(like, size) for like in self.makes]

            return tf.cond(size > 0, lambda: self._function(*values), nothing)

        return traced(guarded, tf.TensorSpec([], tf.int32), *self._specs)


def phases(
    trace: Trace, placement: Placement, groups: Sequence[Group] | None = None
) -> list[Phase]:
    """Returns the phases of a traced function, in the order in which they run.

    Args:
        trace: The function.
        placement: Where its operations run.
        groups: What runs in one go, by default as it is placed.
    """
    groups, wanted = as_placed(placement) if groups is None else groups, set()
    for group in groups:
        members = {op.name for op in group.operations}
        for op in group.operations:
            for i, tensor in enumerate(op.inputs):
                if tensor.op.name not in members or placement.takes_total(op, i):
                    wanted.add(key(tensor))
    for tensor in trace.returned:
        wanted.add(key(tensor))
    return [
        Phase.of(placement, place, operations, wanted, exported)
        for place, operations, exported in groups
    ]
