"""Has home read variables as late as it can, where others may change them meanwhile.

Placement has an operation run as soon as it can. Among towers that wait for one another
this changes no number. Where they do not, an optimizer would update what it has read
when the step began, and lose all updates made since. So home reads a variable again
where it needs its value, until the step itself has written the variable, and what only
comes of such values is computed again. A value that towers have computed with stays as
it was, or a gradient would not fit what it is the gradient of. Where a tower would add
its mean to a total that it was sent, as of a metric, home does so instead.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from towers.analysis import effects
from towers.analysis.kinds import COLUMNS, LAST, PACKED, ROWS, SHAPE, TURNED
from towers.keras_adapter.graphs import is_stateful
from towers.partition.placement.placement import Place, Placement
from towers.partition.trace import Trace

_OF_ROWS = {COLUMNS, LAST, PACKED, ROWS, SHAPE, TURNED}


class Group(NamedTuple):
    """Operations that run in one go.

    Attributes:
        place: Where and when they run.
        operations: In an order in which they may run.
        exported: The names of those of which others take what they make from here.
    """

    place: Place
    operations: Sequence[tf.Operation]
    exported: set[str]


class StateUse(NamedTuple):
    """Tells what a group of operations does to variables and other state.

    Attributes:
        stateful: Whether it has to do with any.
        reads: Whether it reads a trainable variable.
        updates: Whether it may change one.
    """

    stateful: bool
    reads: bool
    updates: bool


def as_placed(placement: Placement) -> list[Group]:
    """Returns the groups of operations, each of which runs once."""
    groups = collections.defaultdict(list)
    for op in placement.order:
        if (place := placement.places.get(op.name)) is not None:
            groups[place].append(op)
    return [
        Group(place, groups[place], {op.name for op in groups[place]})
        for place in sorted(groups)
    ]


def use_of_state(group: Group, trace: Trace, placement: Placement) -> StateUse:
    """Returns what a group does to variables and other state."""
    trained = {id(variable.handle) for variable in trace.graph.trainable_variables}
    stateful = reads = updates = False
    for op in group.operations:
        handles = [t for t in op.inputs if placement.is_captured(t)]
        trains = any(id(placement.outside(t)) in trained for t in handles)
        changes = any(effects.of([op]))
        stateful |= is_stateful(op) or changes
        reads, updates = reads | trains, updates | (trains and changes)
    return StateUse(stateful, reads, updates)


class Late:
    """Groups in which home reads as late as it can.

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
            if (place := placement.places.get(op.name)) is not None
            and not place.on_towers
            # Nobody may ask for what checks.
            and op.outputs
            and op.name not in trace.loss_scales
            and not effects.checks(op)
            and not any(effects.of([op]))
        }
        # By handle, the operations that may change a variable.
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
                # An optimizer runs where what it needs is computed again.
                place = dataclasses.replace(placement.places[op.name], updates=False)
                self._export(op, place)
        for tensor in [*trace.returned, *trace.targets]:
            self._run_early(tensor.op)
        self.groups = [self._group(place) for place in sorted(self._members)]

    def _placed(self):
        return [op for op in self._placement.order if op.name in self._placement.places]

    def _group(self, place):
        members = self._members[place]
        operations = [op for op in self._placement.order if op.name in members]
        exported = {name for name in members if self._exported.get(name) == place}
        return Group(place, operations, exported)

    def _send(self):
        """Places what home makes for towers, where the first of them needs it."""
        needed: dict[str, int] = {}
        for op in reversed(self._placed()):
            place = self._placement.places[op.name]
            level = place.level if place.on_towers else needed.get(op.name)
            for tensor in op.inputs if level is not None else ():
                if (name := tensor.op.name) in self._pure:
                    needed[name] = min(needed.get(name, level), level)
        for op in self._placed():
            if op.name in needed:
                level = self._placement.places[op.name].level
                if self._may_read(op, needed[op.name], None):
                    level = needed[op.name]
                made = [self._exported.get(tensor.op.name) for tensor in op.inputs]
                level = max([level, *(p.level for p in made if p and not p.on_towers)])
                on_device = self._placement.places[op.name].on_device
                self._export(op, Place(level, on_towers=False, on_device=on_device))

    def _export(self, op, place):
        """Has an operation run at a place, for all that take what it makes."""
        self._exported[op.name] = place
        self._members[place].add(op.name)
        if not place.on_towers:
            root = None if op.name in self._pure else op
            # It is computed where it is needed: a seed on the host, say.
            at = Place(place.level, on_towers=False, on_device=place.on_device)
            for tensor in op.inputs:
                self._schedule(tensor.op, at, root)

    def _run_early(self, op):
        """Has an operation run as soon as it can, if nobody needs it before."""
        if op.name in self._pure and op.name not in self._exported:
            self._export(op, self._placement.places[op.name])

    def _schedule(self, op, place, root):
        """Schedules an operation at home at a place, where a consumer needs it.

        `root` is the operation that changes something, and needs it in the end.
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
        """Tells whether an operation may make another value if it runs at a level."""
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
        """Tells whether a tower would add to what home assigns, having been sent it."""
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
        """Tells whether a tower makes something without rows, and of no gradient."""
        place = self._placement.places.get(op.name)
        if place is None or not place.on_towers or any(effects.of([op])):
            return False
        region = self._trace.regions.get(op.name)
        kinds = {*map(self._placement.kind, op.outputs)}
        return (region is None or region.layer is not None) and not kinds & _OF_ROWS

    def _may_read(self, op, level, root):
        """Tells whether an operation reads a variable, and may do so at a level."""
        handles, places = self._handles(op), self._placement.places
        if not handles:
            return False
        for handle in handles:
            writes = self._writes[handle]
            if not any(places[write.name].level < level for write in writes):
                continue
            # The step has written it before, and now adds something, say.
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
