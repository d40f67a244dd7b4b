"""Cuts the graph that a tower computes into phases, each of one part at a time.

A part is a stage or a layer. A phase is a function. It takes results of earlier phases,
of this part or of others, and returns what later phases need. So the phases of several
micro-batches may run side by side, in any order that the data allow.

The graph is cut, not the model: skip connections, layers that are called twice, and
Python code of the user have no list of stages. A phase takes nothing from a later
level: an operation's level is one more than the level of another stage's operation that
it takes from. Gradients of weights form phases of their own, for when a stage is idle.
Recomputed operations are part of the backward phase, as TensorFlow merges equal
operations.
"""

import collections
import dataclasses
import functools
import graphlib
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from towers.analysis import effects
from towers.analysis.layer_calls import key
from towers.collectives.batch import nothing_like
from towers.keras_adapter.graphs import (
    GraphDef,
    add_copy,
    calls_functions,
    is_placed,
    keep_functions,
    traced,
)
from towers.keras_adapter.runtime import now
from towers.partition.trace import Labels
from towers.stages import work

Key = tuple[int, str]

_FEED = "towers_feed_"


@dataclasses.dataclass(frozen=True, order=True)
class StagePlace:
    """The place of an operation; operations of one place are computed together.

    Attributes:
        level: The order of phases: a phase takes nothing from a later level.
        part: The part of the model that the operation belongs to: a stage or a layer.
        backward: Whether the operation belongs to the gradient.
        deferred: Whether other parts never wait for the operation.
    """

    level: int
    part: int
    backward: bool = False
    deferred: bool = False


class StagePhase:
    """A function with the operations of one place.

    Attributes:
        place: The place of its operations.
        takes: Its inputs, by their keys.
        makes: Its results, by their keys.
        work: Its estimated time; see `work.py`.
        timed: Whether it returns the time at which it ended.
    """

    def __init__(
        self,
        place: StagePlace,
        takes: Mapping[Key, tf.Tensor],
        makes: Mapping[Key, tf.Tensor],
        function: Callable[..., Sequence[tf.Tensor]],
        work: float,
        timed: bool = False,
        inline: bool = False,
    ):
        """Traces the function, which computes `makes` from `takes`.

        `timed` makes the phase read the clock when it ends. Outside of the phase, the
        clock would be read late while all threads are busy with other phases. With
        `inline`, TensorFlow copies the function into the step's graph; otherwise, it
        begins when all inputs are there.
        """
        self.place, self.takes, self.makes = place, takes, makes
        self.work, self.timed = work, timed
        self._specs = [tf.TensorSpec(t.shape, t.dtype) for t in takes.values()]

        def with_time(*values):
            made = function(*values)
            with tf.control_dependencies(made):
                return [*made, now()]

        self._inline = inline
        self._function = self._traced(with_time if timed else function, *self._specs)

    def __call__(
        self, values: Sequence[tf.Tensor], size: tf.Tensor | None = None
    ) -> tuple[Sequence[tf.Tensor], tf.Tensor | None]:
        """Adds a call to the graph being built, on the current device.

        Args:
            values: The values of `takes`.
            size: The number of rows, if it may be 0; if it is, nothing is computed.

        Returns:
            The values of `makes`, and the end in seconds if the phase is `timed`.
        """
        result = self._function if size is None else self._guarded
        result = result(*values) if size is None else result(size, *values)
        return (result[:-1], result[-1]) if self.timed else (result, None)

    @functools.cached_property
    def _guarded(self):
        def guarded(size, *values):
            def nothing():
                made = [nothing_like(like, size) for like in self.makes.values()]
                return [*made, now()] if self.timed else made

            return tf.cond(size > 0, lambda: self._function(*values), nothing)

        return self._traced(guarded, tf.TensorSpec([], tf.int32), *self._specs)

    def _traced(self, function, *specs):
        options = {"experimental_attributes": {"_noinline": not self._inline}}
        with tf.device(None):
            function = tf.function(function, autograph=False, **options)
            return function.get_concrete_function(*specs)


def cut(
    graph: tf.Graph,
    outputs: Sequence[tf.Tensor],
    labels: Labels,
    given: Mapping[Key, int | None],
    captured: Mapping[Key, tf.Tensor],
    recompute: bool = False,
    deferring: bool = False,
    timed: bool = False,
) -> list[StagePhase]:
    """Cuts a graph into phases.

    Args:
        graph: The graph that a tower computes.
        outputs: The graph's results.
        labels: The layers that its operations were made for.
        given: The keys of the inputs, each with the part that holds the input, if any
            does.
        captured: The keys of the captured tensors, and the tensors outside.
        recompute: Whether a part recomputes its forward operations in the backward pass
            (Chen et al. 2016). It then keeps only its inputs.
        deferring: Whether operations that no other part waits for, such as gradients of
            weights, and metrics, get phases of their own. Recomputing phases include
            them.
        timed: Whether phases return the time at which they end.

    Returns:
        The phases, in an order in which they may run.
    """
    order = _in_order(outputs, {*given, *captured})
    place_of = _Places(order, labels, given).places
    if deferring:
        place_of = _deferred(order, place_of, recompute)
    members = collections.defaultdict(dict)
    for op in order:
        if (place := place_of.get(op.name)) is not None:
            members[place][op.name] = op
    if recompute:
        for place in members:
            if place.backward:
                members[place] = _with_forward(order, members[place], place_of, place)
    made = {key(t) for t in outputs}
    for inside in members.values():
        for op in inside.values():
            # The phase itself recomputes its tensors.
            made.update(key(t) for t in op.inputs if t.op.name not in inside)
    parts = _Parts(graph, made, captured, timed)
    return [parts.phase(place, members[place], place_of) for place in sorted(members)]


def recomputing(
    function: tf.types.experimental.ConcreteFunction, labels: Labels
) -> tf.types.experimental.ConcreteFunction:
    """Returns a function with the same results that keeps less for its gradient.

    Each part of a model recomputes its forward operations in the backward pass; see
    `cut`.

    Args:
        function: Takes and returns tensors; places none of its operations on a device.
        labels: The layers that its operations were made for.
    """
    graph = function.graph
    captured = {key(inside): outside for outside, inside in graph.captures}
    takes = [*map(key, graph.inputs[: len(graph.inputs) - len(captured)])]
    returns, held_by = [*map(key, graph.outputs)], dict.fromkeys(takes)
    phases = cut(graph, graph.outputs, labels, held_by, captured, recompute=True)
    if not any(phase.place.backward for phase in phases):
        return function

    def run(*values):
        made = dict(zip(takes, values, strict=True))
        for phase in phases:
            results, _ = phase([made[name] for name in phase.takes])
            made.update(zip(phase.makes, results, strict=True))
        return [made[name] for name in returns]

    return traced(
        run, *(tf.TensorSpec(t.shape, t.dtype) for t in graph.inputs[: len(takes)])
    )


def _deferred(order, place_of, recompute):
    """Returns places in which operations that no other part waits for are deferred.

    A sum of the gradients of several parts makes no part wait for another.
    """
    waited_for = set()
    for op in reversed(order):
        if (place := place_of.get(op.name)) is None:
            continue
        if recompute and place.backward:
            waited_for.add(op.name)
        is_sum = op.type == "AddN" and place.backward
        for source in (*(t.op for t in op.inputs), *op.control_inputs):
            passed_on = place_of.get(source.name) != place and not is_sum
            if passed_on or op.name in waited_for:
                waited_for.add(source.name)
    some = {place_of[name] for name in waited_for if name in place_of}
    return {
        name: dataclasses.replace(place, deferred=True)
        if place in some and name not in waited_for
        else place
        for name, place in place_of.items()
    }


def _with_forward(order, members, place_of, place):
    """Returns the operations of a backward phase, with those that it recomputes."""
    inside = set(members)
    for op in reversed(order):
        if op.name not in inside:
            continue
        for tensor in op.inputs:
            of = place_of.get(tensor.op.name)
            forward = of is not None and not of.backward and of.part == place.part
            # Python functions run once, as they may return something else the next
            # time.
            if forward and not any(effects.of([tensor.op])):
                inside.add(tensor.op.name)
    return {op.name: op for op in order if op.name in inside}


def _in_order(outputs, given):
    """Returns the operations behind `outputs`, each after those that it takes from."""
    given = {name.partition(":")[0] for _, name in given}
    before, by_name, waiting = {}, {}, [t.op for t in outputs]
    while waiting:
        op = waiting.pop()
        if op.name in by_name or op.name in given:
            continue
        by_name[op.name] = op
        sources = [*(t.op for t in op.inputs), *op.control_inputs]
        before[op.name] = [
            source.name for source in sources if source.name not in given
        ]
        waiting += sources
    names = graphlib.TopologicalSorter(before).static_order()
    return [by_name[name] for name in names]


class _Places:
    """Finds the place of each operation; constants have none: each phase copies them.

    The level of a part's forward place is the part's number; levels of the backward
    pass are in reverse order. A part that takes something from a later part, as a layer
    does that is called twice, gets another place, on a level behind that part.
    """

    def __init__(self, order, labels, given):
        self.places: dict[str, StagePlace] = {}
        self._labels, self._given = labels, given
        movable = [op for op in order if op.type != "Const"]
        of_gradient = set()
        for op in movable:
            if op.name in labels.backward or any(
                t.op.name in of_gradient for t in op.inputs
            ):
                of_gradient.add(op.name)
        forward = [op for op in movable if op.name not in of_gradient]
        backward = [op for op in movable if op.name in of_gradient]
        for op in forward:
            part = self._part(op)
            # A variable is read where it is needed, and not in a separate turn.
            if part is not None and op.type != "ReadVariableOp":
                self._put(op, part, part, False)
        self._put_where_needed(order, forward)
        levels = [place.level for place in self.places.values()]
        # No operation has a place if the loss takes no outputs of the model.
        self._deepest = max(levels, default=0)
        for op in backward:
            part, level = self._of_gradient(op)
            if part is not None:
                self._put(op, part, level, True)
        self._put_where_needed(order, backward)

    def _put(self, op, part, level, backward):
        for source in self._taken(op):
            same = (source.part, source.backward) == (part, backward)
            level = max(level, source.level + (not same))
        self.places[op.name] = StagePlace(level, part, backward)

    def _taken(self, op):
        sources = (self.places.get(tensor.op.name) for tensor in op.inputs)
        return [place for place in sources if place is not None]

    def _part(self, op):
        if (part := self._labels.parts.get(op.name)) is not None:
            return part
        parts = [self._given.get(key(tensor)) for tensor in op.inputs]
        parts = [part for part in parts if part is not None]
        if taken := self._taken(op):
            last = max(taken).part
            # A loop, or a branch, belongs to the last of its layers.
            return max([last, *parts]) if calls_functions(op) else last
        return max(parts, default=None)

    def _of_gradient(self, op):
        """Returns the part and the level of an operation of the gradient."""
        taken = self._taken(op)
        forward = [place for place in taken if not place.backward]
        if forward and calls_functions(op):
            # It takes tensors that a loop, or a branch, has kept for the gradient.
            last = max(forward)
            return last.part, 2 * self._deepest + 1 - last.level
        # A sum belongs to its last gradient; TensorFlow labels it with any of them.
        is_sum = op.type == "AddN" and taken and max(taken).backward
        for name in () if is_sum else self._labels.beside.get(op.name, ()):
            place = self.places.get(name)
            if place is not None and not place.backward:
                return place.part, 2 * self._deepest + 1 - place.level
            part = self._given.get((id(op.graph), f"{name}:0"))
            if part is not None:
                return part, 2 * self._deepest + 1 - part
        if taken:
            last = max(taken)
            level = last.level if last.backward else 2 * self._deepest + 1 - last.level
            return last.part, level
        return None, 0

    def _put_where_needed(self, order, wanted):
        """Puts operations that depend on no layer where they are needed first."""
        needed = collections.defaultdict(set)
        names = {op.name for op in wanted}
        for op in reversed(order):
            if op.name in names and op.name not in self.places:
                first = sorted(needed[op.name])[:2]
                clear = len(first) == 1 or (first and first[0].level < first[1].level)
                # The first level computes nothing else, so all phases may take from it.
                self.places[op.name] = first[0] if clear else StagePlace(0, 0)
            if place := self.places.get(op.name):
                for tensor in op.inputs:
                    needed[tensor.op.name].add(place)


@dataclasses.dataclass
class _Parts:
    """Makes phases of the operations of a graph.

    Attributes:
        graph: The graph.
        wanted: The keys of tensors that other phases take, or that the tower returns.
        captured: See `cut`.
        timed: See `cut`.
    """

    graph: tf.Graph
    wanted: set[Key]
    captured: Mapping[Key, tf.Tensor]
    timed: bool

    def phase(
        self,
        place: StagePlace,
        members: Mapping[str, tf.Operation],
        place_of: Mapping[str, StagePlace],
    ) -> StagePhase:
        """Makes the phase of one place; operations of other places are recomputed."""
        part, takes, captured, constants = GraphDef(), {}, {}, {}

        def name(tensor):
            if tensor.op.name in members:
                return tensor.name
            if tensor.op.type == "Const":
                constants[tensor.op.name] = tensor.op
                return tensor.name
            outside = key(tensor)
            feeds = captured if outside in self.captured else takes
            if outside not in feeds:
                feeds[outside] = f"{_FEED}{len(takes) + len(captured)}:0", tensor
            return feeds[outside][0]

        for op in members.values():
            inputs = [name(tensor) for tensor in op.inputs]
            inputs += [f"^{c.name}" for c in op.control_inputs if c.name in members]
            add_copy(part, op, inputs)
        for op in constants.values():
            add_copy(part, op, ())
        keep_functions(part, self.graph)
        makes = {
            key(tensor): tensor
            for op in members.values()
            if place_of[op.name] == place
            for tensor in op.outputs
            if key(tensor) in self.wanted
        }

        def function(*values):
            graph = tf.compat.v1.get_default_graph()
            fed = {
                feed: graph.capture(self.captured[key(tensor)])
                for feed, tensor in captured.values()
            }
            feeds = (feed for feed, _ in takes.values())
            fed.update(zip(feeds, values, strict=True))
            names = [tensor.name for tensor in makes.values()]
            results = tf.graph_util.import_graph_def(part, fed, names, name="")
            for tensor, like in zip(results, makes.values(), strict=True):
                tensor.set_shape(like.shape)
            return results

        tensors = {outside: tensor for outside, (_, tensor) in takes.items()}
        effort = sum(map(work.of, members.values()))
        inline = is_placed(part)
        return StagePhase(place, tensors, makes, function, effort, self.timed, inline)
