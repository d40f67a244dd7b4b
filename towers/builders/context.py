"""What all pieces of a builder share: the model, the plan, the user's wishes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.builders.guard import Guard
from towers.devices import is_gpu
from towers.loop.agreement import Agreement
from towers.loop.host_times import HostTimes
from towers.loop.last_batch import LastBatch
from towers.loop.timers import StepTimers
from towers.plan import Plan
from towers.program import voice
from towers.tower.preprocess import Preprocess


@dataclasses.dataclass
class Found:
    """What was found out about a model; a builder forgets it when the model changes.

    Attributes:
        loss_placed: Where the examples of a batch meet in training: on each "tower", or
            "gathered" at home; `None` before the first step.
        asked_xla: Whether XLA is to compile towers and update; `None` for where that is
            known to pay.
        unseeded: Where a step of training draws random numbers without a seed, as
            phrases.
        compiled: Whether XLA is known to compile the model: by training it once.
        graph: The graph that a step of training was last made in, if any.
    """

    loss_placed: str | None = None
    asked_xla: bool | None = None
    unseeded: Sequence[str] = ()
    compiled: bool = False
    graph: tf.Graph | None = None


@dataclasses.dataclass
class Context:
    """What all pieces of a builder share.

    Attributes:
        model: The user's model; its variables are the shared variables.
        plan: Which towers compute, and where variables live.
        loss_placement: Where examples meet: "auto" or "tower"; see `multi_gpu_model`.
        strict: Whether to refuse variables whose gradients nobody can combine.
        preprocess: What towers do to their rows before the model sees them, if
            anything.
        prefetch: Batches that are fetched and placed ahead of a call of one step.
        guard: Stops a step of training that is not finite, if anything does.
        shard_embeddings: How embedding tables are cut; see `tables.py`.
        agreement: Keeps hosts at the same batch, if there are several.
        timers: Measure what the time of the steps of training goes to.
        callbacks_may_write: Whether a callback that may change variables runs between
            calls of training.
        usual_rows: How many examples the first batch of training has; `None` if that is
            not known yet.
        why_hosts: Why these hosts train together, after others; empty for the first.
        last_batch: Keeps batches, in case a stage fails.
        found: What was found out about the model.
    """

    model: keras.Model
    plan: Plan
    loss_placement: str = "auto"
    strict: bool = True
    preprocess: Preprocess | None = None
    prefetch: int = 0
    guard: Guard | None = None
    agreement: Agreement | None = None
    shard_embeddings: str = "none"
    timers: StepTimers | None = None
    callbacks_may_write: bool = False
    usual_rows: int | None = None
    why_hosts: str = ""
    last_batch: LastBatch = dataclasses.field(default_factory=LastBatch)
    found: Found = dataclasses.field(default_factory=Found)
    said: set[Any] = dataclasses.field(default_factory=set)

    def __post_init__(self):
        if self.timers is None:
            stages = self.plan.pipeline.stages
            towers = len(self.plan.replicas)
            self.timers = StepTimers(towers, self._host_times(), stages)

    def _host_times(self):
        hosts = self.plan.hosts
        if hosts.count == 1:
            return None
        mine = sum(tower.ratio for tower in self.plan.towers)
        return HostTimes(hosts, mine / sum(self.plan.split_ratios))

    @property
    def xla(self) -> bool:
        """Whether XLA compiles towers and update."""
        alone = self.plan.pipeline.alone
        return alone and bool(self.found.asked_xla) and not self.model.run_eagerly

    @property
    def compiles_update(self) -> bool:
        """Whether XLA compiles the update: where that is wished, or known to pay.

        It makes one kernel of the dozen that each variable needs, which a GPU is slower
        to start than to run; a CPU is not.
        """
        if self.found.asked_xla is None:
            alone = self.plan.pipeline.alone
            return alone and is_gpu(self.plan.home) and not self.model.run_eagerly
        return self.xla

    def begin(self, step: str, data: Any) -> Any:
        """Begins a step with a batch; returns the batch, for which the step waits.

        `step` is "train", "test" or "predict".
        """
        if self.plan.pipeline.stages == 1:
            return data
        return self.last_batch.keep(step, data)

    def say(self, lines: Sequence[str], key: Any = None) -> None:
        """Says lines that have not been said before: each step finds the same.

        Lines of one key are said once, whatever their words.
        """
        for line in lines:
            if (key or line) not in self.said:
                voice.say(line)
                self.said.add(key or line)
