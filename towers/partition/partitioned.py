"""Runs a function of a batch on several towers, as one device would.

`judge` decides before anything runs, and returns a `Verdict`, a value: whoever asks
decides what to do if it refuses. `Partitioned` cuts what was judged into phases, and
says what it does otherwise than one device. Each call of it is a `PartitionedCall`
(`call.py`). XLA compiles what a tower computes in one go, and updates; home it does
not.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import tensorflow as tf

from towers.analysis.rows import Decided
from towers.devices.names import HOST
from towers.layers.pipeline import ONE_STAGE, Pipeline
from towers.layers.sharded import ShardedVariable
from towers.loop.timers import StepTimers
from towers.partition.call import (
    DEFAULT_EXECUTION,
    Copied,
    Cut,
    Execution,
    PartitionedCall,
    StepGuard,
    UpdatesApart,
    has_known_shapes,
)
from towers.partition.phases import Phase, phases
from towers.partition.placement import STATEFUL_DRAWS, Placement
from towers.partition.trace import Trace
from towers.plan import Plan
from towers.tower.errors import PartitionError, where

# Most functions need one, and those with totals behind what is own some more.
_TRACES = 9


class Verdict(NamedTuple):
    """Tells what becomes of a function's operations, before any of them runs.

    Attributes:
        trace: The function as it was traced.
        placement: Where its operations run, what is gathered, and what is refused.
        copied: The variables that towers have copies of, if they have some.
        updates_apart: Does what optimizers do, if the function leaves that out.
        pipeline: How the devices of a tower share the model.
    """

    trace: Trace
    placement: Placement
    copied: Copied | None
    updates_apart: UpdatesApart | None = None
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
    updates_apart: UpdatesApart | None = None,
    home: str = HOST,
    pipeline: Pipeline = ONE_STAGE,
    keeps_loss_scale: bool = False,
    stand_ins: Mapping[int, ShardedVariable] = MappingProxyType({}),
) -> Verdict:
    """Traces a function of a batch, and decides what becomes of its operations.

    Args:
        function: Takes a batch; see `Trace`.
        spec: As for `Trace`.
        copied: Returns the variables that have copies, for the function as it was
            traced; the variables that it creates are there then.
        loss_placement: Where examples meet: "auto" is at home, on the rows of all
            towers. "tower" is on each tower, which takes its rows for the batch.
        updates_apart: Does what optimizers do, if the function is to leave that out.
        home: The device of home.
        pipeline: How the devices of a tower share the model, whose layers are known.
        keeps_loss_scale: See `Trace`.
        stand_ins: As for `Placement`; the function reads them.
    """
    own = Decided() if loss_placement == "tower" else None
    trace = functools.partial(
        *(Trace, function, spec),
        updates_apart=updates_apart is not None,
        parts=None if pipeline.alone else pipeline.parts,
        keeps_loss_scale=keeps_loss_scale,
    )
    given = {"copied": copied, "decided": own, "home": home}
    given["stand_ins"] = stand_ins
    given |= {"updates_apart": updates_apart, "pipeline": pipeline}
    settled = functools.partial(_settled, **given)
    verdict = settled(functools.partial(trace, True))
    if verdict.refused is None:
        return verdict
    # Operations within a layer are needed outside: all are read one by one.
    return settled(functools.partial(trace, False))


def _settled(trace, copied, decided, home, updates_apart, pipeline, stand_ins):
    """Traces and places, again where one trace decides for the next."""
    at_home = frozenset()
    for traces in itertools.count(1):
        traced = trace(decided=decided, at_home=at_home)
        copies = copied(traced)
        known = {} if copies is None else copies.handles[-1]
        placement = Placement(
            *(traced, lambda handle, known=known: id(handle) in known, home),
            stand_ins,
        )
        verdict = Verdict(traced, placement, copies, updates_apart, pipeline)
        before = decided, at_home
        decided, at_home = _decided_by(verdict, at_home)
        if before == (decided, at_home):
            return verdict
        if traces == _TRACES:
            placement.refused.append(
                "Towers find no end of what is each tower's own, and what is not; "
                "expected fewer places in which examples meet."
            )
            return verdict


def _decided_by(verdict, at_home):
    """Returns what a verdict decides for another trace: `Decided`, and what is home's.

    `at_home` has the names of operations that were home's before.
    """
    decided, at_home = verdict.trace.decide(), at_home | verdict.placement.unreadable
    if decided is not None:
        decided = decided._replace(at_home=decided.at_home | at_home)
    return decided, at_home


class Partitioned:
    """A function of a batch, traced and divided among home and towers.

    Attributes:
        trace: The function as it was traced.
        placement: Where its operations run.
        copied: The variables that towers have copies of, if they have some.
        pipeline: How the devices of a tower share the model.
    """

    def __init__(
        self,
        verdict: Verdict,
        towers_stay: bool = False,
        differentiable: bool = False,
    ):
        """Takes a function that was judged.

        Args:
            verdict: What was decided about it.
            towers_stay: See `phases.phases`.
            differentiable: The same.

        Raises:
            PartitionError: Towers cannot compute the function.
        """
        if verdict.refused is not None:
            raise PartitionError(verdict.refused)
        self.trace, self.placement, self.copied, *_ = verdict
        self.updates_apart, self.pipeline = verdict.updates_apart, verdict.pipeline
        self._towers_stay, self._differentiable = towers_stay, differentiable

    @functools.cached_property
    def phases(self) -> list[list[Phase]]:
        """The phases in order: each for every copy of the variables."""
        of_first = phases(
            *(self.trace, self.placement),
            pipeline=self.pipeline,
            towers_stay=self._towers_stay,
            differentiable=self._differentiable,
        )
        return [
            [phase.of_copy(handles) for handles in self.handles] for phase in of_first
        ]

    def staged(self, rows: int) -> list[Any]:
        """Returns what the stages of a tower compute, in order, if layers are placed.

        Args:
            rows: Number of a tower's examples.
        """
        first_copies = [phase for phase, *_ in self.phases]
        some = [p for p in first_copies if p.makes and p.labels is not None]
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
        phases = [phase for phase, *_ in self.phases if phase.place.on_towers]
        on_device = [phase for phase in phases if phase.place.on_device]
        at_home = self.copied is None and self.updates_apart is None
        if at_home and any(phase.captured for phase in on_device):
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
        updates = [phase for phase, *_ in self.phases if phase.place.updates]
        if all(map(has_known_shapes, updates)):
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
        """Phrases that tell where random numbers are drawn of no variable's state."""
        return [where(op) for op in self.placement.order if op.type in STATEFUL_DRAWS]

    def __call__(
        self,
        plan: Plan,
        local_batches: Sequence[Any],
        size: int | tf.Tensor,
        whole: Any = None,
        execution: Execution = DEFAULT_EXECUTION,
        timers: StepTimers | None = None,
        guard: StepGuard | None = None,
    ) -> Any:
        """Adds a call to the graph being built.

        Args:
            plan: Which towers compute, and where home is.
            local_batches: What each tower has of the batch, on its device.
            size: Number of examples of the batch.
            whole: The batch, if all of it is there.
            execution: How it is executed.
            timers: Measure its phases, if anything does.
            guard: Stops it if gradients are not finite, if anything does.

        Returns:
            What the function returns for the whole batch, at home.
        """
        return self.on_copies(
            plan, local_batches, size, whole, execution, timers, guard
        )[0]

    def on_copies(
        self,
        plan: Plan,
        local_batches: Sequence[Any],
        size: int | tf.Tensor,
        whole: Any = None,
        execution: Execution = DEFAULT_EXECUTION,
        timers: StepTimers | None = None,
        guard: StepGuard | None = None,
    ) -> list[Any]:
        """Adds a call to the graph being built; see `__call__`.

        Returns:
            What the function returns, at home; then what of it the device of each other
            copy has, in the same structure: sums that were all-reduced, `None` for all
            else.
        """
        about = self.trace, self.placement, self.copied, self.updates_apart
        cut = Cut(*about, self.phases)
        call = PartitionedCall(
            cut, plan, local_batches, size, whole, execution, timers, guard
        )
        return call.run()
