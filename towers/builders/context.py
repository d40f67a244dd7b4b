"""What all pieces of a builder share: the model, the plan, the user's wishes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.analysis.loss_graph import LossGraph
from towers.analysis.rules import Rules
from towers.builders.guard import Guard
from towers.collectives import batch
from towers.devices import is_gpu
from towers.layers import variables
from towers.loop.agreement import Agreement
from towers.loop.host_times import HostTimes
from towers.loop.last_batch import LastBatch
from towers.loop.timers import StepTimers
from towers.plan import Plan
from towers.program import voice
from towers.tower.eager import Proofs
from towers.tower.preprocess import Preprocess
from towers.tower.run import is_synchronized


@dataclasses.dataclass
class Found:
    """What was found out about a model; a builder forgets it when the model changes.

    Attributes:
        loss_places: Where the loss is computed, "tower" or "gathered", in the steps
            "train" and "test" as far as there was one.
        loss_graphs: The compiled loss, by the batch that it was read of, where it takes
            totals of the whole batch.
        reads_tables: Whether a table is used otherwise than to look up rows.
        kept: Names the attribute in which an eager tower has left a tensor, "" if none
            has.
        proofs: The rules of eager towers.
        asked_xla: Whether XLA is to compile towers and update; `None` for where that is
            known to pay.
        compiled: Whether XLA is known to compile the model: by training it once.
        graph: The graph that a step of training was last made in, if any.
    """

    loss_places: dict[str, str] = dataclasses.field(default_factory=dict)
    loss_graphs: dict[Any, LossGraph] = dataclasses.field(default_factory=dict)
    reads_tables: bool = False
    kept: str = ""
    proofs: Proofs = dataclasses.field(default_factory=Proofs)
    asked_xla: bool | None = None
    compiled: bool = False
    graph: tf.Graph | None = None

    @property
    def loss_placed(self) -> str | None:
        """Where the loss is computed in training; `None` before the first step."""
        return self.loss_places.get("train")


@dataclasses.dataclass
class Context:
    """What all pieces of a builder share.

    Attributes:
        model: The user's model; its variables are the shared variables.
        plan: Which towers compute, and where variables live.
        loss_placement: Where the loss is to be computed: "auto", "tower" or "gathered".
        strict: Whether to refuse a model that towers are seen to compute differently.
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

    def of_each_tower(self) -> "Context":
        """Returns the context of a tower by itself; see `Plan.of_each_tower`."""
        plan = self.plan.of_each_tower()
        return dataclasses.replace(self, plan=plan, timers=None, usual_rows=None)

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

    @property
    def together(self) -> bool:
        """Whether towers run together, as layers talk to one another."""
        return self.plan.count > 1 and is_synchronized(self.model)

    @property
    def looks_up(self) -> bool:
        """Whether towers may look up rows of tables that stay at home."""
        return not (
            self.found.reads_tables
            or self.model.run_eagerly
            or self.xla
            or self.together
        )

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that a call may assign: trained ones, then `not_trained`."""
        return self.model.trainable_variables + variables.not_trained(self.model)

    def rules(self, step: str, data: Any, measures: bool = False) -> Rules:
        """Returns the rules for the towers of one step, to be read when it is traced.

        In eager execution they may have been read before, of such a batch: `data` is
        what the towers get of it. `measures` tells whether they may update metrics.
        """
        eager, several = self.model.run_eagerly, self.plan.count > 1
        rules = Rules(
            self.plan.count,
            mean_loss=self.loss_placement == "tower",
            mean_state=not self.strict,
            loss_graph=self.loss_graph(step, data),
            measures=measures and several and not eager,
        )
        if eager:
            return self.found.proofs.of(self.model, step, data, rules)
        return rules

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

    def loss_graph(self, step: str, data: Any) -> LossGraph | None:
        """Returns the compiled loss of a step, if it takes totals of such a batch."""
        graphs = self.found.loss_graphs
        return graphs.get(loss_key(step, data)) if graphs else None


def loss_key(step: str, data: Any) -> tuple[str, str]:
    """Returns what a loss is kept by: the step, and what its batches are like."""
    data = tf.nest.map_structure(batch.as_tensor, data)
    return step, str(batch.local_spec(data, None))
