"""Runs a function of a batch on several towers, as one device would.

`judge` decides before anything runs, and returns a `Verdict`, a value: whoever asks
decides what to do if it refuses. XLA compiles what a tower computes in one go, and
updates; home it does not.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import tensorflow as tf

from towers.analysis.axes.own import Decided
from towers.analysis.kinds import ROWS, SUM
from towers.analysis.layer_calls import key
from towers.collectives import batch, packing, reduce
from towers.collectives.spread import tables as spread_tables
from towers.devices import HOST, is_gpu
from towers.keras_adapter.graphs import (
    calls_functions,
    made_in,
    without_auto_control_deps,
)
from towers.keras_adapter.variables import empty, fill
from towers.layers.pipeline import ONE_STAGE, Pipeline
from towers.partition.combined import REDUCE_SCOPE, Combination, Travelled
from towers.partition.errors import PartitionError, where
from towers.partition.phases import Phase, Taken, phases
from towers.partition.placement.placement import LOOK_UP, STATEFUL_DRAWS, Placement
from towers.partition.trace import Trace
from towers.plan import Plan
from towers.stages.staged import Staged

# Most functions need one, and those with totals behind what is own some more.
_TRACES = 9


class Observer(NamedTuple):
    """What looks at a call of a partitioned function.

    Attributes:
        computed: Is told what towers have computed last: a list for each device.
        gradients: Makes the context in which gradients of variables are used. It takes
            each tower's parts of them, a list for each tower; their sums; which of
            these have travelled packed; and what returns the tensors that gradients
            were taken of. It yields what has to be there before.
        turns: Returns what is told of the turns of a tower's stages; see `StepTimers`.
        received: Is told of the first values that home has sent to towers in one piece.
        over_hosts: Measures how long hosts take to add; see `StepTimers`.
    """

    computed: Callable[[Sequence[Sequence[tf.Tensor]]], None]
    gradients: Callable[..., AbstractContextManager]
    turns: Callable[[], Callable[..., None] | None] = lambda: None
    received: Callable[[Sequence[tf.Tensor]], None] = lambda values: None
    over_hosts: Callable[..., tuple[Any, Any]] = lambda add, mine: add()


class Execution(NamedTuple):
    """How a call of a partitioned function is executed.

    Attributes:
        usual_rows: Number of examples of most batches, if that is known.
        towers_by_xla: Whether XLA compiles what towers compute.
        updates_by_xla: Whether it compiles what optimizers do.
        is_elastic: Whether hosts come and go while it runs.
    """

    usual_rows: int | None = None
    towers_by_xla: bool = False
    updates_by_xla: bool = False
    is_elastic: bool = False


DEFAULT_EXECUTION = Execution()


class Copied(NamedTuple):
    """The variables of which each tower has a copy.

    Attributes:
        handles: For each tower, by the `id` of a variable's handle, that of its copy.
            The first tower's copy is the variable itself.
        all_reduce_alg: How gradients are added for all; see `reduce.all_reduce`.
        apply: Does what an optimizer does, if that is more than to apply it to each
            copy. It takes an `OptimizerCall`; the towers' parts of its gradients, a
            list for each device; by their places, those gradients of which home has
            all; and what makes the context in which sums of gradients are used.
    """

    handles: Sequence[Mapping[int, tf.Tensor]]
    all_reduce_alg: str
    apply: Callable[..., None] | None = None


class Verdict(NamedTuple):
    """What becomes of a function's operations, before any of them runs.

    Attributes:
        trace: The function as it was traced.
        placement: Where its operations run, what is gathered, and what is refused.
        copied: The variables that towers have copies of, if they have some.
        pipeline: How the devices of a tower share the model.
    """

    trace: Trace
    placement: Placement
    copied: Copied | None
    pipeline: Pipeline = ONE_STAGE

    @property
    def refused(self) -> str | None:
        """Why towers cannot compute the function, in a sentence; `None` if they can."""
        return next(iter(self.placement.refused), None)


def judge(
    function: Callable[[Any], Any],
    spec: Any,
    copied: Callable[[Trace], Copied | None] = lambda trace: None,
    loss_placement: str = "auto",
    updates_apart: bool = False,
    home: str = HOST,
    pipeline: Pipeline = ONE_STAGE,
    keeps_loss_scale: bool = False,
    divided: Mapping[int, spread_tables.SpreadTable] = MappingProxyType({}),
) -> Verdict:
    """Traces a function of a batch, and decides what becomes of its operations.

    Args:
        function: Takes a batch; see `Trace`.
        spec: As for `Trace`.
        copied: Is called when variables that the function creates are there.
        loss_placement: Where examples meet: "auto" is at home, on the rows of all
            towers. "tower" is on each tower, which takes its rows for the batch.
        updates_apart: Whether `copied` returns what applies optimizers.
        home: The device of home.
        pipeline: How the devices of a tower share the model, whose layers are known.
        keeps_loss_scale: See `Trace`.
        divided: As for `Placement`; the function reads the stand-ins.
    """
    own = Decided() if loss_placement == "tower" else None
    trace = functools.partial(
        *(Trace, function, spec),
        updates_apart=updates_apart,
        parts=None if pipeline.alone else pipeline.parts,
        keeps_loss_scale=keeps_loss_scale,
    )
    given = {"copied": copied, "decided": own, "home": home, "divided": divided}
    settled = functools.partial(_settled, pipeline=pipeline, **given)
    verdict = settled(functools.partial(trace, True))
    if verdict.refused is None:
        return verdict
    # Operations within a layer are needed outside: all are read one by one.
    return settled(functools.partial(trace, False))


def _settled(trace, copied, decided, home, pipeline, divided):
    """Traces and places, again where one trace decides for the next."""
    at_home = frozenset()
    for _ in range(_TRACES):
        traced = trace(decided=decided, at_home=at_home)
        copies = copied(traced)
        known = {} if copies is None else copies.handles[-1]
        placement = Placement(
            *(traced, lambda each, known=known: id(each) in known, home, divided)
        )
        verdict = Verdict(traced, placement, copies, pipeline)
        before = decided, at_home
        decided, at_home = traced.decide(), at_home | placement.unreadable
        if decided is not None:
            decided = decided._replace(at_home=decided.at_home | at_home)
        if before == (decided, at_home):
            return verdict
    placement.refused.append(
        "Towers find no end of what is each tower's own, and what is not; expected "
        "fewer places in which examples meet."
    )
    return verdict


class Partitioned:
    """A function of a batch, traced and divided among home and towers.

    Attributes:
        trace: The function as it was traced.
        placement: Where its operations run.
        copied: The variables that towers have copies of, if they have some.
        pipeline: How the devices of a tower share the model.
    """

    def __init__(self, verdict: Verdict, towers_stay: bool = False):
        """Takes what was decided.

        Args:
            verdict: That.
            towers_stay: See `phases.phases`.

        Raises:
            PartitionError: Towers cannot compute the function.
        """
        if verdict.refused is not None:
            raise PartitionError(verdict.refused)
        self.trace, self.placement, self.copied, self.pipeline = verdict
        self._towers_stay = towers_stay

    @functools.cached_property
    def phases(self) -> list[list[Phase]]:
        """What runs in one go, in order: for each tower's copies."""
        found = phases(
            *(self.trace, self.placement),
            pipeline=self.pipeline,
            towers_stay=self._towers_stay,
        )
        return [[phase.of_copy(each) for each in self.handles] for phase in found]

    def staged(self, rows: int) -> list[Staged]:
        """Returns what the stages of a tower compute, in order, if layers are placed.

        Args:
            rows: Number of a tower's examples.
        """
        phases = [each for each, *_ in self.phases if each.makes]
        some = [phase for phase in phases if phase.labels is not None]
        shapes: dict[Any, tf.TensorShape] = {}
        return [phase.staged_of(rows, shapes) for phase in some]

    @property
    def handles(self) -> Sequence[Mapping[int, tf.Tensor]]:
        """See `Copied`; without copies, that of home alone."""
        return [{}] if self.copied is None else self.copied.handles

    def lines(self, name: str) -> Sequence[str]:
        """Says what the function, of some name, cannot compute on towers."""
        return [*self.placement.lines(name), *self.compiled(name)]

    def by_xla(self, name: str) -> Sequence[str]:
        """Says what the function, of some name, does otherwise if XLA compiles it."""
        lines = []
        phases = [each for each, *_ in self.phases if each.place.on_towers]
        on_device = [phase for phase in phases if phase.place.on_device]
        if self.copied is None and any(phase.captured for phase in on_device):
            lines.append(
                f"{name} uses variables in a loop, in a branch, or with indices, so "
                "that XLA does not compile it on devices that read them elsewhere."
            )
        if any(phase.hands_on_lists for phase in on_device):
            lines.append(
                f"{name} needs something of the whole batch between a loop and its "
                "gradient, so that XLA compiles neither."
            )
        if any(phase.draws for phase in phases):
            lines.append(
                f"{name} draws random numbers by XLA on each tower, which are others "
                "than those of one device."
            )
        return lines

    def updated(self, name: str) -> Sequence[str]:
        """Says which updates of the function, of some name, XLA would not compile."""
        updates = [each for each, *_ in self.phases if each.place.updates]
        if all(map(_has_known_shapes, updates)):
            return []
        return [
            f"XLA does not compile all updates of {name}, as it would do so anew for "
            "each size of its sparse gradients."
        ]

    def compiled(self, name: str) -> Sequence[str]:
        """Says what the function, of some name, does without XLA."""
        if not self.trace.compiled:
            return []
        return [
            f"{name} calls a tf.function with jit_compile=True, which towers trace "
            "without XLA. Layers such as Dropout then draw what they draw without."
        ]

    @property
    def stateful_draws(self) -> list[str]:
        """Where random numbers are drawn whose state is no variable, as phrases."""
        return [where(op) for op in self.placement.order if op.type in STATEFUL_DRAWS]

    def __call__(
        self,
        plan: Plan,
        local_batches: Sequence[Any],
        size: int | tf.Tensor,
        observer: Observer | None = None,
        whole: Any = None,
        execution: Execution = DEFAULT_EXECUTION,
    ) -> Any:
        """Adds a call to the graph being built.

        Args:
            plan: Which towers compute, and where home is.
            local_batches: What each tower has of the batch, on its device.
            size: Number of examples of the batch.
            observer: What looks at it, if anything does.
            whole: The batch, if all of it is there.
            execution: How it is executed.

        Returns:
            What the function returns for the whole batch, at home.
        """
        found = self.on_copies(plan, local_batches, size, observer, whole, execution)
        return found[0]

    def on_copies(
        self,
        plan: Plan,
        local_batches: Sequence[Any],
        size: int | tf.Tensor,
        observer: Observer | None = None,
        whole: Any = None,
        execution: Execution = DEFAULT_EXECUTION,
    ) -> list[Any]:
        """Adds a call to the graph being built; see `__call__`.

        Returns:
            What the function returns, at home; then what of it the device of each other
            copy has, in the same structure: sums that were all-reduced, `None` for all
            else.
        """
        call = Call(self, plan, local_batches, size, observer, whole, execution)
        for place, phase in enumerate(self.phases):
            if plan.hosts.count > 1:
                call.add_over_hosts(self.phases[place:])
            call.run(phase)
        if observer is not None and call.computed:
            observer.received(call.received)
            observer.computed(call.computed)
        with tf.device(plan.home):
            return [*map(self.trace.packed, call.returned(self.trace.returned))]


class Call:
    """One call of a partitioned function: what home and towers have made so far.

    Attributes:
        computed: What the towers of each device have made in their last phase.
        received: What was sent to towers in one piece, before their first phase.
    """

    def __init__(
        self, partitioned, plan, local_batches, size, observer, whole, execution
    ):
        self._partitioned, self._plan, self._observer = partitioned, plan, observer
        self._execution = execution
        # What has to be there before home changes anything, once there is something.
        self._gate: tf.Tensor | None = None
        # The calls of phases that check something, which nobody waits for yet.
        self._checks: list[tf.Operation] = []
        self.computed: list[list[tf.Tensor]] = []
        self.received: list[tf.Tensor] = []
        # Whether towers are in their first phase.
        self._begins = False
        self._placement = partitioned.placement
        self._bounds = plan.bounds(size)
        self._sizes = plan.sizes(size)
        fractions = plan.fractions(self._sizes, size)
        about = plan, self._placement, self._sizes, fractions
        self._combined = Combination(*about)
        if observer is not None:
            self._combined = Combination(*about, observer.over_hosts)
        trace = partitioned.trace
        # What the device of each copy has of the whole batch. The first one is home.
        self._copies: list[dict[Any, tf.Tensor]] = [{} for _ in partitioned.handles]
        self._home = self._copies[0]
        if whole is not None:
            self._home.update(self._given(whole))
        self._towers: list[dict[Any, tf.Tensor]] = []
        for local, fraction in zip(local_batches, fractions, strict=True):
            given = self._given(local)
            self._towers.append({**given, key(trace.fraction): fraction})
        # Towers on one device compute micro-batches in turn, and add up as they go.
        self._in_turn = plan.pipeline.micro_batches
        self._sums: list[dict[Any, tf.Tensor]] = [{} for _ in plan.replicas]
        # What has been sent to a stage of a tower, and what was packed for it and for
        # others.
        self._sent: dict[tuple[int, int], dict[Any, tf.Tensor]]
        self._sent = collections.defaultdict(dict)
        self._buffers: dict[Any, list[tf.Tensor]] = {}

    def _given(self, data):
        """A batch, or a tower's part of it, by the keys of what stands for it."""
        given = [self._partitioned.trace.batch]
        given = tf.nest.flatten(given, expand_composites=True)
        values = tf.nest.flatten([data], expand_composites=True)
        pairs = zip(given, values, strict=True)
        return {key(t): value for t, value in pairs if t is not None}

    def run(self, of_copies):
        """Runs a phase, which is given for each copy: at home, or wherever it runs."""
        phase = of_copies[0]
        if phase.place.exchanges:
            self._exchange(phase)
            return
        if not phase.place.on_towers:
            self._wait_for_checks()
        with self._stand_ins_filled(phase):
            if not phase.checks or tf.executing_eagerly():
                self._run(of_copies)
                return
            with made_in(tf.compat.v1.get_default_graph()) as made:
                self._run(of_copies)
        self._checks += [op for op in made if calls_functions(op)]

    def _wait_for_checks(self):
        """Has home wait until what was checked is as expected, as one device does."""
        if self._checks:
            gates = [] if self._gate is None else [self._gate]
            with tf.control_dependencies([*self._checks, *gates]), tf.device(HOST):
                self._gate = tf.identity(True)
            self._checks = []

    def add_over_hosts(self, coming: Sequence[list[Phase]]) -> None:
        """Has hosts add, at once, what phases at home take before towers go on.

        If hosts may be lost, nothing changes before all of these sums are there. So a
        host that is left has all of a step, or nothing.

        Args:
            coming: The phases that are still to run, each for each copy.
        """
        at_home = itertools.takewhile(lambda each: not each[0].place.on_towers, coming)
        takes = [taken.tensor for (phase, *_) in at_home for taken in phase.takes]
        made = self._towers[0].keys()
        sums = [t for t in takes if key(t) in made and key(t) not in self._home]
        apart = self._partitioned.trace.updates_apart
        sums = [t for t in sums if not (apart and self._placement.is_gradient(t))]
        if not sums:
            return
        with tf.device(self._plan.home), tf.name_scope("home"):
            values = self.at_home([*{key(t): t for t in sums}.values()])
        if self._execution.is_elastic:
            with tf.control_dependencies(values), tf.device(HOST):
                self._gate = tf.identity(True)

    def _run(self, of_copies):
        phase = of_copies[0]
        if phase.place.on_towers:
            self._run_on_towers(of_copies)
            return
        trace = self._partitioned.trace
        if phase.place.updates and trace.updates_apart:
            gates = [] if self._gate is None else [self._gate]
            with tf.control_dependencies(gates):
                for name in phase.operations:
                    self._apply(trace.updates[name], self._partitioned.copied.apply)
            return
        takes = [taken.tensor for taken in phase.takes]
        scope = "apply" if phase.place.updates else "home"
        with tf.device(self._device(phase)), tf.name_scope(scope):
            if phase.place.on_copies:
                self._all_reduce(takes)
            self.at_home(takes)
            with self._observed(phase):
                self._run_on_copies(of_copies if phase.place.on_copies else [phase])

    @contextmanager
    def _stand_ins_filled(self, phase):
        """Inside, what stands in for tables has their values, as for a loop's body."""
        tables = []
        if not phase.place.updates:
            tables = self._placement.tables_of(phase.captured.values())
        for table in tables:
            fill(table.stand_in, tf.convert_to_tensor(table))
        try:
            yield
        finally:
            for table in tables:
                empty(table.stand_in)

    def _exchange(self, phase):
        """Has hosts exchange what a phase reads of tables that they divide.

        Rows are those of this host's towers, or what home looks up, as all hosts do.
        """
        graph, placement = self._partitioned.trace.graph, self._placement
        look_ups, of_each = [], []
        with tf.device(self._plan.home), tf.name_scope("exchange"):
            for op in map(graph.get_operation_by_name, phase.operations):
                if op.type != LOOK_UP:
                    whole = tf.convert_to_tensor(placement.table_of(op))
                    self._home[key(op.outputs[0])] = whole
                    continue
                ids, towers = op.inputs[1], range(len(self._towers))
                look_ups.append(op)
                if phase.place.on_towers:
                    of_each.append(
                        [self._on_tower(k, Taken(ids, False, False)) for k in towers]
                    )
                else:
                    of_each.append(self.at_home([ids]))
            tables = [*map(placement.table_of, look_ups)]
            found = []
            if look_ups:
                found = spread_tables.look_up(self._plan.hosts, tables, of_each)
        makers = self._towers if phase.place.on_towers else [self._home]
        for op, rows in zip(look_ups, found, strict=True):
            for made, mine in zip(makers, rows, strict=True):
                made[key(op.outputs[0])] = mine

    def _apply(self, update, apply):
        """Has an optimizer's update done of what towers have of its gradients."""
        parts, whole = [[] for _ in self._plan.replicas], {}
        for i, gradient in enumerate(update.gradients):
            mine = [None] * len(parts)
            if gradient is not None:
                if self._is_in_parts(gradient):
                    mine = self._gradients(gradient)
                else:
                    values = tf.nest.flatten(gradient, expand_composites=True)
                    with tf.device(self._plan.home):
                        found = self.at_home(values)
                    whole[i] = tf.nest.pack_sequence_as(
                        gradient, found, expand_composites=True
                    )
            for of_device, part in zip(parts, mine, strict=True):
                of_device.append(part)
        apply(update, parts, whole, functools.partial(self._observes, parts))

    @contextmanager
    def _observes(self, parts, sums, packed=()):
        """Inside, gradients are used. What comes later in the step waits, too."""
        if self._observer is None:
            yield
            return
        with self._observer.gradients(parts, sums, packed, self._targets) as gate:
            self._gate = self._gate if gate is None else gate
            yield

    def _targets(self):
        """What is there by now, at home, of what gradients were taken of."""
        made = [self._home, *self._towers]
        targets = self._partitioned.trace.targets
        return self.at_home([t for t in targets if any(key(t) in m for m in made)])

    def _is_in_parts(self, gradient):
        """Whether towers have parts of a gradient: of each number, or of its rows."""
        trace = self._partitioned.trace
        if not isinstance(gradient, tf.IndexedSlices):
            return key(gradient) in trace.gradients
        indices = key(gradient.indices) in trace.indices
        return indices and key(gradient.values) in trace.gradients

    def _gradients(self, gradient):
        """The towers' parts of a gradient, one for each device."""
        if not isinstance(gradient, tf.IndexedSlices):
            return self._parts(gradient)
        shape = gradient.dense_shape
        if shape is not None:
            with tf.device(self._plan.home):
                (shape,) = self.at_home([shape])
        every = [
            tf.IndexedSlices(
                made[key(gradient.values)], made[key(gradient.indices)], shape
            )
            for made in self._towers
        ]
        count, found = self._in_turn, []
        for k, tower in enumerate(self._plan.replicas):
            with tf.device(tower.device):
                found.append(reduce.add(every[k * count : (k + 1) * count]))
        return found

    def returned(self, tensors):
        """What each copy's device has of what the function returns."""
        self._all_reduce(tensors)
        others = [[mine.get(key(t)) for t in tensors] for mine in self._copies[1:]]
        return [self.at_home(tensors), *others]

    def _device(self, phase):
        """The device of a phase that does not run on towers."""
        return self._plan.home if phase.place.on_device else HOST

    def _run_on_copies(self, of_copies):
        for k, phase in enumerate(of_copies):
            device = self._plan.replicas[k].device if k else self._device(phase)
            with tf.device(device):
                values = [self._of_copy(k, taken.tensor) for taken in phase.takes]
                xla = self._compiles_update(phase, device)
                made = phase(values, xla, self._gate)
            self._copies[k].update(zip(map(key, phase.makes), made, strict=True))

    def _run_on_towers(self, of_copies):
        phase = of_copies[0]
        with tf.device(self._plan.home):
            self.at_home([taken.tensor for taken in phase.takes if taken.whole])
        self._begins = not self.computed
        self.computed, made = [[] for _ in self._plan.replicas], []
        if phase.has_stages:
            self._run_in_stages(of_copies)
            return
        for k, tower in enumerate(self._plan.towers):
            phase = of_copies[self._copy_of(k)]
            before = made[:1] if k % self._in_turn else []
            with (
                tf.device(tower.device if phase.place.on_device else self._plan.home),
                tf.name_scope(self._scope(k)),
                tf.control_dependencies(before),
            ):
                self._send(k, phase.takes)
                values = [self._on_tower(k, taken) for taken in phase.takes]
                if phase.draws:
                    values.append(self._rows(k))
                made = self._made(k, phase, values)
                self._towers[k].update(zip(map(key, phase.makes), made, strict=True))
                self._add(k, phase.makes)
            self.computed[k // self._in_turn] += made

    def _run_in_stages(self, of_copies):
        """Runs a phase on each tower, whose stages take turns at its micro-batches."""
        for replica in range(len(self._plan.replicas)):
            phase = of_copies[self._copy_of(replica * self._in_turn)]
            with without_auto_control_deps(phase.captured.values()):
                self._take_turns(replica, phase)

    def _take_turns(self, replica, phase):
        """Has the stages of a tower compute a phase for each of its micro-batches."""
        timed = self._observer is not None and not self._plan.on_gpus
        staged, ended = phase.staged(timed), self._observer.turns() if timed else None
        takes = dict(zip(map(key, staged.inputs), phase.takes, strict=False))
        makes = dict(zip(map(key, staged.outputs), phase.makes, strict=True))
        made: list[dict[Any, tf.Tensor]] = [{} for _ in range(self._in_turn)]
        last = collections.defaultdict(list)
        slots = staged.slots(self._in_turn)
        for slot, after in zip(slots, staged.waits(slots), strict=True):
            stage, mine = staged.turns[slot.turn].stage, made[slot.micro_batch]
            k = replica * self._in_turn + slot.micro_batch
            size = self._sizes[k]
            # The first of all towers always has an example, unless there is none.
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
                            mine[n]
                            if n in mine
                            else self._taken(k, takes.get(n), stage)
                            for n in part.takes
                        ]
                        values, end = part(values, None if some else size)
                    last[stage] = [v.op for v in values[:1]] or last[stage]
                    self.computed[replica] += values
                    for name, value in zip(part.makes, values, strict=True):
                        mine[name] = value
                        if name in makes:
                            self._towers[k][key(makes[name])] = value
                            self._add(k, [makes[name]])
            if ended is not None:
                ended(stage, after, values[:1], end)

    def _taken(self, k, taken, stage):
        """What a stage of a tower takes; `None` is for what it draws with."""
        return self._rows(k) if taken is None else self._on_tower(k, taken, stage)

    def _rows(self, k):
        """The first of a tower's rows, and their number: an int32 vector."""
        return tf.cast(tf.stack([self._bounds[k][0], self._sizes[k]]), tf.int32)

    def _compiles_update(self, phase, device):
        """Whether XLA compiles a phase; anew for each number of rows it would not."""
        wanted = self._execution.updates_by_xla and phase.place.updates
        return wanted and _has_known_shapes(phase) and phase.compiles_on(device)

    def _made(self, k, phase, values):
        """Runs a phase on a tower."""
        size, usual = self._sizes[k], None
        xla = self._execution.towers_by_xla
        xla = xla and phase.compiles_on(self._plan.towers[k].device)
        if isinstance(size, int) and size > 0:
            return phase(values, xla)
        if self._execution.usual_rows and (self._plan.on_gpus or xla):
            # On a GPU, the host would wait for shapes.
            usual = self._plan.sizes(self._execution.usual_rows)[k] or None
        # The first of all towers always has an example, unless there is none.
        idle = self._plan.towers[k].index > 0
        return phase.of_rows(values, size, idle, usual, xla)

    def _copy_of(self, k):
        """Which of the copies of variables a tower computes with."""
        return k // self._in_turn if len(self._copies) > 1 else 0

    def _scope(self, k):
        if self._in_turn == 1:
            return f"tower_{k}"
        return f"tower_{k // self._in_turn}/micro_batch_{k % self._in_turn}"

    def _add(self, k, tensors):
        """Adds a micro-batch's parts of sums to what those before it have made."""
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
        """Tells whether micro-batches' parts of a tensor are added as they come."""
        return packing.fits(tensor) and self._placement.kind(tensor) is SUM

    def _parts(self, tensor):
        """What towers, or all towers of a device in turn, have of a tensor."""
        if self._in_turn == 1 or not self._is_added(tensor):
            return [made[key(tensor)] for made in self._towers]
        return [tf.cast(sums[key(tensor)], tensor.dtype) for sums in self._sums]

    def _all_reduce(self, tensors):
        """Adds gradients for all copies, and keeps the sums on the device of each."""
        gradients = [
            tensor
            for tensor in tensors
            if key(tensor) not in self._home
            and self._placement.is_on_towers(tensor)
            and self._is_added(tensor)
        ]
        if not gradients or len(self._copies) == 1 or self._plan.hosts.count > 1:
            # What hosts add is sent to the copies of each.
            return
        devices = [tower.device for tower in self._plan.replicas]
        keys = [*map(key, gradients)]
        parts = [*map(list, zip(*map(self._parts, gradients), strict=True))]
        algorithm = self._partitioned.copied.all_reduce_alg
        with tf.name_scope(REDUCE_SCOPE):
            sums = reduce.all_reduce(
                *(parts, devices, devices, algorithm),
                seen=lambda each: self._combined.travelled.append(
                    Travelled(keys, each)
                ),
            )
        for mine, each in zip(self._copies, sums, strict=True):
            mine.update(zip(keys, each, strict=True))

    def _of_copy(self, k, tensor):
        """The whole batch's value of a tensor, on the device of a copy."""
        mine = self._copies[k]
        if key(tensor) not in mine:
            mine[key(tensor)] = packing.copy(self._home[key(tensor)])
        return mine[key(tensor)]

    def _observed(self, phase):
        """The context of a phase at home, in which it takes gradients of towers."""
        wanted = self._partitioned.trace.gradients_of(phase.operations)
        found = {key(t): t for t, *_ in phase.takes if key(t) in wanted}
        if not found:
            return nullcontext()
        parts = [[made[n] for n in found if n in made] for made in self._towers]
        sums = self.at_home([*found.values()])
        return self._observes(parts, sums, self._packed_among([*found]))

    def _packed_among(self, names):
        """Returns those of some tensors that travelled packed; none with many hosts."""
        plan = self._plan
        if plan.hosts.count > 1 or not any(map(plan.packs, plan.devices)):
            return []
        places = {name: i for i, name in enumerate(names)}
        return [
            packed._replace(places=[places[each[i]] for i in packed.places])
            for each, packed in self._combined.travelled
            if {*each} <= places.keys()
        ]

    def at_home(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the whole batch's values of tensors, at home."""
        missing = {
            key(tensor): tensor
            for tensor in tensors
            if tensor.op.type != "Const"
            and not self._placement.is_captured(tensor)
            and key(tensor) not in self._home
        }
        parts = [*map(self._parts, missing.values())]
        found = self._combined([*missing.values()], parts)
        self._home.update(zip(missing, found, strict=True))
        return [*map(self._whole, tensors)]

    def _whole(self, tensor):
        if tensor.op.type == "Const":
            return tf.constant(tf.get_static_value(tensor), tensor.dtype)
        if self._placement.is_captured(tensor):
            return self._placement.outside(tensor)
        return self._home[key(tensor)]

    def _send(self, k, takes, stage=0):
        """Sends a tower in one piece, where that pays, what home has of the batch."""
        plan, device = self._plan, self._plan.towers[k].devices[stage]
        sent = self._sent[k // self._in_turn, stage]
        copy = self._copies[self._copy_of(k)]
        wanted = {
            key(tensor): self._home[key(tensor)]
            for tensor, whole, _ in takes
            if key(tensor) not in sent
            and (copy is self._home or key(tensor) not in copy)
            and (whole or key(tensor) not in self._towers[k])
            and (whole or self._placement.kind(tensor) is not ROWS)
            and packing.fits(self._home[key(tensor)])
        }
        numbers = {n: v for n, v in wanted.items() if v.dtype == packing.INTEGER}
        others = {n: v for n, v in wanted.items() if n not in numbers}
        if plan.packs(device):
            arrived = self._received(others, plan.home)
            sent.update(arrived)
            if self._begins:
                self.received += arrived.values()
        if is_gpu(device):
            # GPUs have whole numbers, such as seeds, in the host's memory.
            source = HOST if is_gpu(plan.home) else plan.home
            sent.update(self._received(numbers, source))

    def _received(self, values, source):
        """Values by their names, as they come from a device in one piece."""
        if (names := tuple(values)) not in self._buffers:
            with tf.device(source), tf.name_scope("read"):
                self._buffers[names] = packing.pack([*values.values()])
        received = packing.unpack(self._buffers[names], [*values.values()])
        return dict(zip(names, received, strict=True))

    def _on_tower(self, k, taken, stage=0):
        """A tensor as a stage of a tower takes it: the tower's, or what home sends."""
        tensor, whole, _ = taken
        if not whole and key(tensor) in self._towers[k]:
            return self._towers[k][key(tensor)]
        if not whole and self._placement.kind(tensor) is ROWS:
            value = self._home[key(tensor)]
            mine = self._cut(k, value, self._placement.blocks(tensor))
            self._towers[k][key(tensor)] = packing.copy(mine)
            return self._towers[k][key(tensor)]
        sent = self._sent[k // self._in_turn, stage]
        if key(tensor) not in sent:
            # Where there are no copies, home has the only one.
            value = self._copies[self._copy_of(k)].get(key(tensor))
            value = self._home[key(tensor)] if value is None else value
            sent[key(tensor)] = packing.copy(value)
        return sent[key(tensor)]

    def _cut(self, k, value, blocks):
        """A tower's rows of a tensor of the whole batch."""
        if blocks is None:
            return batch.take(value, *self._bounds[k])
        total = batch.batch_size(value) // sum(blocks)
        parts = tf.split(value, [count * total for count in blocks])
        start, end = self._bounds[k]
        mine = [
            batch.take(part, count * start, count * end)
            for part, count in zip(parts, blocks, strict=True)
        ]
        return tf.concat(mine, axis=0)


def _has_known_shapes(phase):
    return all(taken.tensor.shape.is_fully_defined() for taken in phase.takes)
