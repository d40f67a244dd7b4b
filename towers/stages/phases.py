"""Cuts the graph of what a tower computes into phases, each of one part at a time.

A part is a stage, or a layer. A phase is a function. It takes what earlier phases, of
this part or of others, have made, and returns what later ones need. So the phases of
several micro-batches may run side by side, and in any order that the data allow.

The graph is cut, not the model: skip connections, layers that are called twice, and
Python of the user's have no list of stages. A phase takes nothing from a later level:
an operation's level is one more than that of another stage's operation that it takes
from. Gradients of weights are cut off, for when a stage is idle. What is computed again
is part of the backward phase, as TensorFlow merges equal operations.
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
from towers.layers.labels import Labels
from towers.stages import work

Key = tuple[int, str]

_FEED = "towers_feed_"


@dataclasses.dataclass(frozen=True, order=True)
class StagePlace:
    """Where an operation stands: what is of one place is computed together.

    Attributes:
        level: The order of phases: a phase takes nothing from a later level.
        part: The part of the model that it belongs to: a stage, or a layer.
        backward: Whether it is of the gradient.
        deferred: Whether no other part waits for it, beside what others wait for.
    """

    level: int
    part: int
    backward: bool = False
    deferred: bool = False


class StagePhase:
    """What one part computes at a time.

    Attributes:
        place: Where its operations stand.
        takes: The tensors that it is called with, by their keys.
        makes: Those that it returns.
        work: About how long it takes; see `work.py`.
        timed: Whether it tells when it ended.
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
        """Traces the function, which computes what it makes from what it takes.

        `timed` tells whether it is to look at the clock when it ends. Outside, the
        clock would be looked at late, where all threads are busy with other phases.
        `inline` tells whether TensorFlow copies it into the step's graph. If not, it
        begins when all that it takes is there.
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
        """Adds a call to the graph being built, on the device of the scope.

        Args:
            values: Those of `takes`.
            size: Number of rows, if there may be none, for which nothing is computed.

        Returns:
            What it makes, and when it ended, in seconds, if it is `timed`.
        """
        found = self._function if size is None else self._guarded
        found = found(*values) if size is None else found(size, *values)
        return (found[:-1], found[-1]) if self.timed else (found, None)

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
        graph: The graph of what a tower computes.
        outputs: What it returns.
        labels: What its operations were made for.
        given: The keys of what it is called with, each with the part that has it, if
            any does.
        captured: The keys of what it takes from outside, and that.
        recompute: Whether a part computes again, on the way back, what it has made on
            the way forward (Chen et al. 2016). It then keeps what it was called with.
        deferring: Whether what no other part waits for has phases of its own, such as
            gradients of weights, and metrics. What computes again has it at once.
        timed: Whether phases tell when they end.

    Returns:
        The phases, in an order in which they may run.
    """
    order = _in_order(outputs, {*given, *captured})
    places = _Places(order, labels, given).places
    if deferring:
        places = _deferred(order, places, recompute)
    members = collections.defaultdict(dict)
    for op in order:
        if (place := places.get(op.name)) is not None:
            members[place][op.name] = op
    if recompute:
        for place in members:
            if place.backward:
                members[place] = _with_forward(order, members[place], places, place)
    made = {key(t) for t in outputs}
    for inside in members.values():
        for op in inside.values():
            # What is computed again comes from itself.
            made.update(key(t) for t in op.inputs if t.op.name not in inside)
    parts = _Parts(graph, made, captured, timed)
    return [parts.phase(place, members[place], places) for place in sorted(members)]


def recomputing(
    function: tf.types.experimental.ConcreteFunction, labels: Labels
) -> tf.types.experimental.ConcreteFunction:
    """Returns what computes the same as a function, and keeps less for its gradient.

    Each part of a model computes again, on the way back, what it has made on the way
    forward; see `cut`.

    Args:
        function: Takes and returns tensors; nothing in it is on a device.
        labels: What its operations were made for.
    """
    graph = function.graph
    captured = {key(inside): outside for outside, inside in graph.captures}
    takes = [*map(key, graph.inputs[: len(graph.inputs) - len(captured)])]
    returns, given = [*map(key, graph.outputs)], dict.fromkeys(takes)
    phases = cut(graph, graph.outputs, labels, given, captured, recompute=True)
    if not any(phase.place.backward for phase in phases):
        return function

    def run(*values):
        made = dict(zip(takes, values, strict=True))
        for phase in phases:
            found, _ = phase([made[each] for each in phase.takes])
            made.update(zip(phase.makes, found, strict=True))
        return [made[each] for each in returns]

    return traced(
        run, *(tf.TensorSpec(t.shape, t.dtype) for t in graph.inputs[: len(takes)])
    )


def _deferred(order, places, recompute):
    """The places of operations, with those apart that no other part waits for.

    A sum of gradients of several parts makes none of these wait for another.
    """
    waited_for = set()
    for op in reversed(order):
        if (place := places.get(op.name)) is None:
            continue
        if recompute and place.backward:
            waited_for.add(op.name)
        is_sum = op.type == "AddN" and place.backward
        for source in (*(t.op for t in op.inputs), *op.control_inputs):
            passed_on = places.get(source.name) != place and not is_sum
            if passed_on or op.name in waited_for:
                waited_for.add(source.name)
    some = {places[name] for name in waited_for if name in places}
    return {
        name: dataclasses.replace(place, deferred=True)
        if place in some and name not in waited_for
        else place
        for name, place in places.items()
    }


def _with_forward(order, members, places, place):
    """The operations of a backward phase, with those that it computes again."""
    inside = set(members)
    for op in reversed(order):
        if op.name not in inside:
            continue
        for tensor in op.inputs:
            of = places.get(tensor.op.name)
            mine = of is not None and not of.backward and of.part == place.part
            # What Python computes, and may compute otherwise, is done once.
            if mine and not any(effects.of([tensor.op])):
                inside.add(tensor.op.name)
    return {op.name: op for op in order if op.name in inside}


def _in_order(outputs, given):
    """The operations behind `outputs`, each behind those that it takes from."""
    given = {name.partition(":")[0] for _, name in given}
    before, by_name, waiting = {}, {}, [t.op for t in outputs]
    while waiting:
        op = waiting.pop()
        if op.name in by_name or op.name in given:
            continue
        by_name[op.name] = op
        sources = [*(t.op for t in op.inputs), *op.control_inputs]
        before[op.name] = [each.name for each in sources if each.name not in given]
        waiting += sources
    names = graphlib.TopologicalSorter(before).static_order()
    return [by_name[name] for name in names]


class _Places:
    """Finds where each operation stands; constants stand nowhere: each phase has them.

    A part's place is on the level of its number, on the way back in reverse. Where a
    part takes something from a later one, as a layer does that is called twice, it has
    another place, on a level behind that.
    """

    def __init__(self, order, labels, given):
        self.places: dict[str, StagePlace] = {}
        self._labels, self._given = labels, given
        movable = [op for op in order if op.type != "Const"]
        behind = set()
        for op in movable:
            if op.name in labels.backward or any(
                t.op.name in behind for t in op.inputs
            ):
                behind.add(op.name)
        forward = [op for op in movable if op.name not in behind]
        backward = [op for op in movable if op.name in behind]
        for op in forward:
            part = self._part(op)
            # A variable is read where it is needed, and not in a turn of its own.
            if part is not None and op.type != "ReadVariableOp":
                self._put(op, part, part, False)
        self._put_where_needed(order, forward)
        levels = [place.level for place in self.places.values()]
        # There is nothing to place if the loss takes no outputs of the model.
        self._deepest = max(levels, default=0)
        for op in backward:
            part, level = self._of_gradient(op)
            if part is not None:
                self._put(op, part, level, True)
        self._put_where_needed(order, backward)

    def _put(self, op, part, level, backward):
        for each in self._taken(op):
            same = (each.part, each.backward) == (part, backward)
            level = max(level, each.level + (not same))
        self.places[op.name] = StagePlace(level, part, backward)

    def _taken(self, op):
        found = (self.places.get(tensor.op.name) for tensor in op.inputs)
        return [place for place in found if place is not None]

    def _part(self, op):
        if (part := self._labels.parts.get(op.name)) is not None:
            return part
        parts = [self._given.get(key(tensor)) for tensor in op.inputs]
        parts = [part for part in parts if part is not None]
        if taken := self._taken(op):
            last = max(taken).part
            # A loop, or a branch, is where the last of its layers is.
            return max([last, *parts]) if calls_functions(op) else last
        return max(parts, default=None)

    def _of_gradient(self, op):
        """The part of an operation of the gradient, and its level if nothing waits."""
        taken = self._taken(op)
        forward = [place for place in taken if not place.backward]
        if forward and calls_functions(op):
            # It takes what a loop, or a branch, has kept for it.
            last = max(forward)
            return last.part, 2 * self._deepest + 1 - last.level
        # A sum stands where the last gradient comes from; TensorFlow puts it with any.
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
        """Puts what depends on no layer where it is needed first."""
        needed = collections.defaultdict(set)
        names = {op.name for op in wanted}
        for op in reversed(order):
            if op.name in names and op.name not in self.places:
                first = sorted(needed[op.name])[:2]
                clear = len(first) == 1 or (first and first[0].level < first[1].level)
                # On the first level nothing else is computed, so all may take it.
                self.places[op.name] = first[0] if clear else StagePlace(0, 0)
            if place := self.places.get(op.name):
                for tensor in op.inputs:
                    needed[tensor.op.name].add(place)


@dataclasses.dataclass
class _Parts:
    """Makes phases of the operations of a graph.

    Attributes:
        graph: The graph.
        wanted: The keys of what phases take from others, or the tower returns.
        captured: See `cut`.
        timed: The same.
    """

    graph: tf.Graph
    wanted: set[Key]
    captured: Mapping[Key, tf.Tensor]
    timed: bool

    def phase(
        self,
        place: StagePlace,
        members: Mapping[str, tf.Operation],
        places: Mapping[str, StagePlace],
    ) -> StagePhase:
        """Makes the phase of some operations; those of other places are made again."""
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
            if places[op.name] == place
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
            found = tf.graph_util.import_graph_def(part, fed, names, name="")
            for tensor, like in zip(found, makes.values(), strict=True):
                tensor.set_shape(like.shape)
            return found

        tensors = {outside: tensor for outside, (_, tensor) in takes.items()}
        effort = sum(map(work.of, members.values()))
        inline = is_placed(part)
        return StagePhase(place, tensors, makes, function, effort, self.timed, inline)
