"""Makes functions of a traced function's operations: of those that run in one go."""

import collections
import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.analysis.layer_calls import key
from towers.keras_adapter.graphs import GraphDef, add_call, add_copy, keep_functions
from towers.partition.placement import draws
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
        before = [f"^{each}" for each in _before(op, self._members)]
        if self._place.on_towers and op.type in draws.SKIPPABLE:
            self.draws = True
            inputs = [*inputs, f"{_ROWS}:0", *before]
            add_call(self.graph, op, draws.function_of(op), inputs)
        else:
            add_copy(self.graph, op, inputs + before).device = ""

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


class Phase:
    """Operations that run in one go, at home or on each tower.

    Attributes:
        place: Where and when they run.
        takes: What it is called with.
        makes: The tensors that it returns.
        draws: Whether it takes, behind all else, the number of the first example, and
            how many there are.
    """

    def __init__(
        self,
        placement: Placement,
        place: Place,
        operations: Sequence[tf.Operation],
        wanted: set[Any],
    ):
        """Traces a function of some operations.

        Args:
            placement: Where the operations of the traced function run.
            place: Where these do.
            operations: In an order in which they may run.
            wanted: The keys of what others need of them.
        """
        self._part = part = _Part(placement, place, operations)
        self.place, self.takes, self.draws = place, part.takes, part.draws
        self.makes = [
            tensor
            for op in operations
            for tensor in op.outputs
            if key(tensor) in wanted
        ]

        self._specs = [
            tf.TensorSpec(taken.tensor.shape, taken.tensor.dtype)
            for taken in self.takes
        ]
        self._specs += [tf.TensorSpec([2], tf.int64)] if self.draws else []
        self._captured = part.captured
        self._function = self._trace()

    def of_copy(self, handles: Mapping[int, tf.Tensor]) -> "Phase":
        """Returns the phase for a copy of some variables.

        Args:
            handles: By the `id` of the handle of a variable, that of its copy.
        """
        captured = {
            feed: handles.get(id(each), each) for feed, each in self._captured.items()
        }
        if all(each is self._captured[feed] for feed, each in captured.items()):
            return self
        same = copy.copy(self)
        same.__dict__.pop("_guarded", None)
        same._captured = captured
        same._function = same._trace()
        return same

    def _trace(self):
        part, captured = self._part, self._captured

        def function(*values):
            graph = tf.compat.v1.get_default_graph()
            fed = dict(zip(part.feeds, values, strict=True))
            fed |= {feed: graph.capture(each) for feed, each in captured.items()}
            names = [tensor.name for tensor in self.makes]
            found = tf.graph_util.import_graph_def(part.graph, fed, names, name="")
            for tensor, like in zip(found, self.makes, strict=True):
                tensor.set_shape(like.shape)
            return found

        return _traced(function, *self._specs)

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

        return _traced(guarded, tf.TensorSpec([], tf.int32), *self._specs)


def phases(trace: Trace, placement: Placement) -> list[Phase]:
    """Returns the phases of a traced function, in the order in which they run."""
    groups, wanted = collections.defaultdict(list), set()
    for op in placement.order:
        if (place := placement.places.get(op.name)) is not None:
            groups[place].append(op)
    for op in placement.order:
        mine = placement.places.get(op.name)
        for i, tensor in enumerate(op.inputs):
            theirs = placement.places.get(tensor.op.name)
            if theirs != mine or placement.takes_total(op, i):
                wanted.add(key(tensor))
    for tensor in trace.returned:
        wanted.add(key(tensor))
    return [Phase(placement, place, groups[place], wanted) for place in sorted(groups)]


def _before(op, members):
    """The operations among `members` that an operation has to wait for."""
    waiting, seen = [*op.control_inputs], set()
    while waiting:
        before = waiting.pop()
        if before.name in seen:
            continue
        seen.add(before.name)
        if before.name in members:
            yield before.name
        elif before.type == "NoOp":
            waiting += before.control_inputs


def _traced(function, *specs):
    with tf.device(None):
        return tf.function(function, autograph=False).get_concrete_function(*specs)
