"""One call of a partitioned function: home, towers and copies run its phases in turn.

`PartitionedCall.run` is the main loop: each phase runs where it is placed. Before a
phase at home, the values of the towers are combined (`combined.py`); before a phase on
towers, its inputs are sent to the towers. A value has the key of its tensor in the
traced function, and stays where it was made: at home, on a tower, or on the device of a
copy of the variables.
"""

import collections
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from towers.analysis import effects
from towers.analysis.kinds import ROWS, SUM
from towers.analysis.layer_calls import key
from towers.collectives import batch, packing, reduce
from towers.devices.names import HOST, is_gpu
from towers.keras_adapter.graphs import (
    calls_functions,
    made_in,
    without_auto_control_deps,
)
from towers.keras_adapter.variables import empty, fill
from towers.layers.parameters import ShardedParameter
from towers.loop.timers import StepTimers
from towers.partition.combined import REDUCE_SCOPE, Combination, Travelled
from towers.partition.gathers import gather_once
from towers.partition.phases import Phase, Taken
from towers.partition.placement import LOOK_UP, Placement
from towers.partition.trace import OptimizerCall, Trace
from towers.plan import Plan
from towers.program.features import feature
from towers.tower.errors import ModelError


class Gradients(NamedTuple):
    """Gradients that a step is about to use.

    Attributes:
        of_towers: Each tower's parts of the gradients, a list for each tower.
        sums: The sums of the parts.
        packed: The gradients that were sent packed, and their layouts.
        losses: The tensors that were differentiated, as far as these are known.
    """

    of_towers: Sequence[Sequence[reduce.Gradient]]
    sums: Sequence[reduce.Gradient]
    packed: Sequence[reduce.Packed] = ()
    losses: Sequence[tf.Tensor] = ()


class StepGuard(Protocol):
    """Stops a step before it uses a gradient that is not finite.

    Attributes:
        reads_losses: Whether the guard checks the losses, too.
    """

    reads_losses: bool

    def before(self, gradients: Gradients) -> AbstractContextManager[tf.Tensor]:
        """Returns the context in which gradients are used.

        The context yields a tensor that exists only if the step goes on.
        """


class UpdatesApart(Protocol):
    """Reduces gradients to the owners of variables, and updates the variables.

    The stores in `builders/stores/` implement this.
    """

    def add(
        self,
        update: OptimizerCall,
        parts: Sequence[Sequence[reduce.Gradient]],
        whole: Mapping[int, reduce.Gradient],
    ) -> Sequence[Sequence[reduce.Gradient]]:
        """Sums the gradients that an optimizer is to apply, for each copy.

        Args:
            update: The optimizer's call.
            parts: For each device, its part of each gradient.
            whole: The gradients that home has in full, by their indices.
        """

    def apply(self, sums: Sequence[Sequence[reduce.Gradient]]) -> None:
        """Applies the optimizer with the sums that `add` returned."""


class Copied(NamedTuple):
    """The variables of which each tower has a copy.

    A tower reads its own copies. An update in the trace runs once for each tower, and
    changes the tower's copies.

    Attributes:
        handles: For each tower, the handles of its copies, by the `id` of the
            variable's handle. Home reads the copies of the first tower, which are the
            variables themselves.
        all_reduce_alg: The algorithm of the all-reduce; see `reduce.all_reduce`.
    """

    handles: Sequence[Mapping[int, tf.Tensor]]
    all_reduce_alg: str


class Cut(NamedTuple):
    """A traced function, cut into phases.

    Attributes:
        trace: The traced function.
        placement: Where its operations run.
        copied: The variables that towers have copies of, if any.
        updates_apart: Applies the optimizers in place of the function, if not `None`.
        phases: The phases in order, with one for each copy of the variables.
    """

    trace: Trace
    placement: Placement
    copied: Copied | None
    updates_apart: UpdatesApart | None
    phases: Sequence[Sequence[Phase]]


class Execution(NamedTuple):
    """How a call of a partitioned function is executed.

    Attributes:
        usual_rows: Number of examples of most batches, if known.
        towers_by_xla: Whether XLA compiles the phases of towers.
        updates_by_xla: Whether XLA compiles the updates of optimizers.
    """

    usual_rows: int | None = None
    towers_by_xla: bool = False
    updates_by_xla: bool = False


DEFAULT_EXECUTION = Execution()


class PartitionedCall:
    """One call of a partitioned function, with the values made so far."""

    def __init__(
        self,
        cut: Cut,
        plan: Plan,
        local_batches: Sequence[Any],
        size: int | tf.Tensor,
        whole: Any,
        execution: Execution,
        timers: StepTimers | None,
        guard: StepGuard | None,
    ):
        """Takes the function and a batch; see `Partitioned.__call__`."""
        self._trace, self._placement, self._copied, *_ = cut
        self._updates_apart, self._phases = cut.updates_apart, cut.phases
        self._plan, self._execution = plan, execution
        self._timers, self._guard = timers, guard
        # Once set, this tensor must be available before home changes anything.
        self._gate: tf.Tensor | None = None
        # Calls of phases with checks that no later phase waits for yet.
        self._checks: list[tf.Operation] = []
        # The outputs of the towers' last phase, for each device.
        self._computed: list[list[tf.Tensor]] = []
        # The values that towers received packed, before their first phase.
        self._received: list[tf.Tensor] = []
        # Whether the towers run their first phase.
        self._begins = False
        self._bounds = plan.bounds(size)
        self._sizes = plan.sizes(size)
        fractions = plan.fractions(self._sizes, size)
        self._combined = Combination(
            plan, self._placement, self._sizes, fractions, timers
        )
        # The whole batch's values on the device of each copy. The first device is home.
        count = 1 if self._copied is None else len(self._copied.handles)
        self._copies: list[dict[Any, tf.Tensor]] = [{} for _ in range(count)]
        self._home = self._copies[0]
        if whole is not None:
            self._home.update(self._batch_by_key(whole))
        self._towers: list[dict[Any, tf.Tensor]] = []
        for local, fraction in zip(local_batches, fractions, strict=True):
            values = self._batch_by_key(local)
            self._towers.append({**values, key(self._trace.fraction): fraction})
        # The towers of one device compute micro-batches in turn, and accumulate sums.
        self._in_turn = plan.pipeline.micro_batches
        self._sums: list[dict[Any, tf.Tensor]] = [{} for _ in plan.replicas]
        # The values sent to each stage of a tower, and the packed buffers, by their
        # contents.
        self._sent: dict[tuple[int, int], dict[Any, tf.Tensor]]
        self._sent = collections.defaultdict(dict)
        self._buffers: dict[Any, list[tf.Tensor]] = {}

    def _batch_by_key(self, data):
        """Returns the tensors of a batch, or of a tower's part, by their keys."""
        return {key(tensor): value for tensor, value in self._trace.fed(data)}

    # The main loop.

    def run(self) -> list[Any]:
        """Runs the phases, and returns the function's results.

        Returns:
            The results at home; then, in the same structure, the results on the device
            of each other copy: sums that were all-reduced, `None` for all others.
        """
        for number, of_copies in enumerate(self._phases):
            if self._plan.hosts.count > 1:
                self._add_over_hosts(self._phases[number:])
            self._run_phase(of_copies)
        if self._timers is not None and self._computed:
            self._timers.received(self._received)
            self._timers.computed(self._computed)
        with tf.device(self._plan.home):
            return [*map(self._trace.packed, self._results())]

    def _add_over_hosts(self, coming):
        """All-reduces over hosts, in one go, the sums for the next phases at home.

        `coming` has the phases that are still to run.
        """
        at_home = itertools.takewhile(
            lambda of_copies: not of_copies[0].place.on_towers, coming
        )
        takes = [taken.tensor for (phase, *_) in at_home for taken in phase.takes]
        on_towers = self._towers[0].keys()
        sums = {
            key(t): t for t in takes if key(t) in on_towers and key(t) not in self._home
        }
        gradients = [t for t in sums.values() if self._placement.is_gradient(t)]
        if self._trace.updates_apart:
            sums = {n: t for n, t in sums.items() if not self._placement.is_gradient(t)}
        else:
            self._all_reduce(gradients)
        if not sums:
            return
        with tf.device(self._plan.home), tf.name_scope("home"):
            self._at_home([*sums.values()])

    def _run_phase(self, of_copies):
        """Runs a phase where it is placed; `of_copies` has the phase for each copy."""
        phase = of_copies[0]
        if phase.place.exchanges:
            self._exchange(phase)
            return
        if not phase.place.on_towers:
            self._wait_for_checks()
        with self._stand_ins_filled(phase), self._noting_checks(phase):
            if phase.place.on_towers:
                self._run_on_towers(of_copies)
            elif phase.place.updates and self._trace.updates_apart:
                self._update_apart(phase)
            else:
                self._run_at_home(of_copies)

    def _results(self):
        """Returns the function's results that the device of each copy has."""
        tensors = self._trace.returned
        self._all_reduce(tensors)
        others = [[known.get(key(t)) for t in tensors] for known in self._copies[1:]]
        return [self._at_home(tensors), *others]

    @contextmanager
    def _noting_checks(self, phase):
        """Records a phase with checks, for which later phases at home wait."""
        if not phase.checks or tf.executing_eagerly():
            yield
            return
        with made_in(tf.compat.v1.get_default_graph()) as created:
            yield
        self._checks += [op for op in created if calls_functions(op)]

    def _wait_for_checks(self):
        """Makes home wait until the checks of all phases so far have passed.

        An update does not wait for the check of a later phase, and may have been
        applied when that check fails.
        """
        if self._checks:
            gates = [] if self._gate is None else [self._gate]
            with tf.control_dependencies([*self._checks, *gates]), tf.device(HOST):
                self._gate = tf.identity(True)
            self._checks = []

    @contextmanager
    def _stand_ins_filled(self, phase):
        """Fills stand-ins of sharded variables for a phase, as for a loop's body."""
        tables = []
        if not phase.place.updates:
            tables = self._placement.stand_ins_of(phase.captured.values())
        for table in tables:
            fill(table.stand_in, tf.convert_to_tensor(table))
        try:
            yield
        finally:
            for table in tables:
                empty(table.stand_in)

    # A phase on the towers.

    def _run_on_towers(self, of_copies):
        phase = of_copies[0]
        with tf.device(self._plan.home):
            self._at_home([taken.tensor for taken in phase.takes if taken.whole])
        self._begins = not self._computed
        self._computed, outputs = [[] for _ in self._plan.replicas], []
        if phase.has_stages:
            self._run_in_stages(of_copies)
            return
        for k, tower in enumerate(self._plan.towers):
            phase = of_copies[self._copy_of(k)]
            # Micro-batches of one device run one after the other.
            before = outputs[:1] if k % self._in_turn else []
            with (
                tf.device(tower.device if phase.place.on_device else self._plan.home),
                tf.name_scope(self._scope(k)),
                tf.control_dependencies(before),
            ):
                self._send(k, phase.takes)
                values = [self._on_tower(k, taken) for taken in phase.takes]
                if phase.draws:
                    values.append(self._rows(k))
                # TensorFlow would run calls with checks one after the other. Towers
                # may check in any order. A call that takes variables waits only for
                # other calls that take them, so it needs no exemption.
                with nullcontext() if phase.captured else without_auto_control_deps():
                    outputs = self._call_on_tower(k, phase, values)
                self._towers[k].update(zip(map(key, phase.makes), outputs, strict=True))
                self._add(k, phase.makes)
            self._computed[k // self._in_turn] += outputs

    def _call_on_tower(self, k, phase, values):
        """Calls a phase with a tower's values, even if the tower may have no rows."""
        size, usual = self._sizes[k], None
        xla = self._execution.towers_by_xla
        xla = xla and phase.compiles_on(self._plan.towers[k].device)
        if isinstance(size, int) and size > 0:
            return phase(values, xla)
        if self._execution.usual_rows and (self._plan.on_gpus or xla):
            # With unknown shapes, the host would wait for the GPU.
            usual = self._plan.sizes(self._execution.usual_rows)[k] or None
        # The first of all towers has an example, unless the batch is empty.
        idle = self._plan.towers[k].index > 0
        return phase.of_rows(values, size, idle, usual, xla)

    def _run_in_stages(self, of_copies):
        """Runs a phase on each tower, whose stages take turns at its micro-batches."""
        for replica in range(len(self._plan.replicas)):
            phase = of_copies[self._copy_of(replica * self._in_turn)]
            with without_auto_control_deps(phase.captured.values()):
                self._take_turns(replica, phase)

    def _take_turns(self, replica, phase):
        """Runs a phase of a tower, in stages, for each of its micro-batches."""
        timed = self._timers is not None and not self._plan.on_gpus
        staged = phase.staged(timed)
        turn_timer = self._timers.turns_of_tower() if timed else None
        takes = dict(zip(map(key, staged.inputs), phase.takes, strict=False))
        makes = dict(zip(map(key, staged.outputs), phase.makes, strict=True))
        results: list[dict[Any, tf.Tensor]] = [{} for _ in range(self._in_turn)]
        last = collections.defaultdict(list)
        slots = staged.slots(self._in_turn)
        for slot, after in zip(slots, staged.waits(slots), strict=True):
            stage, known = staged.turns[slot.turn].stage, results[slot.micro_batch]
            k = replica * self._in_turn + slot.micro_batch
            size = self._sizes[k]
            # The first of all towers has an example, unless the batch is empty.
            some = self._plan.towers[k].index == 0
            some = some or (isinstance(size, int) and size > 0)
            with (
                tf.device(self._plan.towers[k].devices[stage]),
                tf.name_scope(f"{self._scope(k)}/stage_{stage}/"),
            ):
                sent = [takes[n] for n in staged.taken_by(stage) if n in takes]
                self._send(k, sent, stage)
                for part in staged.phases_of[slot.turn]:
                    with tf.control_dependencies(last[stage]):
                        values = [
                            known[n]
                            if n in known
                            else self._on_stage(k, takes.get(n), stage)
                            for n in part.takes
                        ]
                        values, end = part(values, None if some else size)
                    last[stage] = [v.op for v in values[:1]] or last[stage]
                    self._computed[replica] += values
                    for name, value in zip(part.makes, values, strict=True):
                        known[name] = value
                        if name in makes:
                            self._towers[k][key(makes[name])] = value
                            self._add(k, [makes[name]])
            if turn_timer is not None:
                turn_timer.note(stage, after, values[:1], end)

    def _on_stage(self, k, taken, stage):
        """Returns an input of a stage; `taken` is `None` for the row range of draws."""
        return self._rows(k) if taken is None else self._on_tower(k, taken, stage)

    def _rows(self, k):
        """Returns the first of a tower's rows, and their number: an int32 vector."""
        return tf.cast(tf.stack([self._bounds[k][0], self._sizes[k]]), tf.int32)

    def _copy_of(self, k):
        """Returns the index of the variable copy that a tower computes with."""
        return k // self._in_turn if len(self._copies) > 1 else 0

    def _scope(self, k):
        if self._in_turn == 1:
            return f"tower_{k}"
        return f"tower_{k // self._in_turn}/micro_batch_{k % self._in_turn}"

    # Inputs of a tower, and its sums.

    def _send(self, k, takes, stage=0):
        """Sends a tower the values that home has; packed, where this is faster."""
        plan, device = self._plan, self._plan.towers[k].devices[stage]
        sent = self._sent[k // self._in_turn, stage]
        copy = self._copies[self._copy_of(k)]
        wanted = {
            key(tensor): self._home[key(tensor)]
            for tensor, is_total, _ in takes
            if key(tensor) not in sent
            and (copy is self._home or key(tensor) not in copy)
            and (is_total or key(tensor) not in self._towers[k])
            and (is_total or self._placement.kind(tensor) is not ROWS)
            and packing.fits(self._home[key(tensor)])
        }
        numbers = {n: v for n, v in wanted.items() if v.dtype == packing.INTEGER}
        others = {n: v for n, v in wanted.items() if n not in numbers}
        if plan.packs(device):
            received = self._in_one_piece(others, plan.home)
            sent.update(received)
            if self._begins:
                self._received += received.values()
        if is_gpu(device):
            # GPUs read integers such as seeds in the host's memory.
            source = HOST if is_gpu(plan.home) else plan.home
            sent.update(self._in_one_piece(numbers, source))

    def _in_one_piece(self, values, source):
        """Returns values, by their names, as received packed from a device."""
        if (names := tuple(values)) not in self._buffers:
            with tf.device(source), tf.name_scope("read"):
                self._buffers[names] = packing.pack([*values.values()])
        received = packing.unpack(self._buffers[names], [*values.values()])
        return dict(zip(names, received, strict=True))

    def _on_tower(self, k, taken, stage=0):
        """Returns an input for a stage of a tower: the tower's value, or home's."""
        tensor, is_total, _ = taken
        if not is_total and key(tensor) in self._towers[k]:
            return self._towers[k][key(tensor)]
        if not is_total and self._placement.kind(tensor) is ROWS:
            value = self._home[key(tensor)]
            rows = self._rows_of_tower(k, value, self._placement.blocks(tensor))
            self._towers[k][key(tensor)] = packing.copy(rows)
            return self._towers[k][key(tensor)]
        sent = self._sent[k // self._in_turn, stage]
        if key(tensor) not in sent:
            # Without copies, home has the only value.
            value = self._copies[self._copy_of(k)].get(key(tensor))
            value = self._home[key(tensor)] if value is None else value
            # On a GPU, a loop runs on the device of this copy. Without the copy,
            # TensorFlow keeps the values of the loop on the default device. To a CPU,
            # TensorFlow sends what its operations take.
            on_gpu = is_gpu(self._plan.towers[k].devices[stage])
            on_gpu = on_gpu or is_gpu(self._plan.home)
            sent[key(tensor)] = packing.copy(value) if on_gpu else value
        return sent[key(tensor)]

    def _rows_of_tower(self, k, value, blocks):
        """Slices a tower's rows from a tensor of the whole batch."""
        if blocks is None:
            return batch.take(value, *self._bounds[k])
        total = batch.batch_size(value) // sum(blocks)
        parts = tf.split(value, [count * total for count in blocks])
        start, end = self._bounds[k]
        rows = [
            batch.take(part, count * start, count * end)
            for part, count in zip(parts, blocks, strict=True)
        ]
        return tf.concat(rows, axis=0)

    def _add(self, k, tensors):
        """Adds a micro-batch's parts of sums to those of earlier micro-batches."""
        if self._in_turn == 1:
            return
        sums = self._sums[k // self._in_turn]
        for tensor in filter(self._is_added, tensors):
            value = self._towers[k][key(tensor)]
            if value.dtype.size < 4:
                value = tf.cast(value, tf.float32)
            before = sums.get(key(tensor))
            sums[key(tensor)] = value if before is None else before + value

    def _is_added(self, tensor):
        """Checks whether the parts of a tensor are accumulated over micro-batches."""
        return packing.fits(tensor) and self._placement.kind(tensor) is SUM

    # A phase at home, or on the device of each copy of the variables.

    def _run_at_home(self, of_copies):
        phase = of_copies[0]
        takes = [taken.tensor for taken in phase.takes]
        scope = "apply" if phase.place.updates else "home"
        with tf.device(self._device(phase)), tf.name_scope(scope):
            if phase.place.on_copies:
                self._all_reduce(takes)
            self._at_home(takes)
            with self._guarded_phase(phase):
                copies = of_copies if phase.place.on_copies else [phase]
                for k, phase in enumerate(copies):
                    self._run_on_copy(k, phase)

    def _run_on_copy(self, k, phase):
        """Runs a phase on the device of a copy of the variables; the first is home."""
        device = self._plan.replicas[k].device if k else self._device(phase)
        with tf.device(device):
            values = [self._of_copy(k, taken.tensor) for taken in phase.takes]
            outputs = phase(values, self._compiles_update(phase, device), self._gate)
            if phase.place.of_first_host and outputs and self._plan.hosts.count > 1:
                purpose = f"'{phase.makes[0].name}'"
                outputs = self._plan.hosts.broadcast(outputs, purpose)
        self._copies[k].update(zip(map(key, phase.makes), outputs, strict=True))

    def _device(self, phase):
        """Returns the device of a phase that does not run on towers."""
        return self._plan.home if phase.place.on_device else HOST

    def _compiles_update(self, phase, device):
        """Checks whether XLA compiles a phase; not if shapes vary."""
        wanted = self._execution.updates_by_xla and phase.place.updates
        return wanted and has_known_shapes(phase) and phase.compiles_on(device)

    def _at_home(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the whole batch's values of tensors, at home."""
        missing = {
            key(tensor): tensor
            for tensor in tensors
            if tensor.op.type != "Const"
            and not self._placement.is_captured(tensor)
            and key(tensor) not in self._home
        }
        parts = [*map(self._parts, missing.values())]
        values = self._combined([*missing.values()], parts)
        self._home.update(zip(missing, values, strict=True))
        return [*map(self._known_at_home, tensors)]

    def _known_at_home(self, tensor):
        fixed = self._placement.fixed(tensor)
        return self._home[key(tensor)] if fixed is None else fixed

    def _parts(self, tensor):
        """Returns the parts of a tensor, one a tower; one a device if accumulated."""
        if self._in_turn == 1 or not self._is_added(tensor):
            return [values[key(tensor)] for values in self._towers]
        return [tf.cast(sums[key(tensor)], tensor.dtype) for sums in self._sums]

    def _of_copy(self, k, tensor):
        """Returns the whole batch's value of a tensor, on the device of a copy."""
        known = self._copies[k]
        if key(tensor) not in known:
            known[key(tensor)] = packing.copy(self._home[key(tensor)])
        return known[key(tensor)]

    def _all_reduce(self, tensors):
        """All-reduces gradients over the copies, and keeps the sums on each device."""
        gradients = {
            key(tensor): tensor
            for tensor in tensors
            if key(tensor) not in self._home
            and self._placement.is_on_towers(tensor)
            and self._is_added(tensor)
        }
        by_host = self._plan.replicas_by_host
        if len(by_host) > 1:
            # Other sums over hosts are made at home, and sent to the copies.
            by_nccl = self._connects_devices()
            gradients = {
                n: t for n, t in gradients.items() if by_nccl and t.dtype.is_floating
            }
        if not gradients or self._copied is None or sum(by_host) == 1:
            return
        devices = [tower.device for tower in self._plan.replicas]
        of_towers = map(self._parts, gradients.values())
        parts = [*map(list, zip(*of_towers, strict=True))]
        algorithm = self._copied.all_reduce_alg
        timers = self._timers if len(by_host) > 1 else None
        begun = timers and timers.begin_sum(parts[0], [*itertools.chain(*parts)])
        with tf.name_scope(REDUCE_SCOPE):
            sums, packed = reduce.all_reduce(
                parts, devices, devices, algorithm, self._plan.members
            )
        if timers:
            timers.end_sum(begun, sums[0])
        if packed is not None:
            self._combined.travelled.append(Travelled([*gradients], packed))
        for known, of_copy in zip(self._copies, sums, strict=True):
            known.update(zip(gradients, of_copy, strict=True))

    def _connects_devices(self):
        """Returns whether gradients are added where they are, over all hosts."""
        by_nccl = self._copied is not None and self._copied.all_reduce_alg == "nccl"
        return by_nccl and self._plan.hosts.connects_devices

    # Checks of gradients before their use.

    def _guarded_phase(self, phase):
        """Returns the context in which a phase at home uses the towers' gradients."""
        wanted = self._trace.gradients_of(phase.operations)
        gradients = {key(t): t for t, *_ in phase.takes if key(t) in wanted}
        if not gradients:
            return nullcontext()
        parts = [
            [values[n] for n in gradients if n in values] for values in self._towers
        ]
        sums = self._at_home([*gradients.values()])
        return self._guarded(parts, sums, self._packed_among([*gradients]))

    @contextmanager
    def _guarded(self, parts, sums, packed=()):
        """Guards the use of gradients; later phases of the step wait for the guard."""
        if self._guard is None:
            yield
            return
        losses = self._losses() if self._guard.reads_losses else ()
        with self._guard.before(Gradients(parts, sums, packed, losses)) as gate:
            self._gate = gate
            yield

    def _losses(self):
        """Returns the differentiated tensors that have been made by now."""
        known = [self._home, *self._towers]
        targets = self._trace.targets
        return self._at_home([t for t in targets if any(key(t) in m for m in known)])

    def _packed_among(self, names):
        """Returns the packed messages among some tensors; none with several hosts."""
        plan = self._plan
        if plan.hosts.count > 1 or not any(map(plan.packs, plan.devices)):
            return []
        numbers = {name: i for i, name in enumerate(names)}
        return [
            packed._replace(places=[numbers[travelled[i]] for i in packed.places])
            for travelled, packed in self._combined.travelled
            if {*travelled} <= numbers.keys()
        ]

    # Sharded variables: owners update them, and hosts exchange rows of tables.

    def _update_apart(self, phase):
        """Lets the owners of variables apply the optimizers of a phase."""
        for name in phase.operations:
            update = self._trace.updates[name]
            parts, at_home = self._gradients_for(update)
            # Gradients are reduced as they arrive; only the update waits for checks.
            sums = self._updates_apart.add(update, parts, at_home)
            gates = [] if self._gate is None else [self._gate]
            gradients = [gradient for gradient in sums[0] if gradient is not None]
            with (
                self._refusing_draws(),
                tf.control_dependencies(gates),
                self._guarded(parts, gradients),
            ):
                self._updates_apart.apply(sums)

    @contextmanager
    def _refusing_draws(self):
        """Refuses an optimizer whose random numbers several hosts cannot share."""
        if self._plan.hosts.count == 1:
            yield
            return
        with made_in(tf.compat.v1.get_default_graph()) as created:
            yield
        drawn = [e for e in effects.of(created) if e.type in effects.RANDOM]
        if drawn:
            raise ModelError(
                "The optimizer draws random numbers of TensorFlow's own state, by "
                f"{drawn[0]}, and several hosts cannot share these; expected "
                "keras.random with a seed generator, or run_eagerly=True."
            )

    def _gradients_for(self, update):
        """Returns the gradients that an optimizer's call takes.

        Returns:
            Each device's part of each gradient; and the gradients that home has, by
            their indices.
        """
        parts, at_home = [[] for _ in self._plan.replicas], {}
        for i, gradient in enumerate(update.gradients):
            of_devices = [None] * len(parts)
            if gradient is not None and self._is_in_parts(gradient):
                of_devices = self._parts_of_gradient(gradient)
            elif gradient is not None:
                tensors = tf.nest.flatten(gradient, expand_composites=True)
                with tf.device(self._plan.home):
                    values = self._at_home(tensors)
                at_home[i] = tf.nest.pack_sequence_as(
                    gradient, values, expand_composites=True
                )
            for of_device, part in zip(parts, of_devices, strict=True):
                of_device.append(part)
        return parts, at_home

    def _is_in_parts(self, gradient):
        """Checks whether each tower has a part of a gradient, or some of its rows."""
        if not isinstance(gradient, tf.IndexedSlices):
            return key(gradient) in self._trace.gradients
        indices = key(gradient.indices) in self._trace.indices
        return indices and key(gradient.values) in self._trace.gradients

    def _parts_of_gradient(self, gradient):
        """Returns the parts of a gradient, one for each device."""
        if not isinstance(gradient, tf.IndexedSlices):
            return self._parts(gradient)
        shape = gradient.dense_shape
        if shape is not None:
            with tf.device(self._plan.home):
                (shape,) = self._at_home([shape])
        of_towers = [
            tf.IndexedSlices(
                values[key(gradient.values)], values[key(gradient.indices)], shape
            )
            for values in self._towers
        ]
        count, of_devices = self._in_turn, []
        for k, tower in enumerate(self._plan.replicas):
            with tf.device(tower.device):
                in_turn = of_towers[k * count : (k + 1) * count]
                of_devices.append(reduce.add(in_turn))
        return of_devices

    def _exchange(self, phase):
        """Gives home and towers the values that a phase reads of sharded variables.

        Full values are gathered once a step. Rows are looked up where these are stored.
        """
        operations = [*map(self._trace.graph.get_operation_by_name, phase.operations)]
        of_parameters, of_tables = [], []
        for op in operations:
            is_parameter = isinstance(self._placement.parts_read(op), ShardedParameter)
            (of_parameters if is_parameter else of_tables).append(op)
        on_towers = phase.place.on_towers
        self._gather_once([op for op in of_parameters if op.type != LOOK_UP])
        for op in of_parameters:
            if op.type == LOOK_UP:
                self._look_up(op, on_towers)
        with tf.device(self._plan.home), tf.name_scope("exchange"):
            for op in of_tables:
                if op.type != LOOK_UP:
                    value = tf.convert_to_tensor(self._placement.parts_read(op))
                    self._home[key(op.outputs[0])] = value
            self._look_up_on_hosts(
                [op for op in of_tables if op.type == LOOK_UP], on_towers
            )

    def _look_up_on_hosts(self, look_ups, on_towers):
        """Looks up rows of tables that hosts shard, for all towers in one exchange."""
        if not look_ups:
            return
        tables = [*map(self._placement.parts_read, look_ups)]
        ids = [self._ids_of(op, on_towers) for op in look_ups]
        rows = feature("collectives.spread.tables").look_up(
            self._plan.hosts, tables, ids
        )
        makers = self._towers if on_towers else [self._home]
        for op, of_makers in zip(look_ups, rows, strict=True):
            for values, value in zip(makers, of_makers, strict=True):
                values[key(op.outputs[0])] = value

    def _ids_of(self, op, on_towers):
        """Returns the row indices that each tower, or home, looks up."""
        ids = op.inputs[1]
        if not on_towers:
            return self._at_home([ids])
        taken = Taken(ids, False, False)
        return [self._on_tower(k, taken) for k in range(len(self._towers))]

    def _look_up(self, op, on_towers):
        """Looks up rows of a parameter that is sharded over this host's devices."""
        parameter = self._placement.parts_read(op)
        devices = self._plan.devices if on_towers else [self._plan.home]
        makers = self._towers if on_towers else [self._home]
        with tf.device(self._plan.home):
            ids_of_makers = self._ids_of(op, on_towers)
        for values, device, ids in zip(makers, devices, ids_of_makers, strict=True):
            with tf.device(device), tf.name_scope("look_up"):
                flat = tf.reshape(ids, [-1])
                rows = [shard_rows for shard_rows, _ in parameter.look_up(flat)]
                shape = tf.concat([tf.shape(ids), parameter.shape[1:]], 0)
                rows = tf.reshape(parameter.join(flat, rows), shape)
                values[key(op.outputs[0])] = tf.ensure_shape(rows, op.outputs[0].shape)

    def _gather_once(self, reads):
        """Gathers, on the towers' devices, parameters that are read in full.

        The devices of a stage gather the parameters of that stage.
        """
        values, replicas = [op.outputs[0] for op in reads], self._plan.replicas
        parameters = [self._placement.parts_read(op) for op in reads]
        for stage in range(self._plan.pipeline.stages):
            devices = [tower.devices[stage] for tower in replicas]
            indices = [
                i
                for i, parameter in enumerate(parameters)
                if any(map(parameter.shards[0].device.endswith, devices))
            ]
            if not indices:
                continue
            stage_parameters = [parameters[i] for i in indices]
            gathered = gather_once(stage_parameters, devices, self._plan.packs)
            names = [key(values[i]) for i in indices]
            for replica, of_device in enumerate(gathered):
                of_read = zip(names, of_device, strict=True)
                self._sent[replica, stage] |= of_read
            self._home.update(zip(names, gathered[0], strict=True))


def has_known_shapes(phase: Phase) -> bool:
    """Checks whether the shapes of all inputs of a phase are known."""
    return all(taken.tensor.shape.is_fully_defined() for taken in phase.takes)
