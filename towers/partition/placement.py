"""Decides where each operation of a traced function runs: on the towers, or at home.

Operations with one row an example run on each tower, with the tower's rows. Sums and
means over examples run there, too, and each tower has its part of the total: the parts
are reduced where a nonlinear operation takes them, such as an optimizer, a metric or a
norm. Operations that do not depend on examples run once, at home, and so do operations
that mix examples, on the rows of all towers. In the terms of GSPMD (Xu et al. 2021),
which partitions by propagated shardings, a tensor is split by rows, replicated, or
partial.

Home computes small integers from its own values, such as a seed, on the host: a GPU
reads seeds from host memory, and would otherwise stall at each Dropout. Small tensors
that depend on totals alone are computed at home, too, so that each tower runs once, and
not again for the mean of a metric. Look-ups run where the table is stored, so that only
rows are sent.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from towers.analysis import effects, layer_calls
from towers.analysis.axes import STATELESS_DRAWS
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
)
from towers.analysis.layer_calls import key
from towers.analysis.rows import Blocks
from towers.devices.names import HOST
from towers.keras_adapter.graphs import (
    before,
    calls_functions,
    is_stateful,
    may_change,
    traced,
)
from towers.keras_adapter.layers import layers_of
from towers.keras_adapter.variables import value_behind
from towers.layers.parameters import ShardedParameter
from towers.layers.sharded import WHOLE_SCOPE, ShardedVariable
from towers.partition.trace import Region, Trace
from towers.tower.errors import where

# Draws in which each number advances the counter equally, by blocks of 16 bytes.
SKIPPABLE = set(
    """StatelessRandomNormalV2 StatelessRandomUniformFullIntV2
    StatelessRandomUniformIntV2 StatelessRandomUniformV2""".split()
)
_SHAPE, _KEY, _COUNTER = range(3)
# Operations that derive key and counter from a seed, which GPUs read in host memory.
OF_SEED = {"StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounterAlg"}
# Kinds of tensors that towers compute parts of.
_ON_TOWERS = COLUMNS, LAST, MEAN, OWN, PACKED, ROWS, SHAPE, SIZE, SUM, TURNED
_TOTALS = MEAN, SIZE, SUM
# Home computes no tensor of this many elements that towers can compute, too.
_MANY = 1024
_OF_ONE_VARIABLE = set(
    "AssignAddVariableOp AssignSubVariableOp AssignVariableOp ReadVariableOp".split()
)
# The operation that looks up rows of a variable, which hosts can exchange.
LOOK_UP = "ResourceGather"
_EXCHANGED = {LOOK_UP, "ReadVariableOp"}
# Operations that are repeated on a gathered value, for another type or layout.
_LAYOUT = set("Cast Identity Reshape Transpose ExpandDims Squeeze".split())
# Stateful for TensorFlow only because each call creates another value.
_FRESH = {"EmptyTensorList"}
# The index of the shape among the inputs of a stateful draw, by type of operation.
STATEFUL_DRAWS = {
    "RandomStandardNormal": 0,
    "RandomUniform": 0,
    "RandomUniformInt": 0,
    "TruncatedNormal": 0,
    "RngReadAndSkip": None,
    "StatefulStandardNormalV2": 2,
    "StatefulTruncatedNormal": 2,
    "StatefulUniform": 2,
    "StatefulUniformFullInt": 2,
    "StatefulUniformInt": 2,
}
_SHAPE_OF_DRAW = dict.fromkeys(STATELESS_DRAWS | SKIPPABLE, 0) | STATEFUL_DRAWS


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """Where and when an operation runs.

    Attributes:
        level: Operations of one level run in this order: on the host, at home, on the
            copies, optimizers, on the towers.
        on_towers: Whether it runs on each tower, with the tower's rows.
        updates: Whether it is an optimizer's `apply`, which runs by itself.
        on_copies: Whether it runs on each copy of the variables, home being the first.
        on_device: Whether it runs on the device of home, or of the tower. If not, home
            runs it on the host, and a tower runs it at home, as for look-ups of rows.
        exchanges: Whether it reads a sharded variable, which devices or hosts exchange
            once for all towers of a host.
        of_first_host: Whether all hosts take the first host's results, as each would
            draw other random numbers from TensorFlow's own state, or in Python.
    """

    # In the order of comparison: later operations compare greater.
    level: int
    on_towers: bool
    on_device: bool = True
    updates: bool = False
    on_copies: bool = False
    exchanges: bool = False
    of_first_host: bool = False

    def is_behind(self, other: "Place") -> bool:
        """Checks whether this place, on the same level, comes later than the other."""
        return dataclasses.replace(self, level=other.level) > other


class Placement:
    """Places the operations of a traced function.

    Attributes:
        places: The place of each needed operation, by name; constants have none, as
            every consumer has its own.
        own_rows: The names of operations that each tower runs with its rows, taken for
            the batch; see `tower/preprocess.py`.
        order: The needed operations, each after its inputs.
        gathered: Operations that mix examples, and run at home on rows of all towers.
        hosted: The names of operations that run on the host, such as a GPU's random
            seed.
        unreadable: The names of operations whose results must count as unknown in the
            next trace of the same function, as home has to run them.
        refused: Why towers cannot compute the function, a sentence for each reason.
        waits: The names of operations that an operation waits for, apart from its
            inputs, by its name.
        assigned: The sharded parameters that the function assigns itself, for which it
            is refused.
        draws_of_host: Operations at home that draw from TensorFlow's own random state,
            and whose results other hosts cannot take, such as a loop that also assigns
            a variable.
    """

    def __init__(
        self,
        trace: Trace,
        is_copied: Callable[[tf.Tensor | None], bool] = lambda handle: False,
        home: str = HOST,
        stand_ins: Mapping[int, ShardedVariable] = MappingProxyType({}),
    ):
        """Places the operations.

        Args:
            trace: The traced function.
            is_copied: Returns whether each tower has a copy of the variable of an
                outside handle.
            home: The device of home.
            stand_ins: The sharded variables that the function reads, by the `id` of the
                handle of the stand-in; see `sharded.stand_ins`.
        """
        self._home, self._stand_ins = home, stand_ins
        # Variables gathered for each use, and variables read once for all towers.
        self._parameters, self._divided = {}, {}
        for handle, parts in stand_ins.items():
            known = self._parameters if parts.gathered_by_use else self._divided
            known[handle] = parts
        # Sharded parameters, by the keys of their values as read or cast.
        self._values: dict[object, ShardedParameter] = {}
        # The operation that reads the variable, by the same keys. It decides whether
        # the value is that before or after an update.
        self._read_by: dict[object, tf.Operation] = {}
        # Names of operations that take such values; an update runs after all of them.
        self._gathering: list[str] = []
        self._outdated = (
            self._outdated_values(trace) if self._parameters else frozenset()
        )
        self._returned = {key(t) for t in [*trace.returned, *trace.targets]}
        self._trace, self._reader, self._is_copied = trace, trace.reader, is_copied
        self.places: dict[str, Place] = {}
        self.own_rows: set[str] = set()
        self.gathered: list[tf.Operation] = []
        self.hosted: set[str] = set()
        self.unreadable: frozenset[str] = frozenset()
        self.refused: list[str] = []
        self.waits: dict[str, list[str]] = {}
        self._by_design: dict[object, Dependence] = {}
        self._made_at_home: set[object] = set()
        self._handles = {
            key(inside): outside for outside, inside in trace.graph.captures
        }
        batch = tf.nest.flatten([trace.batch], expand_composites=True)
        self._of_batch = {key(t) for t in batch if t is not None}
        self._given = {*self._of_batch, key(trace.fraction)}
        self.roots = [*self._roots()]
        self.order = self._needed()
        self._on_towers: dict[str, bool | None] = {}
        for op in self.order:
            self._on_towers[op.name] = self._decide(op)
        self._bring_lists_home()
        self._decide_others()
        apart = trace.updates if trace.updates_apart else ()
        at_home = [
            op
            for op in self.order
            if not self._on_towers[op.name] and op.name not in apart
        ]
        on_copies, mixed = on_each(
            at_home,
            {op.name for op in self.gathered},
            lambda handle: is_copied(self._handles.get(key(handle))),
        )
        self.refused += mixed
        types: dict[str, set[str]] = {}
        for effect in effects.of(self.order):
            types.setdefault(effect.name, set()).add(effect.type)
        self.draws_of_host: list[tf.Operation] = []
        for op in self.order:
            if op.type != "Const" and not self._is_value(op):
                on_towers = bool(self._on_towers[op.name])
                updates = op.name in trace.updates
                exchanges = op.type in _EXCHANGED and self.parts_read(op) is not None
                on_device = op.name not in self.hosted and not self._looks_up(op)
                of_first_host = False
                its_types = types.get(op.name, set())
                if not on_towers and its_types & (effects.RANDOM | effects.PYTHON):
                    once = op.name not in on_copies
                    of_first_host = once and _may_follow(op, its_types)
                    if its_types & effects.RANDOM and not of_first_host:
                        self.draws_of_host.append(op)
                op_place = Place(
                    level=0,
                    on_towers=on_towers,
                    on_device=on_device and not exchanges,
                    updates=updates,
                    on_copies=op.name in on_copies,
                    exchanges=exchanges,
                    of_first_host=of_first_host,
                )
                level = self._level(op, op_place)
                self.places[op.name] = dataclasses.replace(op_place, level=level)
        for tensor in trace.returned:
            if self._on_towers.get(tensor.op.name):
                self._check_combined(None, tensor)
        self.refused += _refused_look_ups(self.order)
        changing = [op for op in self.order if self._changes_divided(op)]
        self.refused += map(_why_not_changed, changing)
        handles = [self._handles.get(key(t)) for op in changing for t in may_change(op)]
        self.assigned = [
            stands_for
            for stands_for in self.stand_ins_of(handles)
            if isinstance(stands_for, ShardedParameter)
        ]
        if self._reader.own is not None:
            self.refused += _refused_own(self._reader.own, trace.returned, self.order)

    def kind(self, tensor: tf.Tensor) -> Dependence:
        """Returns how to reduce the towers' values of a tensor to the batch's."""
        if self.is_extreme(tensor):
            return COUPLED
        kind = self._by_design.get(key(tensor)) or self._trace.added.get(key(tensor))
        return kind or self._reader.of(tensor)

    def is_extreme(self, tensor: tf.Tensor) -> bool:
        """Checks whether a tensor is the largest or smallest value over the rows."""
        return key(tensor) in self._reader.extremes

    def blocks(self, tensor: tf.Tensor) -> Blocks | None:
        """Returns the blocks of a tensor's rows; `None` for one row an example."""
        self._reader.of(tensor)
        count = self._reader.counts.of(tensor) or 1
        return self._reader.blocks.of(tensor) or ((count,) if count > 1 else None)

    def is_a_row_an_example(self, tensor: tf.Tensor) -> bool:
        """Checks whether each example is known to have one row of a tensor."""
        rows = self.blocks(tensor) is None and self.kind(tensor) is ROWS
        return rows and self._reader.counts.of(tensor) == 1

    def takes_total(self, op: tf.Operation, index: int) -> bool:
        """Checks whether an operation takes the whole batch's value of an input."""
        return self._trace.is_total(op, index)

    def is_gradient(self, tensor: tf.Tensor) -> bool:
        """Checks whether a tensor is a gradient, or the values of a sparse one."""
        return key(tensor) in self._trace.gradients

    def reads(self) -> dict[object, tf.Tensor]:
        """Returns the earlier reads of variables that are read again unchanged.

        Returns:
            The value of the first read, by the key of the value of a later read.
        """
        first: dict[object, tf.Tensor] = {}
        again = {}
        for op in self._trace.graph.get_operations():
            if op.type == "ReadVariableOp" and op.name in self.places:
                value = op.outputs[0]
                before = first.setdefault((key(op.inputs[0]), value.dtype), value)
                if before is not value:
                    again[key(value)] = before
            elif any(effects.of([op])):
                changed = {*map(key, may_change(op))}
                first = {n: value for n, value in first.items() if n[0] not in changed}
        return again

    def is_given(self, tensor: tf.Tensor) -> bool:
        """Checks whether a tensor is a part of the batch, or the tower's fraction."""
        return key(tensor) in self._given

    def parameter(self, tensor: tf.Tensor) -> ShardedParameter | None:
        """Returns the sharded parameter that a tensor is the value of, or `None`.

        The value may be cast, or have another layout. Each consumer gathers the value,
        as no device keeps it.
        """
        return self._values.get(key(tensor))

    def is_captured(self, tensor: tf.Tensor) -> bool:
        """Checks whether a tensor is captured from outside the function."""
        return key(tensor) in self._handles

    def outside(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the outside tensor of a captured tensor."""
        return self._handles[key(tensor)]

    def fixed(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns the value of a constant or captured tensor; `None` for all others."""
        if tensor.op.type == "Const":
            return tf.constant(tf.get_static_value(tensor), tensor.dtype)
        return self.outside(tensor) if self.is_captured(tensor) else None

    def parts_read(self, op: tf.Operation) -> Any:
        """Returns the sharded variable, read once for all, that an operation takes."""
        handles = (self._handles.get(key(tensor)) for tensor in op.inputs)
        known = (self._divided.get(id(handle)) for handle in handles)
        return next((parts for parts in known if parts is not None), None)

    def stand_ins_of(self, handles: Iterable[tf.Tensor | None]) -> list[Any]:
        """Returns the tables and sharded parameters that some handles stand in for."""
        known = self._stand_ins
        return [known[id(handle)] for handle in handles if id(handle) in known]

    def _changes_divided(self, op):
        """Checks whether an operation, no optimizer's, changes a sharded variable."""
        if op.name in self._trace.updates or not any(effects.of([op])):
            return False
        handles = (self._handles.get(key(tensor)) for tensor in may_change(op))
        return bool(self.stand_ins_of(handles))

    def _is_value(self, op):
        """Checks whether an operation only makes the value of a sharded parameter."""
        return bool(op.outputs) and key(op.outputs[0]) in self._values

    def _note_value(self, op):
        """Records values of sharded parameters; returns whether the result is one."""
        if not self._parameters or not op.inputs or not op.outputs:
            return False
        value = key(op.outputs[0])
        if value in self._returned or value in self._outdated:
            # Home makes the value, and fills the stand-in for this purpose.
            return False
        source, *others = op.inputs
        if op.type == "ReadVariableOp":
            parameter = self._parameters.get(id(self._handles.get(key(source))))
            read = op
        elif op.type in _LAYOUT and all(tensor.op.type == "Const" for tensor in others):
            parameter = self._values.get(key(source))
            read = self._read_by.get(key(source))
        else:
            return False
        if parameter is not None:
            self._values[value], self._read_by[value] = parameter, read
        return parameter is not None

    def _outdated_values(self, trace):
        """Returns the keys of values read before an update and used after the update.

        A gather after the update would return the new value.
        """
        numbers = {op.name: i for i, op in enumerate(trace.graph.get_operations())}
        updates = sorted(numbers[name] for name in trace.updates)
        return {
            key(tensor)
            for op in trace.graph.get_operations()
            if op.type == "ReadVariableOp" or op.type in _LAYOUT
            for tensor in op.outputs
            for consumer in tensor.consumers()
            if any(numbers[op.name] < n < numbers[consumer.name] for n in updates)
        }

    def is_on_towers(self, tensor: tf.Tensor) -> bool:
        """Checks whether each tower makes a tensor, or is given its part."""
        if self.is_given(tensor):
            return True
        return bool(self._on_towers.get(tensor.op.name))

    def _roots(self) -> Iterator[tf.Operation]:
        """Yields operations that have to run, for their results or their effects."""
        for tensor in self._trace.returned:
            yield tensor.op
        graph = self._trace.graph
        for effect in effects.of(graph.get_operations()):
            op = graph.get_operation_by_name(effect.name)
            # The state of a generator is a variable, which other operations may read.
            if (
                effect.type not in effects.RANDOM
                or effect.type in effects.OF_GENERATORS
            ):
                yield op
        for op in graph.get_operations():
            if effects.checks(op):
                yield op

    def _needed(self):
        """Returns all operations that the roots need, each after its inputs."""
        waiting, seen = [*self.roots], set()
        while waiting:
            op = waiting.pop()
            if op.name in seen:
                continue
            seen.add(op.name)
            waiting += [tensor.op for tensor in op.inputs]
        skipped = {name for _, name in {*self._given, *self._handles}}
        order: dict[str, tf.Operation] = {}
        for op in self._trace.graph.get_operations():
            # A gradient adds inputs to a loop that was made before it.
            waiting = [op] if op.name in seen else []
            while waiting:
                op = waiting[-1]
                missing = [t.op for t in op.inputs if t.op.name not in order]
                waiting += missing[::-1]
                if not missing:
                    order[waiting.pop().name] = op
        return [
            op
            for op in order.values()
            if not (op.outputs and op.outputs[0].name in skipped)
        ]

    def _region(self, op) -> Region | None:
        region = self._trace.regions.get(op.name)
        if region is None or region.layer is None:
            return region
        graph, kinds = self._trace.graph, []
        for _, name in region.outputs:
            kinds.append(self._reader.of(graph.get_tensor_by_name(name)))
        return None if {*kinds} & {COUPLED, UNKNOWN} else region

    def _is_touched(self, op):
        """Checks whether an operation takes a tower's tensor, or rows made at home."""
        return any(
            (self.is_on_towers(t) and not self.takes_total(op, i))
            or key(t) in self._made_at_home
            or self._reader.of(t) is PACKED
            for i, t in enumerate(op.inputs)
        )

    def _decide(self, op):
        """Decides where an operation runs.

        Returns:
            True for on towers, False for at home, `None` for either.
        """
        touched, region = self._is_touched(op), self._region(op)
        if op.type == "Const" or self._note_value(op):
            return None
        if touched and region is not None and layer_calls.is_own(region.layer):
            self.own_rows.add(op.name)
            return True
        if op.type in _SHAPE_OF_DRAW:
            return self._decide_draw(op, touched)
        if any(effects.of([op])):
            of_rows = ROWS in map(self._reader.of, op.inputs)
            if calls_functions(op) and of_rows and op.name not in self._trace.updates:
                self.gathered.append(op)
            self._note_statistics(op, region)
            self._note_hosted(op)
            return False
        if region is not None or op.type == "NoOp" or effects.only_checks(op):
            return True if touched else self._decide_alike(op)
        kinds = {self._reader.of(tensor) for tensor in op.outputs}
        if not touched and not kinds & {*_ON_TOWERS}:
            return self._decide_alike(op)
        if kinds == {PACKED} and all(map(self._is_of_packed_batch, op.inputs)):
            return None
        if kinds & {*_ON_TOWERS} or any(map(self.is_extreme, op.outputs)):
            return True
        if kinds & {COUPLED, UNKNOWN}:
            # Home has all integers of the packed batch, such as row splits.
            counts = all(t.dtype.is_integer for t in op.outputs)
            if not (counts and all(map(self._is_of_packed_batch, op.inputs))):
                self.gathered.append(op)
            return False
        return self._decide_alike(op)

    def _decide_alike(self, op):
        """Decides where an operation runs if its result is the same everywhere.

        Small integers made of home's values, such as of a seed, are computed in host
        memory, where GPUs read them, and then sent.
        """
        if is_stateful(op) and op.type not in _FRESH:
            self._note_hosted(op)
            return False
        if op.type in OF_SEED or not op.outputs:
            return None
        on_towers = [self._on_towers.get(t.op.name) for t in op.inputs]
        small = all((t.shape.num_elements() or _MANY) < _MANY for t in op.outputs)
        integers = all(t.dtype.is_integer or t.dtype.is_bool for t in op.outputs)
        if not (False in on_towers and small and integers):
            return None
        if any(tensor.op.name in self.hosted for tensor in op.inputs):
            self.hosted.add(op.name)
        return False

    def _looks_up(self, op):
        """Checks whether an operation looks up rows of a table that only home has.

        The operations that compute the row indices count as well.
        """
        table = self._trace.lookups.get(op.name)
        if table is None or not self._on_towers[op.name]:
            return False
        return table.device.endswith(self._home) and not self._is_copied(table.handle)

    def _note_hosted(self, op):
        """Records an operation on a variable in host memory, apart from home."""
        if op.type not in _OF_ONE_VARIABLE or self._home == HOST:
            return
        handle = self._handles.get(key(op.inputs[0]))
        if handle is not None and handle.device.endswith(HOST):
            self.hosted.add(op.name)

    def _is_of_packed_batch(self, tensor):
        """Checks whether home has all of a tensor, as the row splits of a batch."""
        on_towers = self._on_towers.get(tensor.op.name, True)
        return self._reader.of(tensor) in (NONE, PACKED) and (
            key(tensor) in self._of_batch or not on_towers
        )

    def _decide_draw(self, op, touched):
        """Decides where random numbers are drawn: at home for all, or on each tower."""
        shape = _SHAPE_OF_DRAW[op.type]
        if shape is None or not touched:
            return False
        # The blocks have to be read before the draw is known as rows.
        blocks = self.blocks(op.outputs[0]) or (1,)
        count = self._reader.counts.of(op.inputs[shape])
        if count is None:
            self.gathered.append(op)
            return False
        # A counter that the draw itself reads is at home only.
        own = self._reader.of(op.outputs[0]) is ROWS
        if op.type in SKIPPABLE and len(blocks) == 1 and own:
            return True
        kind = self._reader.of(op.inputs[shape])
        if kind is SHAPE or (kind is SIZE and op.inputs[shape].shape.rank == 1):
            # Home draws for the whole batch, and the rows are split.
            self._made_at_home.update(key(t) for t in op.outputs)
            self._reader.know({key(t): ROWS for t in op.outputs})
            for drawn in op.outputs:
                self._reader.counts.set(drawn, count)
        return False

    def _note_statistics(self, op, region):
        """Records that BatchNormalization's statistics are means, by design."""
        if region is None or region.layer is None or not op.inputs:
            return
        handle = self._handles.get(key(op.inputs[0]))
        for layer in layers_of(region.layer):
            if isinstance(layer, keras.layers.BatchNormalization):
                for variable in layer.non_trainable_variables:
                    if value_behind(variable).handle is handle:
                        self._by_design[key(op.inputs[1])] = MEAN

    def _bring_lists_home(self):
        """Moves lists of tensors home that home takes, as lists cannot be joined.

        An example is the input of a loop that runs at home because it cannot be
        analysed. If the operation that makes the list has further outputs, as a loop
        has for its gradient, it has to count as home's in the next trace; so has an
        operation on towers that takes the list.
        """
        moved = set()
        for op in reversed(self.order):
            consumers = [t.consumers() for t in op.outputs if t.dtype == tf.variant]
            if any(
                self._on_towers.get(consumer.name) is False
                for of_output in consumers
                for consumer in of_output
            ):
                if self._on_towers[op.name]:
                    self.gathered.append(op)
                    moved.add(op.name)
                self._on_towers[op.name] = False
        lists = [
            op
            for op in self.order
            if op.name not in self._trace.regions
            and (
                (op.name in moved and any(t.dtype != tf.variant for t in op.outputs))
                or (
                    self._on_towers[op.name]
                    and any(t.op.name in moved for t in op.inputs)
                )
            )
        ]
        self.unreadable = frozenset(op.name for op in lists)

    def _decide_others(self):
        """Places operations whose result is the same everywhere.

        They run on the towers, unless home needs the result.
        """
        on_towers: dict[str, bool] = {}
        for op in self.roots:
            on_towers.setdefault(op.name, False)
        taken_by_towers: set[str] = set()
        for op in reversed(self.order):
            if self._is_value(op):
                self._on_towers[op.name] = False
            elif self._on_towers[op.name] is None:
                self._on_towers[op.name] = on_towers.get(op.name, False)
            elif op.name not in taken_by_towers and self._is_of_few_totals(op):
                self._on_towers[op.name] = False
            on_tower = bool(self._on_towers[op.name])
            for i, tensor in enumerate(op.inputs):
                needs_part = on_tower and not self.takes_total(op, i)
                name = tensor.op.name
                on_towers[name] = on_towers.get(name, True) and needs_part
                if needs_part:
                    taken_by_towers.add(name)

    def _is_of_few_totals(self, op):
        """Checks whether home may compute an operation on a few totals.

        Examples are a sum of losses, or a metric's addition of a loss to its former
        value.
        """
        if op.name in self._trace.regions or is_stateful(op) or not op.inputs:
            return False
        if self._reader.own is not None:
            # A quotient of sums, say, is each tower's own.
            return False
        small = all(
            t.dtype != tf.variant and (t.shape.num_elements() or _MANY) < _MANY
            for t in op.outputs
        )
        input_kinds = {*map(self._reader.of, op.inputs)}
        output_kinds = {*map(self._reader.of, op.outputs)}
        return small and input_kinds <= {NONE, *_TOTALS} and output_kinds <= {*_TOTALS}

    def _level(self, op, own):
        """Returns the level of an operation with an otherwise known place."""
        level = 0
        for i, tensor in enumerate(op.inputs):
            other_place = self.places.get(tensor.op.name)
            takes_total = not own.on_towers or self.takes_total(op, i)
            if self.is_given(tensor):
                level = max(level, int(takes_total))
                if takes_total:
                    self._check_combined(op, tensor)
            if other_place is None:
                continue
            sent = own.on_towers and not other_place.on_towers
            if sent and self.kind(tensor) is PACKED:
                self.refused.append(self._why_not_packed(op, tensor))
            if sent and tensor.dtype == tf.variant and self.kind(tensor) is not NONE:
                self.refused.append(
                    f"{_taker(op)} '{tensor.name}', a list that one device makes of "
                    "the rows of all towers; expected a tensor, such as of `stack()`."
                )
            is_combined = other_place.on_towers and takes_total
            level = max(
                level, other_place.level + (is_combined or other_place.is_behind(own))
            )
            if is_combined:
                self._check_combined(op, tensor)
        # The batch and captured variables are available: nothing waits for these.
        waits = [*before(op, self.places)] if op.control_inputs else []
        self.waits[op.name] = waits
        reads = [self._read_by.get(key(tensor)) for tensor in op.inputs]
        # The read of a parameter has no place; the consumer of its value waits instead.
        waits = [*waits, *(n for r in reads if r for n in before(r, self.places))]
        if own.updates:
            waits += self._gathering
        elif any(reads):
            self._gathering.append(op.name)
        for name in waits:
            other_place = self.places[name]
            level = max(level, other_place.level + other_place.is_behind(own))
        return level

    def _check_combined(self, op, tensor):
        """Refuses a tensor that cannot be combined from the towers' values."""
        if self._reader.own is not None:
            self._reader.own.need(tensor)
        packed = key(tensor) in self._of_batch and self.kind(tensor) is PACKED
        if self.is_extreme(tensor) or packed:
            return
        if self.kind(tensor) in (COUPLED, OWN, PACKED, UNKNOWN):
            if self.kind(tensor) is PACKED:
                self.refused.append(self._why_not_packed(op, tensor))
                return
            self.refused.append(
                f"{_taker(op)} '{tensor.name}', which cannot be put together from what "
                f"towers compute of their rows, because of {self._reader.why(tensor)}."
            )

    def _why_not_packed(self, op, tensor):
        return (
            f"{_taker(op)} '{tensor.name}', made of values of a ragged or sparse tensor"
            " in the batch, of which each tower has its own; expected dense tensors, "
            "such as of `to_tensor()` or `tf.sparse.to_dense`."
        )

    def lines(self, name: str) -> Sequence[str]:
        """Returns sentences about operations that run at home on rows of all towers.

        Args:
            name: The name of the function, for the sentences.
        """
        gathered = {op.name for op in self.gathered}
        # That an optimizer adds sparse gradients of all towers is not worth a report.
        first = [
            op
            for op in self.gathered
            if not {t.op.name for t in op.inputs} & gathered
            and not {*map(key, op.inputs)} & self._trace.indices
        ]
        lines = []
        if first:
            lines.append(
                f"{name} computes on one device, with the rows of all towers: "
                f"{_listed(first)}."
            )
        full_reads = [
            op
            for op in self.order
            if op.type != LOOK_UP
            and op.name not in self._trace.updates
            and not isinstance(self.parts_read(op), ShardedParameter | None)
        ]
        if full_reads:
            lines.append(
                f"{name} reads whole tables that hosts divide, in each step, and not "
                f"only rows: {_listed(full_reads)}."
            )
        if own := _own_firsts(self._reader.own, self.order):
            lines.append(
                f"{name} computes with each tower's own rows what lets examples meet, "
                f"as loss_placement='tower' asks: {_listed(own)}. Its numbers are not "
                "those of one device."
            )
        return lines


def _may_follow(op, types):
    """Checks whether a host can take the first host's results of an operation.

    Args:
        op: The operation.
        types: The types of its side effects. It may draw random numbers and call
            Python, but may change no variable except a random generator's.
    """
    # Lists of tensors, for example, cannot be sent.
    return types <= effects.RANDOM | effects.REPEATED and all(
        t.dtype.is_bool
        or t.dtype.is_integer
        or t.dtype.is_floating
        or t.dtype.is_complex
        for t in op.outputs
    )


def _taker(op):
    if op is None:
        return "The function returns"
    return f"Operation '{op.name}' ({op.type}){where(op)} takes"


def _why_not_changed(op):
    return (
        f"Operation '{op.name}' ({op.type}){where(op)} changes a variable that is in "
        "parts on several devices or hosts; expected no change but an optimizer's, or "
        "shard_embeddings='none' and variable_update='replicated'."
    )


def _refused_look_ups(order):
    """Yields refusals of look-ups in the full value of a sharded table.

    The gradient of such a look-up has all rows, while that on one device has the rows
    that were looked up, and an optimizer squares each of these by itself.
    """
    for op in order:
        if op.type not in ("GatherNd", "GatherV2"):
            continue
        source = op.inputs[0].op
        while source.type in ("Cast", "Identity") and WHOLE_SCOPE not in source.name:
            source = source.inputs[0].op
        if WHOLE_SCOPE in source.name:
            yield (
                f"Operation '{op.name}' ({op.type}){where(op)} looks up rows in the "
                "whole value of a table that lies in shards; expected a call "
                "of the layer, or shard_embeddings='none'."
            )


def _refused_own(own, returned, order):
    """Yields refusals of gradient operations that take a tower's own tensors."""
    for tensor in returned:
        own.need(tensor)
    for op in order:
        if op.name in own.by_hand and any(tensor in own for tensor in op.inputs):
            yield (
                f"Operation '{op.name}' ({op.type}){where(op)} is of a gradient that "
                "cannot be put together from what towers compute of their own rows, as "
                "loss_placement='tower' asks; use 'auto'."
            )


def _own_firsts(own, order):
    """Returns the operations that mix a tower's examples.

    Those of integers are returned only if there are no others.
    """
    names = {op.name for op in own.firsts} if own is not None else set()
    firsts = [op for op in order if op.name in names]
    return [op for op in firsts if op.outputs[0].dtype.is_floating] or firsts


def _listed(operations: Sequence[tf.Operation]) -> str:
    """Returns the first operation types as a phrase, with the lines of user code."""
    phrases = dict.fromkeys(f"'{op.type}'{where(op)}" for op in operations)
    return ", ".join([*phrases][:5])


# Operations that run on each copy of the variables.


def on_each(
    at_home: Sequence[tf.Operation],
    gathered: Collection[str],
    is_copied: Callable[[tf.Tensor], bool],
) -> tuple[set[str], list[str]]:
    """Returns the names of operations that the device of each copy runs by itself.

    These read or change variables that have copies, or make inputs of such operations.
    Every copy gets the same inputs, so the copies stay equal.

    Args:
        at_home: Operations that do not run with a tower's rows, in order.
        gathered: The names of those that take the rows of all towers, and run once.
        is_copied: Returns whether the variable of a handle has copies.

    Returns:
        The names; and a refusal for each operation that changes variables with copies
        and others in one go, which no device can run.
    """
    names, wanted, mixed = set(), set(), []
    for op in reversed(at_home):
        handles = [t for t in may_change(op) if t.dtype == tf.resource]
        copied = [*map(is_copied, handles)]
        if any(copied) and not all(copied):
            mixed.append(
                f"Operation '{op.name}' ({op.type}){where(op)} changes variables of "
                "which towers have copies, and others in one go; expected variables "
                "of the model's `add_weight`, or "
                "variable_update='parameter_server'."
            )
        # An operation that may return another result at each call runs once.
        alike = op.name not in gathered and not handles and not is_stateful(op)
        if any(copied) or (op.name in wanted and alike and op.type != "Const"):
            names.add(op.name)
            wanted |= {tensor.op.name for tensor in op.inputs}
    return names, mixed


def together(
    graph: tf.Graph, handles: Collection[int], others: Collection[int]
) -> set[int]:
    """Returns handles with all those that an operation of a function takes together.

    A branch that changes a variable with copies may change others in one go.

    Args:
        graph: The graph of the function.
        handles: The `id`s of handles from outside the function.
        others: The `id`s of handles that may be added.
    """
    outside = {key(inside): id(handle) for handle, inside in graph.captures}
    groups = [
        {outside[key(t)] for t in op.inputs if key(t) in outside}
        for op in graph.get_operations()
    ]
    together, others = {*handles}, {*others}
    while more := [g for g in groups if g & together and (g - together) & others]:
        together |= set().union(*more) & others
    return together


# Random numbers of the whole batch, of which each tower draws its rows.
#
# TensorFlow's stateless random numbers come from a counter (Salmon et al. 2011): the
# n-th block of numbers follows from the counter plus n. A tower therefore draws only
# its own rows, by a counter advanced by the numbers of the rows before. Draws that
# advance the counter by an unknown number are made at home, and split.


def draws_of(op: tf.Operation) -> tf.types.experimental.ConcreteFunction:
    """Returns a function that draws a tower's rows of the numbers of an operation.

    The function takes the inputs of the operation, and then an int32 vector of the
    index of the tower's first example and the number of its examples. Values that the
    host has to know are computed in host memory, also on a GPU.

    Args:
        op: An operation of a type in `SKIPPABLE`. It draws equally many numbers for
            each example, one example after the other.
    """
    draw = getattr(tf.raw_ops, op.type)
    names = [argument.name for argument in op.op_def.input_arg]
    numbers = 4 if op.outputs[0].dtype.size <= 4 else 2
    options = {}
    if "dtype" in op.node_def.attr and "minval" not in names:
        options["dtype"] = op.outputs[0].dtype
    rank = op.outputs[0].shape.rank

    def rows(*values):
        *values, (first, size) = *values[:-1], tf.unstack(values[-1])
        shape = values[_SHAPE]
        # On GPUs, a reduction of the vector would run in GPU memory.
        count = functools.reduce(operator.mul, tf.unstack(shape))
        first, size = tf.cast(first, shape.dtype), tf.cast(size, shape.dtype)
        of_example = tf.math.floordiv(count, tf.maximum(size, 1))
        start = tf.cast(first, tf.uint64) * tf.cast(of_example, tf.uint64)
        # GPUs cannot unstack uint64 tensors.
        low, high = values[_COUNTER][0], values[_COUNTER][1]
        moved = low + tf.math.floordiv(start, numbers)
        high += tf.cast(moved < low, tf.uint64)
        arguments = dict(zip(names, values, strict=True))
        arguments["shape"] = tf.stack([count + numbers])
        arguments["counter"] = tf.stack([moved, high])
        # An overflow wraps around, which does not change this remainder.
        begin = tf.math.floormod(first * of_example, numbers)
        drawn = draw(**arguments, **options)
        drawn = tf.slice(drawn, tf.stack([begin]), tf.stack([count]))
        drawn = tf.reshape(drawn, shape)
        drawn.set_shape([None] * rank)
        return drawn

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in op.inputs]
    return traced(rows, *specs, tf.TensorSpec([2], tf.int32))
