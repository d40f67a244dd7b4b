"""Cuts the model's step into the parts that one tower runs on its device and at home.

The step is cut as for `loss_placement="tower"`, for a single tower: each tensor of the
tower is complete, so nothing is added up. Phases that use variables run at home, under
the lock of `staleness.py`; all others run on the tower. A step with several phases at
home takes the lock several times.
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
    """A part of a tower's step that runs without interruption, at home or on the tower.

    The last part of a step runs at home, and returns the logs.

    Attributes:
        function: Takes the local batch and the results of all previous parts.
        at_home: Whether the part runs at home, where one tower runs at a time.
        reads: Whether the part reads variables that towers compute with.
        updates: Whether the part updates such variables.
        goes_on: Whether a later part of the step runs at home again.
    """

    function: Callable[..., Any]
    at_home: bool = True
    reads: bool = False
    updates: bool = False
    goes_on: bool = False


def graph(function: Callable) -> Callable:
    """Makes a `tf.function` that may be traced for several kinds of local batches."""
    return tf.function(function, autograph=False, reduce_retracing=True)


_DONE = "steps done"


class _Made(NamedTuple):
    """The results of a part of a step, by tensor name in the traced step.

    Attributes:
        home: Results at home.
        tower: Results on the tower.
    """

    home: Mapping[str, tf.Tensor]
    tower: Mapping[str, tf.Tensor]


class TowerStep:
    """The model's step on the local batch of a single tower.

    To a tower, its local batch is the whole batch: the phases of the partitioned step
    run in order, and no tensor is added over towers.
    """

    def __init__(self, steps: Steps):
        """Takes the steps of all towers together, from which this one is derived."""
        self._steps, self._context = steps, steps.pieces.context
        self._partitioned: dict[str, Partitioned] = {}
        self._any_of = graph(lambda local: None)

    def create_variables(self, data: Any) -> None:
        """Traces the step to create its variables; `data` is a batch or its specs."""
        if not self._context.model.run_eagerly:
            self._partition(self._any_number(data))

    def parts(self) -> list[TowerPart]:
        """Returns the step, not traced, as one part that runs at home."""
        step = functools.partial(compute_eagerly, self._steps.pieces, "train_step")
        return _in_flight([TowerPart(step, reads=True, updates=True)])

    def trace(self, spec: Any) -> list[TowerPart]:
        """Returns the parts of the step, traced for local batches of any size."""
        spec = self._any_number(spec)
        call = TowerCall(self._steps, self._partition(spec))
        made, parts = [], []
        for part in call.parts():
            traced = graph(part.function).get_concrete_function(spec, *made)
            made.append(batch.specs(traced.structured_outputs))
            parts.append(part._replace(function=traced))
            if not part.at_home:
                # Each tower calls this graph.
                self._context.facts.graph = traced.graph
        return _in_flight(parts)

    def _any_number(self, data):
        """Returns the specs of `data`, with an unknown number of rows."""
        spec = batch.local_spec(batch.specs(data), None)
        traced = self._any_of.get_concrete_function(spec)
        ((spec,), _) = traced.structured_input_signature
        return spec

    def _partition(self, spec):
        """Returns the step, partitioned for local batches like `spec`."""
        if str(spec) not in self._partitioned:
            context = self._context
            function = context.step_function("train_step")
            as_taken = context.local_spec(spec)
            # Gradient tapes record nothing within an `init_scope`.
            with tf.device(context.plan.home):
                # The local batch is complete, so its rows may meet on the tower.
                with explained_trace(context.model):
                    options = {"home": context.plan.home, "keeps_loss_scale": True}
                    verdict = judge(
                        function, as_taken, loss_placement="tower", **options
                    )
                    if verdict.refused is not None:
                        verdict = judge(function, as_taken, **options)
            partitioned = Partitioned(verdict)
            self._partitioned[str(spec)] = partitioned
            lines = partitioned.compiled(step_name(context, "train_step"))
            self._steps.report("train_step", partitioned, lines)
        return self._partitioned[str(spec)]


class TowerCall:
    """Makes the functions of the parts of a tower's step, which are then traced."""

    def __init__(self, steps: Steps, step: Partitioned):
        """Takes the steps of all towers together, and one tower's partitioned step."""
        self._steps, self._context = steps, steps.pieces.context
        self._plan = self._context.plan
        self._trace = trace = step.trace
        self._placement = placement = step.placement
        groups = Late(trace, placement).groups
        uses = [use_of_state(group, trace, placement) for group in groups]
        self._phases = [*zip(phases(trace, placement, groups), uses, strict=True)]

    def parts(self) -> list[TowerPart]:
        """Returns the parts in order.

        The function of a part takes the local batch and a `_Made` for each previous
        part. The last part runs at home, and returns the logs.
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
        """Runs a phase at home; the first phase reads the number of steps done."""
        with tf.device(self._plan.home):
            known = self._batch_by_name(local) | _joined(part.home for part in made)
            guard, model = self._context.guard, self._context.model
            done = steps_before(guard, model) if begins else known.get(_DONE)
            values = [known[taken.tensor.name] for taken in phase.takes]
            pairs = zip(phase.takes, values, strict=True)
            wanted = self._trace.gradients_of(phase.operations)
            gradients = [v for t, v in pairs if key(t.tensor) in wanted]
            observed = contextlib.nullcontext()
            whole_batch = functools.partial(self._steps.pieces.batches.whole, local)
            guarded = guarded_step(guard, model, whole_batch, done)
            if gradients and guarded is not None:
                # Only the losses that have reached home.
                losses = [known[n] for n in _names(self._trace.targets) if n in known]
                observed = guarded.before(
                    Gradients([gradients], gradients, losses=losses)
                )
            # Seeds stay on the host, which counts them.
            device = self._plan.home if phase.place.on_device else HOST
            with observed as gate, tf.device(device):
                results = phase(values, gate=gate)
            results = dict(zip(_names(phase.makes), results, strict=True))
        return _Made(results if done is None else {**results, _DONE: done}, {})

    def _on_tower(self, phase, following, local, *made):
        """Runs a phase on the tower, and sends home the results that home needs."""
        device = None if phase.place.on_device else self._plan.home
        with tf.device(device), tf.name_scope("tower"):
            on_device = self._batch_by_name(local) | _joined(
                part.tower for part in made
            )
            home = _joined(part.home for part in made)
            names = dict.fromkeys(taken.tensor.name for taken in phase.takes)
            missing = [name for name in names if name not in on_device]
            sent = self._send([home[name] for name in missing], self._plan.home, "")
            known = on_device | dict(zip(missing, sent, strict=True))
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
        """Returns the values that the step returns."""
        with tf.device(self._plan.home):
            known = self._batch_by_name(local) | _joined(part.home for part in made)
            return self._trace.packed(
                [self._returned(tensor, known) for tensor in self._trace.returned]
            )

    def _returned(self, tensor, known):
        fixed = self._placement.fixed(tensor)
        return known[tensor.name] if fixed is None else fixed

    def _batch_by_name(self, local):
        """Returns the tensors of the local batch by name, as the whole batch."""
        by_name = {tensor.name: value for tensor, value in self._trace.fed(local)}
        return by_name | {self._trace.fraction.name: tf.ones([], batch.FRACTION)}

    def _needed(self, following):
        """Returns the tensor names that home, and the tower, need from a phase on."""
        guarded = self._context.guard is not None
        wanted = [*self._trace.returned, *(self._trace.targets if guarded else ())]
        at_home, on_tower = {*_names(wanted)}, set()
        for phase, used in self._phases[following:]:
            names = _names(taken.tensor for taken in phase.takes)
            (at_home if _is_at_home(phase, used) else on_tower).update(names)
        return at_home, on_tower

    def _send(self, values, source, target):
        """Sends values from one device to another; "" is the tower's device."""
        if not any(map(self._plan.packs, self._plan.devices)):
            if not target:
                return values
            with tf.device(target):
                return packing.copy(values)
        # Tensors of rows have no static size, so they cannot be packed.
        fixed = [v if v.shape.is_fully_defined() else None for v in values]
        sent = packing.send(fixed, source, target)
        with tf.device(target):
            return [
                tf.identity(value) if there is None else there
                for there, value in zip(sent, values, strict=True)
            ]


def _in_flight(parts):
    """Marks a tower as in flight from its first part at home to its last part."""
    first = next(k for k, part in enumerate(parts) if part.at_home)
    last = len(parts) - 1
    return [
        part._replace(reads=part.reads or k == first, goes_on=k != last)
        for k, part in enumerate(parts)
    ]


def _is_at_home(phase, used):
    """Returns whether a phase runs at home: phases without state need not."""
    return used.stateful and not phase.place.on_towers


def _names(tensors):
    return [tensor.name for tensor in tensors]


def _joined(parts):
    return {name: value for part in parts for name, value in part.items()}
