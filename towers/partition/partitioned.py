"""Runs a function of a batch on several towers, with the results of one device.

`judge` traces and places the function before anything runs, and returns a `Verdict`, a
value: the caller decides how to handle a refusal. `Partitioned` cuts the judged
function into phases, and reports differences from one device. Each call of a
`Partitioned` is a `PartitionedCall` (`call.py`). XLA compiles whole phases of towers,
and updates, but no other phases at home.
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

# The most traces of a function. Most functions need one; totals behind tensors that are
# each tower's own take more.
_TRACES = 9

NOT_SHARED = (
    "in an optimizer, or in a loop or a branch that also changes a variable, fills a "
    "list as tf.map_fn does, or has a gradient, so that hosts cannot share the numbers"
)
"""The cases of `Partitioned.draws_of_host`, for errors."""


class Verdict(NamedTuple):
    """The decisions about a function's operations, before any of them runs.

    Attributes:
        trace: The traced function.
        placement: Where its operations run, which are gathered, and which are refused.
        copied: The variables that towers have copies of, if any.
        updates_apart: Applies the optimizers in place of the function, if not `None`.
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
    """Traces a function of a batch, and decides where its operations run.

    Args:
        function: Takes a batch; see `Trace`.
        spec: As for `Trace`.
        copied: Returns the variables that have copies, for the traced function; the
            variables that the function creates exist by then.
        loss_placement: Where operations that mix examples run: "auto" is at home, on
            the rows of all towers. "tower" is on each tower, which takes its rows for
            the batch.
        updates_apart: Applies the optimizers in place of the function, if not `None`.
        home: The device of home.
        pipeline: How the devices of a tower share the model, whose layers are known.
        keeps_loss_scale: See `Trace`.
        stand_ins: As for `Placement`; the function reads these.
    """
    decided = Decided() if loss_placement == "tower" else None
    trace = functools.partial(
        *(Trace, function, spec),
        updates_apart=updates_apart is not None,
        parts=None if pipeline.alone else pipeline.parts,
        keeps_loss_scale=keeps_loss_scale,
    )
    arguments = {"copied": copied, "decided": decided, "home": home}
    arguments["stand_ins"] = stand_ins
    arguments |= {"updates_apart": updates_apart, "pipeline": pipeline}
    settled = functools.partial(_settled, **arguments)
    verdict = settled(functools.partial(trace, True))
    if verdict.refused is None:
        return verdict
    # A tensor within a region is needed outside: all operations are read one by one.
    return settled(functools.partial(trace, False))


def _settled(trace, copied, decided, home, updates_apart, pipeline, stand_ins):
    """Traces and places a function until the decisions no longer change."""
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
    """Returns the decisions for another trace: `Decided`, and operations of home.

    `at_home` has the names of operations that were placed at home before.
    """
    decided, at_home = verdict.trace.decide(), at_home | verdict.placement.unreadable
    if decided is not None:
        decided = decided._replace(at_home=decided.at_home | at_home)
    return decided, at_home


class Partitioned:
    """A function of a batch, traced and partitioned among home and towers.

    Attributes:
        trace: The traced function.
        placement: Where its operations run.
        copied: The variables that towers have copies of, if any.
        pipeline: How the devices of a tower share the model.
    """

    def __init__(
        self,
        verdict: Verdict,
        towers_stay: bool = False,
        differentiable: bool = False,
    ):
        """Takes a judged function.

        Args:
            verdict: The decisions about the function.
            towers_stay: See `phases.phases`.
            differentiable: See `phases.phases`.

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
        """The phases in order, each as a list with one phase for each copy."""
        first_phases = phases(
            *(self.trace, self.placement),
            pipeline=self.pipeline,
            towers_stay=self._towers_stay,
            differentiable=self._differentiable,
        )
        return [
            [phase.of_copy(handles) for handles in self.handles]
            for phase in first_phases
        ]

    def staged(self, rows: int) -> list[Any]:
        """Returns the staged phases of a tower, in order, if layers are placed.

        Args:
            rows: The number of a tower's examples.
        """
        first_copies = [phase for phase, *_ in self.phases]
        staged_phases = [p for p in first_copies if p.makes and p.labels is not None]
        shapes: dict[Any, tf.TensorShape] = {}
        return [phase.staged_of(rows, shapes) for phase in staged_phases]

    @property
    def handles(self) -> Sequence[Mapping[int, tf.Tensor]]:
        """The handles of each copy, as in `Copied`; an empty mapping without any."""
        return [{}] if self.copied is None else self.copied.handles

    def lines(self, name: str) -> Sequence[str]:
        """Returns sentences about operations that towers cannot compute on their own.

        Args:
            name: The name of the function, for the sentences.
        """
        return [*self.placement.lines(name), *self.compiled(name)]

    def by_xla(self, name: str) -> Sequence[str]:
        """Returns sentences about differences if XLA compiles the named function."""
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
        """Returns sentences about updates of the function that XLA does not compile."""
        updates = [phase for phase, *_ in self.phases if phase.place.updates]
        if all(map(has_known_shapes, updates)):
            return []
        return [
            f"XLA does not compile all updates of {name}, as it would do so anew for "
            "each size of its sparse gradients."
        ]

    def compiled(self, name: str) -> Sequence[str]:
        """Returns sentences about XLA that the named function asks for in vain."""
        if not self.trace.compiled:
            return []
        return [
            f"{name} calls a tf.function with jit_compile=True, which towers trace "
            "without XLA. Layers such as Dropout then draw what they draw without."
        ]

    @property
    def stateful_draws(self) -> list[str]:
        """The locations of random draws that use no state of a variable, as phrases."""
        return [where(op) for op in self.placement.order if op.type in STATEFUL_DRAWS]

    @property
    def draws_of_host(self) -> list[str]:
        """The locations of random draws that hosts cannot share, as phrases."""
        return [*map(where, self.placement.draws_of_host)]

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
            plan: The towers and the home device.
            local_batches: Each tower's part of the batch, on its device.
            size: Number of examples of the batch.
            whole: The whole batch, if available.
            execution: How to execute the call.
            timers: Measure the phases, if given.
            guard: Stops the step if gradients are not finite, if given.

        Returns:
            The function's results for the whole batch, at home.
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
            The function's results at home; then, in the same structure, the results on
            the device of each other copy: sums that were all-reduced, `None` for all
            others.
        """
        about = self.trace, self.placement, self.copied, self.updates_apart
        cut = Cut(*about, self.phases)
        call = PartitionedCall(
            cut, plan, local_batches, size, whole, execution, timers, guard
        )
        return call.run()
