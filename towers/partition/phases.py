"""Makes functions of the operations of a traced function that run together."""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towers.analysis import effects
from towers.analysis.kinds import COLUMNS, LAST, PACKED, ROWS, SHAPE, TURNED
from towers.analysis.layer_calls import key
from towers.collectives.batch import nothing_like
from towers.devices.names import short
from towers.keras_adapter.graphs import (
    GraphDef,
    PartFunction,
    add_call,
    add_copy,
    is_stateful,
    keep_functions,
    runs_anyway,
    traced,
    written,
)
from towers.layers.pipeline import ONE_STAGE, Pipeline
from towers.partition.gathers import Gathers
from towers.partition.placement import SKIPPABLE, Place, Placement, draws_of
from towers.partition.trace import Labels, Trace
from towers.program.features import feature

_OF_ROWS = {COLUMNS, LAST, PACKED, ROWS, SHAPE, TURNED}


class Group(NamedTuple):
    """Operations that run together.

    Attributes:
        place: Where and when they run.
        operations: The operations, in an order in which they may run.
        exported: The names of operations whose results other groups take from this one.
    """

    place: Place
    operations: Sequence[tf.Operation]
    exported: set[str]


class StateUse(NamedTuple):
    """The use that a group of operations makes of variables and other state.

    Attributes:
        stateful: Whether the group uses any state.
        reads: Whether the group reads a trainable variable.
        updates: Whether the group may change a trainable variable.
    """

    stateful: bool
    reads: bool
    updates: bool


def as_placed(placement: Placement) -> list[Group]:
    """Returns the groups of operations with equal places, each to run once."""
    groups = collections.defaultdict(list)
    for op in placement.order:
        if (op_place := placement.places.get(op.name)) is not None:
            groups[op_place].append(op)
    return [
        Group(op_place, groups[op_place], {op.name for op in groups[op_place]})
        for op_place in sorted(groups)
    ]


def use_of_state(group: Group, trace: Trace, placement: Placement) -> StateUse:
    """Returns the use that a group makes of variables and other state."""
    trained = {id(variable.handle) for variable in trace.graph.trainable_variables}
    stateful = reads = updates = False
    for op in group.operations:
        handles = [t for t in op.inputs if placement.is_captured(t)]
        trains = any(id(placement.outside(t)) in trained for t in handles)
        changes = any(effects.of([op]))
        stateful |= is_stateful(op) or changes
        reads, updates = reads | trains, updates | (trains and changes)
    return StateUse(stateful, reads, updates)


# Asynchronous towers (`builders/asynchronous/`). An optimizer must not update a value
# that was read when the step began: that would undo all updates made since. Home
# therefore reads a variable again where it needs the value, until the step itself has
# written the variable, and computes again what follows from such reads alone. A value
# that towers computed with is kept: a gradient must fit it. Where a tower would add its
# mean to a total that it was sent, as of a metric, home adds instead.


class Late:
    """Groups in which home reads variables as late as possible.

    Attributes:
        groups: The groups, in the order in which they run.
    """

    def __init__(self, trace: Trace, placement: Placement):
        """Groups the operations of a traced function."""
        self._trace, self._placement = trace, placement
        self._order = {op.name: i for i, op in enumerate(placement.order)}
        self._pure = {
            op.name
            for op in placement.order
            if (op_place := placement.places.get(op.name)) is not None
            and not op_place.on_towers
            # Operations that only check have no output to ask for.
            and op.outputs
            and op.name not in trace.loss_scales
            and not effects.checks(op)
            and not any(effects.of([op]))
        }
        # The operations that may change a variable, by its handle.
        self._writes = collections.defaultdict(list)
        for op in self._placed():
            if any(effects.of([op])):
                for handle in self._handles(op):
                    self._writes[handle].append(op)
        self._members: dict[Place, set[str]] = collections.defaultdict(set)
        self._exported: dict[str, Place] = {}
        self._seen: set[tuple[str, Place]] = set()
        self._send()
        for op in self._placed():
            if op.name not in self._pure:
                # An update runs on the level where its inputs are computed again.
                op_place = dataclasses.replace(placement.places[op.name], updates=False)
                self._export(op, op_place)
        for tensor in [*trace.returned, *trace.targets]:
            self._run_early(tensor.op)
        self.groups = [self._group(op_place) for op_place in sorted(self._members)]

    def _placed(self):
        return [op for op in self._placement.order if op.name in self._placement.places]

    def _group(self, place):
        members = self._members[place]
        operations = [op for op in self._placement.order if op.name in members]
        exported = {name for name in members if self._exported.get(name) == place}
        return Group(place, operations, exported)

    def _send(self):
        """Places home's results for towers on the level that first needs them."""
        needed: dict[str, int] = {}
        for op in reversed(self._placed()):
            op_place = self._placement.places[op.name]
            level = op_place.level if op_place.on_towers else needed.get(op.name)
            for tensor in op.inputs if level is not None else ():
                if (name := tensor.op.name) in self._pure:
                    needed[name] = min(needed.get(name, level), level)
        for op in self._placed():
            if op.name in needed:
                level = self._placement.places[op.name].level
                if self._may_read(op, needed[op.name], None):
                    level = needed[op.name]
                input_places = [
                    self._exported.get(tensor.op.name) for tensor in op.inputs
                ]
                level = max(
                    [level, *(p.level for p in input_places if p and not p.on_towers)]
                )
                on_device = self._placement.places[op.name].on_device
                self._export(op, Place(level, on_towers=False, on_device=on_device))

    def _export(self, op, place):
        """Makes an operation run at a place, for all consumers of its results."""
        self._exported[op.name] = place
        self._members[place].add(op.name)
        if not place.on_towers:
            root = None if op.name in self._pure else op
            # Inputs are computed at the same place: a seed on the host, say.
            at = Place(place.level, on_towers=False, on_device=place.on_device)
            for tensor in op.inputs:
                self._schedule(tensor.op, at, root)

    def _run_early(self, op):
        """Makes an operation run as early as possible, unless it is placed already."""
        if op.name in self._pure and op.name not in self._exported:
            self._export(op, self._placement.places[op.name])

    def _schedule(self, op, place, root):
        """Schedules an operation at home at a place, where a consumer needs it.

        `root` is the operation that changes a variable and, in the end, takes the
        result.
        """
        level = place.level
        if (op.name, place) in self._seen:
            return
        if op.name not in self._pure:
            if root is None or not self._is_added_to(op, level, root):
                return
        elif not self._is_fresh(op, level, root):
            self._run_early(op)
            return
        self._seen.add((op.name, place))
        self._members[place].add(op.name)
        for tensor in op.inputs:
            self._schedule(tensor.op, place, root)

    def _is_fresh(self, op, level, root):
        """Checks whether an operation may return another value if run at a level."""
        waiting, seen = [op], set()
        while waiting:
            op = waiting.pop()
            if op.name in seen or op.name not in self._pure:
                continue
            seen.add(op.name)
            if self._may_read(op, level, root):
                return True
            waiting += [tensor.op for tensor in op.inputs]
        return False

    def _is_added_to(self, op, level, root):
        """Checks whether `root` assigns a variable's old value plus a tower's."""
        if root.type != "AssignVariableOp":
            return False
        waiting, seen = [op], set()
        while waiting:
            op = waiting.pop()
            if op.name in seen:
                continue
            seen.add(op.name)
            if self._handles(op) & self._handles(root):
                if op.name in self._pure and self._may_read(op, level, root):
                    return True
            elif op.name in self._pure or self._may_come_home(op):
                waiting += [tensor.op for tensor in op.inputs]
        return False

    def _may_come_home(self, op):
        """Checks whether a tower's result has no rows, and is part of no gradient."""
        op_place = self._placement.places.get(op.name)
        if op_place is None or not op_place.on_towers or any(effects.of([op])):
            return False
        region = self._trace.regions.get(op.name)
        kinds = {*map(self._placement.kind, op.outputs)}
        return (region is None or region.layer is not None) and not kinds & _OF_ROWS

    def _may_read(self, op, level, root):
        """Checks whether an operation reads a variable, and may do so at a level."""
        handles, place_of = self._handles(op), self._placement.places
        if not handles:
            return False
        for handle in handles:
            writes = self._writes[handle]
            if not any(place_of[write.name].level < level for write in writes):
                continue
            # The step has written the variable before, and now adds to it, say.
            if root is None or root.type != "AssignVariableOp":
                return False
            begin, end = self._order[op.name], self._order[root.name]
            between = [w for w in writes if begin < self._order[w.name] < end]
            if handle not in self._handles(root) or between:
                return False
        return True

    def _handles(self, op):
        outside = self._placement.outside
        return {
            id(outside(t))
            for t in op.inputs
            if t.dtype == tf.resource and self._placement.is_captured(t)
        }


_FEED = "towers_feed_"
_ROWS = "towers_rows"


class Taken(NamedTuple):
    """An input of a phase.

    Attributes:
        tensor: A tensor of the traced function.
        whole: Whether the input is the whole batch's value, where towers have parts.
        rows: Whether the input has a tower's rows, one an example.
    """

    tensor: tf.Tensor
    whole: bool
    rows: bool


class _Part:
    """The operations of a phase, as a graph of their own.

    Attributes:
        graph: The graph.
        operations: The operations of the trace.
        takes: The inputs of the phase.
        feeds: The names of the inputs in the graph.
        captured: The captured tensors from outside the function, by their names in the
            graph.
        draws: Whether the phase draws a tower's rows of random numbers.
        makes: The tensors that the phase returns.
    """

    def __init__(self, placement, place, operations, read_before, wanted, exported):
        self.graph, self.draws = GraphDef(), False
        self.takes: list[Taken] = []
        self.feeds: list[str] = []
        self.captured: dict[str, tf.Tensor] = {}
        self.makes = [
            tensor
            for op in operations
            for tensor in op.outputs
            if op.name in exported and key(tensor) in wanted
        ]
        self._written: set[str] = set()
        self._functions: dict[tuple[bool, bool], PartFunction] = {}
        self._placement, self._place = placement, place
        self._read_before = read_before
        self.operations = operations
        self._members = {op.name for op in operations}
        self._gathers = Gathers(self.graph, _FEED)
        self._names, self._constants, self._drawing = {}, {}, {}
        for op in operations:
            self._add(op)
        for op in self._constants.values():
            add_copy(self.graph, op, ()).device = ""
        self.captured |= self._gathers.captured
        keep_functions(self.graph, operations[0].graph)
        if self.draws:
            self.feeds.append(f"{_ROWS}:0")

    def _add(self, op):
        inputs = [self._name(op, i) for i in range(len(op.inputs))]
        self._written.update(inputs[i] for i in written(op))
        waits = [f"^{name}" for name in self._waits(op)]
        of_batch = op.name not in self._placement.own_rows
        if self._place.on_towers and op.type in SKIPPABLE and of_batch:
            self.draws = True
            inputs = [*inputs, f"{_ROWS}:0", *waits]
            add_call(self.graph, op, self._drawn_by(op), inputs)
        else:
            add_copy(self.graph, op, inputs + waits).device = ""

    def _waits(self, op):
        """Yields the names of the operations in this part that an operation waits for.

        A chain of waits may lead through operations of another phase.
        """
        waits = self._placement.waits
        waiting, seen = [*waits.get(op.name, ())], set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self._members:
                yield name
            else:
                waiting += waits.get(name, ())

    def function(self, gated: bool = False, stays: bool = False) -> PartFunction:
        """Returns the function of the inputs and the captured tensors, in this order.

        The function is the same for all copies of the variables.

        Args:
            gated: Whether the function takes, before all else, a gate: a boolean scalar
                that has to be computed before the function has any effect.
            stays: Whether the function stays a function in the step's graph.
        """
        if (gated, stays) not in self._functions:
            types = [taken.tensor.dtype for taken in self.takes]
            types += [tf.int32] if self.draws else []
            types += [captured.dtype for captured in self.captured.values()]
            self._functions[gated, stays] = PartFunction(
                self.graph,
                [*zip([*self.feeds, *self.captured], types, strict=True)],
                self.makes,
                self._written,
                # An update waits for the gathers that read the variable.
                runs_anyway(self.operations[0].graph)
                | dict.fromkeys(self._gathers.reads, False),
                self.captured.keys() if gated else None,
                stays,
            )
        return self._functions[gated, stays]

    def _drawn_by(self, op):
        """Returns the function that draws a tower's rows; equal draws share it."""
        output = op.outputs[0]
        signature = op.type, output.dtype, output.shape.rank
        signature += tuple((tensor.dtype, str(tensor.shape)) for tensor in op.inputs)
        if signature not in self._drawing:
            self._drawing[signature] = draws_of(op)
        return self._drawing[signature]

    def _has_rows(self, tensor, whole):
        rows = self._place.on_towers and not whole and tensor.shape.rank
        return bool(rows) and self._placement.is_a_row_an_example(tensor)

    def _name(self, op, i):
        """Returns the name, in the phase's graph, of an input of an operation."""
        tensor, placement = op.inputs[i], self._placement
        if (parameter := placement.parameter(tensor)) is not None:
            return self._gathers.add(op, tensor, parameter)
        if tensor.op.name not in self._members:
            tensor = self._read_before.get(key(tensor), tensor)
        is_total = self._place.on_towers and placement.takes_total(op, i)
        if tensor.op.name in self._members and not is_total:
            return tensor.name
        if tensor.op.type == "Const":
            # Equal constants are one, as TensorFlow would find out for each tower.
            value = tensor.op.node_def.attr["value"].SerializeToString()
            return self._constants.setdefault(value, tensor.op).outputs[0].name
        cache_key = key(tensor), is_total
        if cache_key not in self._names:
            self._names[cache_key] = feed = f"{_FEED}{len(self._names)}:0"
            if placement.is_captured(tensor):
                self.captured[feed] = placement.outside(tensor)
            else:
                self.takes.append(
                    Taken(tensor, is_total, self._has_rows(tensor, is_total))
                )
                self.feeds.append(feed)
        return self._names[cache_key]


@dataclasses.dataclass
class Phase:
    """Operations that run together, at home or on each tower.

    Attributes:
        place: Where and when they run.
        part: The operations.
        captured: The captured tensors from outside the function, by their names.
        operations: The names of the operations.
        labels: The part of the model that each operation was made for, if several
            stages compute them, or if parts recompute activations.
        pipeline: How the devices of a tower share the model.
        stays: Whether the phase stays a function in the step's graph; see `phases`.
        differentiable: Whether TensorFlow may differentiate calls of the phase.
    """

    place: Place
    part: _Part
    captured: dict[str, tf.Tensor]
    operations: Sequence[str] = ()
    labels: Labels | None = None
    pipeline: Pipeline = ONE_STAGE
    stays: bool = False
    differentiable: bool = False

    @classmethod
    def of(
        cls,
        placement: Placement,
        place: Place,
        operations: Sequence[tf.Operation],
        wanted: set[Any],
        exported: set[str],
        read_before: Mapping[Any, tf.Tensor],
        labels: Labels | None = None,
        pipeline: Pipeline = ONE_STAGE,
        stays: bool = False,
        differentiable: bool = False,
    ) -> "Phase":
        """Makes a phase of some operations.

        Args:
            placement: Where the operations of the traced function run.
            place: Where the operations of the phase run.
            operations: The operations, in an order in which they may run.
            wanted: The keys of tensors that are needed outside their phases.
            exported: The names of operations whose results others take from this phase.
            read_before: See `Placement.reads`.
            labels: See the attributes.
            pipeline: See the attributes.
            stays: See the attributes; applies to phases on towers.
            differentiable: See the attributes.
        """
        part = _Part(placement, place, operations, read_before, wanted, exported)
        names = [op.name for op in operations]
        labels = labels if place.on_towers and place.on_device else None
        # A function has one device; captured tensors may be on several.
        stays = stays and place.on_towers and not part.captured
        about = names, labels, pipeline, stays, differentiable
        return cls(place, part, part.captured, *about)

    def __post_init__(self):
        self._of_rows: dict[tuple[bool, int | None, bool], Any] = {}
        self._staged: dict[bool, Any] = {}

    @property
    def takes(self) -> list[Taken]:
        """The inputs of the phase."""
        return self.part.takes

    @property
    def makes(self) -> list[tf.Tensor]:
        """The tensors that the phase returns."""
        return self.part.makes

    @property
    def draws(self) -> bool:
        """Whether the phase takes, as its last input, the row range of its draws.

        The range is an int32 vector: the index of the first example, and the number of
        examples.
        """
        return self.part.draws

    def of_copy(self, handles: Mapping[int, tf.Tensor]) -> "Phase":
        """Returns the phase for a copy of some variables.

        Args:
            handles: The handles of the copies, by the `id` of the variable's handle.
        """
        captured = {
            feed: handles.get(id(handle), handle)
            for feed, handle in self.captured.items()
        }
        if all(handle is self.captured[feed] for feed, handle in captured.items()):
            return self
        return dataclasses.replace(self, captured=captured)

    @property
    def _specs(self):
        specs = [
            tf.TensorSpec(taken.tensor.shape, taken.tensor.dtype)
            for taken in self.takes
        ]
        return [*specs, *([tf.TensorSpec([2], tf.int32)] if self.draws else [])]

    @functools.cached_property
    def checks(self) -> bool:
        """Whether the phase stops the program if a check fails."""
        return any(map(effects.checks, self.part.operations))

    @property
    def has_stages(self) -> bool:
        """Whether the stages of a tower share the operations of the phase."""
        # A phase that only checks has no results that stages could hand on.
        is_shared = self.labels is not None and self.pipeline.stages > 1
        return is_shared and bool(self.makes)

    def staged(self, timed: bool = False) -> Any:
        """Returns the phase cut into stages that take turns: a `Staged`.

        Its inputs are those of the phase, then the row range of draws; its outputs are
        those of the phase.

        Args:
            timed: See `Staged`.
        """
        if timed not in self._staged:
            self._staged[timed] = self._cut(self._traced, timed)
        return self._staged[timed]

    def staged_of(self, rows: int, shapes: dict[Any, tf.TensorShape]) -> Any:
        """Returns the staged phase for a known number of a tower's examples.

        Args:
            rows: The number of examples.
            shapes: The shapes of the outputs of earlier phases, by their keys. The
                shapes of this phase's outputs are added.
        """
        specs = self._specs
        for i, taken in enumerate(self.takes):
            shape = [rows, *specs[i].shape[1:]] if taken.rows else specs[i].shape
            shape = shapes.get(key(taken.tensor), shape)
            specs[i] = tf.TensorSpec(shape, specs[i].dtype)
        function = traced(self._run, *specs)
        output_shapes = [tensor.shape for tensor in function.outputs]
        shapes.update(zip(map(key, self.makes), output_shapes, strict=True))
        return self._cut(function)

    def _cut(self, function, timed=False):
        """Cuts a function of the phase for the stages of a tower."""
        graph, count = function.graph, len(self._specs)
        parts = self.pipeline.parts_of_handles
        of_copy = {
            id(self.captured[feed]): parts.get(id(handle))
            for feed, handle in self.part.captured.items()
        }
        inside = {
            key(captured): of_copy.get(id(outside))
            for outside, captured in graph.captures
        }
        return feature("stages.staged").Staged(
            *(graph, graph.inputs[:count], graph.outputs),
            *(self.labels, self.pipeline, inside),
            timed=timed,
        )

    @functools.cached_property
    def _recomputing(self):
        """The function that recomputes activations that its parts have not kept."""
        function = feature("stages.phases").recomputing(
            traced(self._run, *self._specs), self.labels
        )
        if not self.stays:
            return function
        return traced(lambda *v: function(*v), *self._specs, stays=True)

    @functools.cached_property
    def _traced(self):
        """The function with a graph, which TensorFlow can differentiate."""
        return traced(self._run, *self._specs, stays=self.stays)

    @functools.cached_property
    def _traced_and_gated(self):
        def gated(gate, *values):
            # As in a `PartFunction`.
            with tf.control_dependencies([tf.identity(gate)]):
                captured = map(_captured, self.captured.values())
                return self._imported(values, [*map(tf.identity, captured)])

        return traced(gated, tf.TensorSpec([], tf.bool), *self._specs)

    def _run(self, *values):
        return self._imported(values, [*map(_captured, self.captured.values())])

    def _imported(self, values, captured):
        """Copies the operations into the graph being built."""
        fed = dict(zip(self.part.feeds, values, strict=True))
        fed.update(zip(self.captured, captured, strict=True))
        names = [tensor.name for tensor in self.makes]
        outputs = tf.graph_util.import_graph_def(self.part.graph, fed, names, name="")
        for tensor, like in zip(outputs, self.makes, strict=True):
            tensor.set_shape(like.shape)
        return outputs

    def compiles_on(self, device: str | None) -> bool:
        """Checks whether XLA can compile the phase: all captures are on the device.

        `device` is `None` if unknown.
        """
        captured = {short(tensor.device) for tensor in self.captured.values()}
        on_device = self.place.on_device and captured <= {device}
        return on_device and not self.hands_on_lists

    @property
    def hands_on_lists(self) -> bool:
        """Whether the phase takes or returns lists, as loops do for their gradients."""
        tensors = [*self.makes, *(taken.tensor for taken in self.takes)]
        return any(tensor.dtype == tf.variant for tensor in tensors)

    @functools.cached_property
    def _compiled(self):
        return traced(self._run, *self._specs, xla=True)

    def __call__(
        self,
        values: Sequence[tf.Tensor],
        xla: bool = False,
        gate: tf.Tensor | None = None,
    ) -> Sequence[tf.Tensor]:
        """Adds a call to the graph being built, on the device of the scope.

        Args:
            values: The inputs.
            xla: Whether XLA compiles the call.
            gate: A boolean scalar that has to be computed before the call has any
                effect.

        Returns:
            The outputs.
        """
        if xla:
            with tf.control_dependencies([] if gate is None else [gate]):
                return self._compiled(*values)
        recomputes = self.labels is not None and self.pipeline.recompute != "none"
        if recomputes and self.pipeline.stages == 1:
            return self._recomputing(*values)
        if self.differentiable and gate is None:
            return self._traced(*values)
        if self.differentiable:
            return self._traced_and_gated(gate, *values)
        function = self.part.function(gate is not None, self.stays)
        arguments = [*values, *self.captured.values()]
        return function(arguments if gate is None else [gate, *arguments])

    def of_rows(
        self,
        values: Sequence[tf.Tensor],
        size: tf.Tensor,
        idle: bool,
        usual: int | None,
        xla: bool = False,
    ) -> Sequence[tf.Tensor]:
        """Adds a call for a number of rows that is known at run time; see `__call__`.

        Args:
            values: The inputs.
            size: The number of rows, a scalar.
            idle: Whether there may be no rows, for which nothing is computed.
            usual: The usual number of rows, for which shapes are known in advance;
                `None` to treat all numbers alike.
            xla: Whether XLA compiles the call for the usual number.
        """
        if not idle and usual is None:
            return self(values)
        if (idle, usual, xla) not in self._of_rows:
            choose = functools.partial(self._choose, idle, usual, xla)
            spec = tf.TensorSpec([], tf.int32)
            self._of_rows[idle, usual, xla] = traced(choose, spec, *self._specs)
        return self._of_rows[idle, usual, xla](tf.convert_to_tensor(size), *values)

    def _choose(self, idle, usual, xla, size, *values):
        def nothing():
            return [nothing_like(like, size) for like in self.makes]

        def some():
            if not idle:
                return self(values)
            return tf.cond(size > 0, lambda: self(values), nothing)

        if usual is None:
            return some()

        def as_usual():
            return self(self._shaped(values, usual), xla)

        return tf.cond(size == usual, as_usual, some)

    def _shaped(self, values, rows):
        """Returns values with the row count in the shapes of those that have rows."""
        shaped = [*values]
        for i, taken in enumerate(self.takes):
            if taken.rows:
                value = values[i]
                # The slice takes all rows. `ensure_shape` would fail in the other
                # branch, too.
                shape = [rows, *(-1 if n is None else n for n in value.shape[1:])]
                shaped[i] = tf.slice(value, [0] * len(shape), shape)
        return shaped


def _captured(tensor):
    """Returns the captured tensor, in the graph being built, of an outside tensor."""
    return tf.compat.v1.get_default_graph().capture(tensor)


def phases(
    trace: Trace,
    placement: Placement,
    groups: Sequence[Group] | None = None,
    pipeline: Pipeline = ONE_STAGE,
    towers_stay: bool = False,
    differentiable: bool = False,
) -> list[Phase]:
    """Returns the phases of a traced function, in the order in which they run.

    Args:
        trace: The traced function.
        placement: Where its operations run.
        groups: The operations that run together; by default, those with equal places.
        pipeline: How the devices of a tower share the model.
        towers_stay: Whether the phases of towers stay functions in the step's graph. If
            not, TensorFlow inlines them, once for each tower, and optimizes all of them
            together: a longer start for a slightly faster step.
        differentiable: Whether TensorFlow may differentiate calls, for which the phases
            have to be traced.
    """
    # Where home reads as late as possible, reads are not shared between uses.
    read_before = placement.reads() if groups is None else {}
    groups, wanted = as_placed(placement) if groups is None else groups, set()
    for group in groups:
        members = {op.name for op in group.operations}
        for op in group.operations:
            for i, tensor in enumerate(op.inputs):
                if tensor.op.name not in members:
                    wanted.add(key(read_before.get(key(tensor), tensor)))
                elif placement.takes_total(op, i):
                    wanted.add(key(tensor))
    for tensor in [*trace.returned, *trace.targets]:
        wanted.add(key(tensor))
    return [
        Phase.of(
            *(placement, group_place, operations, wanted, exported),
            *(read_before, trace.labels, pipeline, towers_stay, differentiable),
        )
        for group_place, operations, exported in groups
    ]
