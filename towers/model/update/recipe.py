"""What a builder is made of, whichever choice and layout it is made for."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from towers import devices
from towers.builders.builder import Builder
from towers.builders.context import Context
from towers.builders.guard import Guard
from towers.builders.strategies import STRATEGIES
from towers.cluster import process_group
from towers.collectives import optimizer_shards
from towers.collectives.hosts import OneHost
from towers.collectives.spread import tables as spread_tables
from towers.devices import is_gpu
from towers.layers import tables, variables
from towers.layers.pipeline import Pipeline
from towers.loop import alike
from towers.loop.agreement import Agreement
from towers.model.update import auto
from towers.model.update.auto import Choice
from towers.model.update.layout import Layout
from towers.plan import Plan
from towers.tower.preprocess import Preprocess


@dataclasses.dataclass(kw_only=True)
class Recipe:
    """What `multi_gpu_model` was asked for, but for the choice and the layout.

    Attributes:
        model: The user's model.
        home: The device of the variables.
        home_follows: Whether that is the first tower's, of whichever layout.
        home_stays: Whether it was asked for, where the first tower is not.
        hosts: The hosts that train together.
        given: What all hosts have to be given, by the names of arguments.
        agreement: Keeps hosts at the same batch, if there are several.
        said: What has been said, whichever builder has found it.

    The others are as of `multi_gpu_model`, or checked.
    """

    model: keras.Model
    home: str
    home_follows: bool
    home_stays: bool
    cpu_merge: bool | None
    packed: bool | None
    hosts: OneHost
    gradient_compression: str
    pipeline: Pipeline
    shard_embeddings: str
    loss_placement: str
    strict: bool
    preprocess: Preprocess | None
    prefetch: int
    guard: Guard | None
    shard_optimizer_state: bool
    max_staleness: int | None
    given: Mapping[str, Any]
    agreement: Agreement | None = None
    said: set[Any] = dataclasses.field(default_factory=set)

    def agree(self) -> None:
        """Has hosts that train together agree on batches."""
        several = self.hosts.count > 1
        self.agreement = Agreement(self.hosts, self.model) if several else None

    def check_alike(self) -> None:
        """Checks that hosts that train together were given the same.

        Raises:
            HostsDifferError: They were given different arguments.
        """
        if self.hosts.count > 1:
            alike.check(self.hosts, {"multi_gpu_model()": self.given})

    def follow_hosts(self, hosts: OneHost) -> None:
        """Takes hosts in the place of those before; see `check_alike`."""
        self.hosts = hosts.compressing(self.gradient_compression)
        self.check_alike()

    def ways(
        self,
        layout: Layout,
        xla: bool | None,
        synchronized: bool,
        told: Choice | None = None,
    ) -> list[Choice]:
        """Lists what may be chosen; see `auto.candidates`."""
        return auto.candidates(
            *(layout.firsts, layout.nccl_fits, xla, synchronized, self.home_stays),
            in_stages=not self.pipeline.alone,
            told=told,
        )

    def builder(
        self,
        choice: Choice,
        layout: Layout,
        ratios_of_hosts: Sequence[Sequence[int]] | None = None,
    ) -> Builder:
        """Makes a builder, and moves the variables to where it needs them.

        Args:
            choice: How variables are updated.
            layout: The towers of this host.
            ratios_of_hosts: As of `Plan.of`.
        """
        first, model = layout.firsts[0], self.model
        copied = choice.variable_update == "replicated"
        home = first if copied or self.home_follows else self.home
        stages = self.pipeline.stages
        homes = (home,) * stages if home != first else layout.towers[0]
        merges = None
        if self.cpu_merge is False:
            merges = layout.towers[0]
        elif self.cpu_merge and is_gpu(home):
            merges = (devices.HOST,) * stages
        plan = Plan.of(
            *(layout.towers, layout.split_ratios, homes, merges, self.packed),
            *(self.hosts, self.pipeline, ratios_of_hosts),
        )
        slots = ()
        if copied and self.shard_optimizer_state:
            # Their owners will have them.
            slots = optimizer_shards.slot_ids(model)

        def home_of(variable):
            return None if id(variable) in slots else plan.home_of(variable)

        self._lay_out_tables(plan, copied, home_of)
        variables.move(model, home_of)
        context = Context(
            *(model, plan, self.loss_placement, self.strict, self.preprocess),
            *(self.prefetch, self.guard, self.agreement, self.shard_embeddings),
            said=self.said,
        )
        return STRATEGIES[choice.variable_update](context, **self._options(choice))

    @property
    def divides_state(self) -> bool:
        """Whether a host may have a part of some variables or slots only."""
        return self.shard_optimizer_state or self.shard_embeddings != "none"

    def _lay_out_tables(self, plan, copied, home_of):
        model, way = self.model, self.shard_embeddings
        if way == "none":
            tables.bring_home(model, home_of)
        elif model.built:
            divided = ()
            # Hosts that come and go may have to read a checkpoint before.
            if process_group.member() is None:
                # Before all else moves, as a table may not fit there.
                divided = spread_tables.divide(model, plan, way)
            placed = tables.layout(
                *(model, plan.all_devices, way, plan.places_of(copied)), apart=divided
            )
            tables.put(placed, None)

    def _options(self, choice):
        """What a builder takes that others of its kind do not."""
        if choice.variable_update == "replicated":
            return {
                "all_reduce_alg": choice.all_reduce_alg,
                "shard_optimizer_state": self.shard_optimizer_state,
            }
        if choice.variable_update == "asynchronous":
            return {"max_staleness": self.max_staleness}
        return {}
