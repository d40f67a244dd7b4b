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
from towers.builders.guard import guarded_step, steps_before
from towers.builders.steps import Steps, compute_eagerly, step_name
from towers.collectives import batch, packing
from towers.devices.names import HOST
from towers.partition.call import Gradients
from towers.partition.partitioned import Partitioned, judge
from towers.partition.phases import Late, phases, use_of_state
from towers.tower.errors import explained_trace


class TowerPart(NamedTuple):
    """A part of a tower's step, done in one go at home or on the tower's device.

    The last part of a step is at home, and returns the logs.

    Attributes:
        function: Takes the local batch, and the results of all parts before.
        at_home: Whether it runs at home, where one tower is at a time.
        reads: Whether it reads there what towers compute with.
        updates: Whether it changes that.
        goes_on: Whether the tower comes home again in this step.
    """

    function: Callable[..., Any]
    at_home: bool = True
    reads: bool = False
    updates: bool = False
    goes_on: bool = False


def graph(function: Callable) -> Callable:
    """Makes a function to be traced for several kinds of local batches."""
    return tf.function(function, autograph=False, reduce_retracing=True)


_DONE = "steps done"


class _Made(NamedTuple):
    """The results of a part of a step, by the names of tensors of the traced step.

    Attributes:
        home: Those at home.
        tower: Those on the tower.
    """

    home: Mapping[str, tf.Tensor]
    tower: Mapping[str, tf.Tensor]


class TowerStep:
    """A tower's step by itself, as the model defines it.

    To a tower, its part of the batch is the batch. So what it makes of its rows is what
    the step makes: the phases of a partitioned step come in turn, and nothing is added.
    """

    def __init__(self, steps: Steps):
        """Takes the steps of all towers together."""
        self._steps, self._context = steps, steps.pieces.context
        self._partitioned: dict[str, Partitioned] = {}
        self._any_of = graph(lambda local: None)

    def create_variables(self, data: Any) -> None:
        """Has the step create what it creates late; `data` is a batch, or its specs."""
        if not self._context.model.run_eagerly:
            self._partition(self._any_number(data))

    def parts(self) -> list[TowerPart]:
        """Returns the step as it stands, in one part that is alone at home."""
        step = functools.partial(compute_eagerly, self._steps.pieces, "train_step")
        return _in_flight([TowerPart(step, reads=True, updates=True)])

    def trace(self, spec: Any) -> list[TowerPart]:
        """Returns the parts, traced for local batches of a kind, of any size."""
        spec = self._any_number(spec)
        call = TowerCall(self._steps, self._partition(spec))
        made, parts = [], []
        for part in call.parts():
            traced = graph(part.function).get_concrete_function(spec, *made)
            made.append(batch.specs(traced.structured_outputs))
            parts.append(part._replace(function=traced))
            if not part.at_home:
                # Each tower calls it.
                self._context.facts.graph = traced.graph
        return _in_flight(parts)

    def _any_number(self, data):
        """Returns the specs of local batches that differ in the number of rows only."""
        spec = batch.local_spec(batch.specs(data), None)
        traced = self._any_of.get_concrete_function(spec)
        ((spec,), _) = traced.structured_input_signature
        return spec

    def _partition(self, spec):
        if str(spec) not in self._partitioned:
            context, function = (
                self._context,
                self._context.step_function("train_step"),
            )
            # Not in an `init_scope`, where no tape records.
            with tf.device(context.plan.home):
                # Its rows are all there are: they may meet on the tower.
                with explained_trace(context.model):
                    given = {"home": context.plan.home, "keeps_loss_scale": True}
                    verdict = judge(function, spec, loss_placement="tower", **given)
                    if verdict.refused is not None:
                        verdict = judge(function, spec, **given)
            partitioned = Partitioned(verdict)
            self._partitioned[str(spec)] = partitioned
            lines = partitioned.compiled(step_name(context, "train_step"))
            self._steps.report("train_step", partitioned, lines)
        return self._partitioned[str(spec)]


class TowerCall:
    """The parts of a tower's step, each with a function that is to be traced."""

    def __init__(self, steps: Steps, step: Partitioned):
        """Takes the steps of all towers together, and that of one, partitioned."""
        self._steps, self._context = steps, steps.pieces.context
        self._plan = self._context.plan
        self._trace = trace = step.trace
        self._placement = placement = step.placement
        groups = Late(trace, placement).groups
        uses = [use_of_state(group, trace, placement) for group in groups]
        self._phases = [*zip(phases(trace, placement, groups), uses, strict=True)]

    def parts(self) -> list[TowerPart]:
        """Returns the parts in order.

        A function takes the local batch, and a `_Made` for each part before. The last
        part is at home, and returns the logs.
        """
        parts: list[TowerPart] = []
        for k, (phase, used) in enumerate(self._phases):
            if _is_at_home(phase, used):
                function = functools.partial(self._at_home, phase, k == 0)
                part = TowerPart(function, reads=used.reads, updates=used.updates)
            else:
                function = functools.partial(self._on_tower, phase, k + 1)
                part = TowerPart(function, at_home=False)
            parts.append(part)
        if not parts or not parts[-1].at_home:
            return [*parts, TowerPart(self._logs)]
        *others, last = parts
        function = functools.partial(self._last, last.function)
        return [*others, last._replace(function=function)]

    def _at_home(self, phase, begins, local, *made):
        """Runs a phase at home; the first one reads how many steps were done."""
        with tf.device(self._plan.home):
            known = self._batch_by_name(local) | _joined(part.home for part in made)
            asked, model = self._context.guard, self._context.model
            done = steps_before(asked, model) if begins else known.get(_DONE)
            values = [known[taken.tensor.name] for taken in phase.takes]
            pairs = zip(phase.takes, values, strict=True)
            wanted = self._trace.gradients_of(phase.operations)
            gradients = [v for t, v in pairs if key(t.tensor) in wanted]
            observed = contextlib.nullcontext()
            whole = functools.partial(self._steps.pieces.batches.whole, local)
            guard = guarded_step(asked, model, whole, done)
            if gradients and guard is not None:
                # The losses are those that are at home by now.
                losses = [known[n] for n in _names(self._trace.targets) if n in known]
                observed = guard.before(
                    Gradients([gradients], gradients, losses=losses)
                )
            # Seeds are the host's, and are counted there.
            device = self._plan.home if phase.place.on_device else HOST
            with observed as gate, tf.device(device):
                results = phase(values, gate=gate)
            results = dict(zip(_names(phase.makes), results, strict=True))
        return _Made(results if done is None else {**results, _DONE: done}, {})

    def _on_tower(self, phase, following, local, *made):
        """Runs a phase where it is called, on the tower; sends home what home takes."""
        device = None if phase.place.on_device else self._plan.home
        with tf.device(device), tf.name_scope("tower"):
            there = self._batch_by_name(local) | _joined(part.tower for part in made)
            home = _joined(part.home for part in made)
            names = dict.fromkeys(taken.tensor.name for taken in phase.takes)
            missing = [name for name in names if name not in there]
            sent = self._send([home[name] for name in missing], self._plan.home, "")
            known = there | dict(zip(missing, sent, strict=True))
            values = [known[taken.tensor.name] for taken in phase.takes]
            if phase.draws:
                values.append(tf.cast([0, batch.batch_size(local)], tf.int32))
            xla = self._context.xla and phase.compiles_on(None)
            results = dict(zip(_names(phase.makes), phase(values, xla), strict=True))
            at_home, on_tower = self._needed(following)
            back = [name for name in results if name in at_home]
            sent = self._send([results[name] for name in back], "", self._plan.home)
            kept = {n: v for n, v in (known | results).items() if n in on_tower}
        return _Made(dict(zip(back, sent, strict=True)), kept)

    def _last(self, function, local, *made):
        return self._logs(local, *made, function(local, *made))

    def _logs(self, local, *made):
        """Returns what the step returns."""
        with tf.device(self._plan.home):
            known = self._batch_by_name(local) | _joined(part.home for part in made)
            return self._trace.packed(
                [self._returned(tensor, known) for tensor in self._trace.returned]
            )

    def _returned(self, tensor, known):
        fixed = self._placement.fixed(tensor)
        return known[tensor.name] if fixed is None else fixed

    def _batch_by_name(self, local):
        """Returns the tensors of the local batch, which is all of the batch."""
        by_name = {tensor.name: value for tensor, value in self._trace.fed(local)}
        return by_name | {self._trace.fraction.name: tf.ones([], batch.FRACTION)}

    def _needed(self, following):
        """Returns the names that home, and the tower, take from a phase on."""
        guarded = self._context.guard is not None
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
                tf.identity(value) if there is None else there
                for there, value in zip(sent, values, strict=True)
            ]


def _in_flight(parts):
    """Has a tower be in flight from its first part at home to its last part."""
    first = next(k for k, part in enumerate(parts) if part.at_home)
    last = len(parts) - 1
    return [
        part._replace(reads=part.reads or k == first, goes_on=k != last)
        for k, part in enumerate(parts)
    ]


def _is_at_home(phase, used):
    """Tells whether a phase runs at home: what has to do with no state need not."""
    return used.stateful and not phase.place.on_towers


def _names(tensors):
    return [tensor.name for tensor in tensors]


def _joined(parts):
    return {name: value for part in parts for name, value in part.items()}
