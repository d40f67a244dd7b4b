"""A tower's step by itself, as a model defines it: what it does at home, and there.

The step is cut as for `loss_placement="tower"`. What a tower has of a tensor is the
tensor, and nothing is added up. Phases that have to do with variables run at home,
under the lock of `staleness.py`; all others on the tower. A step with several takes the
lock several times.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from towers.analysis.layer_calls import key
from towers.builders.asynchronous.part import Part, graph
from towers.builders.steps import Steps
from towers.collectives import batch, packing
from towers.partition.partitioned import Partitioned, judge
from towers.partition.phases import phases
from towers.partition.placement.late import Late, use
from towers.tower.errors import explained_trace

_DONE = "steps done"


class _Made(NamedTuple):
    """What a part of a step has made, by the names of tensors of the traced step.

    Attributes:
        home: At home.
        tower: On the tower.
    """

    home: Mapping[str, tf.Tensor]
    tower: Mapping[str, tf.Tensor]


class TowerStep:
    """A tower's step by itself, as the model defines it.

    To a tower, its part of the batch is the batch. So what it makes of its rows is what
    the step makes: the phases of a partitioned step come in turn, and nothing is added.
    """

    def __init__(self, own: Steps):
        """Takes the steps of all towers together."""
        self._own, self._context = own, own.pieces.context
        self._partitioned: dict[str, Partitioned] = {}
        self._any_of = graph(lambda local: None)

    def forget(self) -> None:
        """Keeps the step, which is the same in whatever function calls it."""

    def create_variables(self, data: Any) -> None:
        """Has the step create what it creates late; `data` is a batch, or its specs."""
        if not self._context.model.run_eagerly:
            self._partition(self._alike(data))

    def parts(self) -> list[Part]:
        """Returns the step as it stands, which is alone at home for as long."""
        step = functools.partial(self._own.eagerly, "train_step")
        return self._parts([(step, True, True, True)])

    def trace(self, spec: Any) -> list[Part]:
        """Returns the parts, traced for local batches of a kind, of any size."""
        spec = self._alike(spec)
        found = self._partition(spec)
        call = _Call(self._own, found)
        made, parts = [], []
        for function, *of_part in call.functions():
            traced = graph(function).get_concrete_function(spec, *made)
            made.append(batch.specs(traced.structured_outputs))
            parts.append((traced, *of_part))
            if not of_part[0]:
                # Each tower calls it.
                self._context.found.graph = traced.graph
        return self._parts(parts)

    def _parts(self, found):
        """Makes parts of functions: whether they are at home, read, and update."""
        last = len(found) - 1
        home = [k for k, (_, at_home, *_) in enumerate(found) if at_home]
        return [
            Part(
                [function] * len(self._context.plan.towers),
                at_home,
                # The tower is in flight as soon as it has been at home.
                reads or k == home[0],
                updates,
                k != last,
            )
            for k, (function, at_home, reads, updates) in enumerate(found)
        ]

    def _alike(self, data):
        """What such local batches are like, if more than the number of rows differs."""
        spec = batch.local_spec(batch.specs(data), None)
        found = self._any_of.get_concrete_function(spec)
        ((spec,), _) = found.structured_input_signature
        return spec

    def _partition(self, spec):
        if str(spec) not in self._partitioned:
            context, function = self._context, self._own.function("train_step")
            # Not in an `init_scope`, where no tape records.
            with tf.device(context.plan.home):
                # Its rows are all there are: they may meet on the tower.
                with explained_trace(context.model):
                    verdict = judge(
                        *(function, spec), loss_placement="tower", keeps_loss_scale=True
                    )
                    if verdict.refused is not None:
                        verdict = judge(function, spec, keeps_loss_scale=True)
            found = Partitioned(verdict)
            self._partitioned[str(spec)] = found
            self._own.note(found)
            self._own.say("train_step", found, found.compiled)
        return self._partitioned[str(spec)]


class _Call:
    """The functions of the parts of a step, each to be traced."""

    def __init__(self, own: Steps, step: Partitioned):
        """Takes the steps of all towers together, and that of one, partitioned."""
        self._own, self._plan = own, own.pieces.context.plan
        self._trace = trace = step.trace
        self._placement = placement = step.placement
        groups = Late(trace, placement).groups
        uses = [use(group, trace, placement) for group in groups]
        self._phases = [*zip(phases(trace, placement, groups), uses, strict=True)]

    def functions(self) -> list[tuple[Callable[..., Any], bool, bool, bool]]:
        """Returns functions: whether they are at home, read variables, and update.

        A function takes the local batch, and a `_Made` for each one before. The last
        one is at home, and returns the logs.
        """
        found: list[tuple[Callable[..., Any], bool, bool, bool]] = []
        for k, (phase, used) in enumerate(self._phases):
            if _is_at_home(phase, used):
                function = functools.partial(self._at_home, phase, k == 0)
                found.append((function, True, used.reads, used.updates))
            else:
                function = functools.partial(self._on_tower, phase, k + 1)
                found.append((function, False, False, False))
        if found and found[-1][1]:
            last, *of_last = found.pop()
            return [*found, (functools.partial(self._last, last), *of_last)]
        return [*found, (self._logs, True, False, False)]

    def _at_home(self, phase, begins, local, *made):
        """Runs a phase at home; the first one tells how many steps were done."""
        with tf.device(self._plan.home):
            known = self._given(local) | _joined(each.home for each in made)
            done = self._own.steps_done() if begins else known.get(_DONE)
            values = [known[taken.tensor.name] for taken in phase.takes]
            pairs = zip(phase.takes, values, strict=True)
            wanted = self._trace.gradients_of(phase.operations)
            gradients = [v for t, v in pairs if key(t.tensor) in wanted]
            observed = contextlib.nullcontext()
            if gradients:
                observer = self._own.observer(local, done)
                # Of a loss, as far as it is at home by now.
                losses = [known[n] for n in _names(self._trace.targets) if n in known]
                observed = observer.gradients(
                    [gradients], gradients, targets=lambda: losses
                )
            with observed as gate:
                results = phase(values, gate=gate)
            found = dict(zip(_names(phase.makes), results, strict=True))
        return _Made(found if done is None else {**found, _DONE: done}, {})

    def _on_tower(self, phase, following, local, *made):
        """Runs a phase where it is called, on the tower; sends home what home takes."""
        device = None if phase.place.on_device else self._plan.home
        with tf.device(device), tf.name_scope("tower"):
            mine = self._given(local) | _joined(each.tower for each in made)
            home = _joined(each.home for each in made)
            names = dict.fromkeys(taken.tensor.name for taken in phase.takes)
            missing = [name for name in names if name not in mine]
            sent = self._send([home[name] for name in missing], self._plan.home, "")
            known = mine | dict(zip(missing, sent, strict=True))
            values = [known[taken.tensor.name] for taken in phase.takes]
            if phase.draws:
                values.append(tf.cast([0, batch.batch_size(local)], tf.int32))
            xla = self._own.pieces.context.xla and phase.compiles_on(None)
            found = dict(zip(_names(phase.makes), phase(values, xla), strict=True))
            at_home, on_tower = self._needed(following)
            back = [name for name in found if name in at_home]
            sent = self._send([found[name] for name in back], "", self._plan.home)
            kept = {n: v for n, v in (known | found).items() if n in on_tower}
        return _Made(dict(zip(back, sent, strict=True)), kept)

    def _last(self, function, local, *made):
        return self._logs(local, *made, function(local, *made))

    def _logs(self, local, *made):
        """Returns what the step returns."""
        with tf.device(self._plan.home):
            known = self._given(local) | _joined(each.home for each in made)
            return self._trace.packed(
                [self._returned(tensor, known) for tensor in self._trace.returned]
            )

    def _returned(self, tensor, known):
        if tensor.op.type == "Const":
            return tf.constant(tf.get_static_value(tensor), tensor.dtype)
        if self._placement.is_captured(tensor):
            return self._placement.outside(tensor)
        return known[tensor.name]

    def _given(self, local):
        """The local batch, which is all of the batch, by the names of its tensors."""
        given = tf.nest.flatten([self._trace.batch], expand_composites=True)
        values = tf.nest.flatten([local], expand_composites=True)
        pairs = zip(given, values, strict=True)
        found = {tensor.name: value for tensor, value in pairs if tensor is not None}
        return found | {self._trace.fraction.name: tf.ones([], batch.FRACTION)}

    def _needed(self, following):
        """The names of what home, and the tower, take from a phase on."""
        guarded = self._own.pieces.context.guard is not None
        wanted = [*self._trace.returned, *(self._trace.targets if guarded else ())]
        at_home, on_tower = {*_names(wanted)}, set()
        for phase, used in self._phases[following:]:
            names = _names(taken.tensor for taken in phase.takes)
            (at_home if _is_at_home(phase, used) else on_tower).update(names)
        return at_home, on_tower

    def _send(self, values, source, target):
        """Sends values from one device to another, "" for that of the tower."""
        if not any(map(self._plan.packs, self._plan.devices)):
            if not target:
                return values
            with tf.device(target):
                return packing.copy(values)
        # Of rows, nobody knows how many there are.
        fixed = [v if v.shape.is_fully_defined() else None for v in values]
        sent = packing.send(fixed, source, target)
        with tf.device(target):
            return [
                tf.identity(value) if mine is None else mine
                for mine, value in zip(sent, values, strict=True)
            ]


def _is_at_home(phase, used):
    """Tells whether a phase runs at home: what has to do with no state need not."""
    return used.stateful and not phase.place.on_towers


def _names(tensors):
    return [tensor.name for tensor in tensors]


def _joined(found):
    return {name: value for each in found for name, value in each.items()}
