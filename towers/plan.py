"""The plan of a run, a value: hosts, towers, stages, and where variables live.

Whoever computes asks the plan where. It makes no operation but to tell which rows.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from towers.collectives import batch
from towers.collectives.world import ALONE, World
from towers.devices.names import is_gpu
from towers.layers.pipeline import ONE_STAGE, Pipeline

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Share:
    """What a host computes of each batch; for whoever makes its batches.

    Attributes:
        split_ratios: How much of a batch each tower of all hosts gets.
        first: Index of the first tower of this host.
        end: Index behind its last one.
    """

    split_ratios: tuple[int, ...]
    first: int
    end: int

    def bounds(self, total: tf.Tensor | int) -> tuple[Any, Any]:
        """Returns this host's first row of a batch of `total`, and that behind it."""
        bounds = batch.split_bounds(total, self.split_ratios)[self.first : self.end]
        return bounds[0][0], bounds[-1][1]

    def of_batch(self, x: Any, first: Any, total: Any, mark: Any) -> batch.HostPart:
        """Says which rows of a batch x has; see `batch.Part`."""
        return batch.HostPart(x, *(tf.cast(n, tf.int32) for n in (first, total, mark)))


@dataclasses.dataclass(frozen=True)
class Tower:
    """One computation of the model, for its own rows of each batch.

    Towers on the same devices compute micro-batches: in turn, stage by stage.

    Attributes:
        index: Its number among the towers of all hosts, from 0.
        devices: The devices of its stages, in order.
        ratio: How much of a batch it gets, relative to the other towers.
    """

    index: int
    devices: tuple[str, ...]
    ratio: int = 1

    @property
    def device(self) -> str:
        """The device that its batch goes to, and its results come from."""
        return self.devices[0]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which towers compute, and where variables live.

    Attributes:
        towers: The towers of this host.
        homes: The device of each stage's variables, which are updated there.
        merges: The device on which each stage's gradients are added.
        on_gpus: Whether a tower is on a GPU.
        packed: Whether parameters and gradients travel in one buffer for each type;
            `None` for where that pays.
        hosts: The hosts that train together.
        split_ratios: How much of a batch each tower of all hosts gets, relative to the
            others.
        by_host: Number of towers of each host.
        pipeline: The stages of each tower, and the order in which micro-batches go
            through them.
    """

    towers: tuple[Tower, ...]
    homes: tuple[str, ...]
    merges: tuple[str, ...]
    on_gpus: bool
    packed: bool | None
    hosts: World
    split_ratios: tuple[int, ...]
    by_host: tuple[int, ...]
    pipeline: Pipeline = ONE_STAGE

    @classmethod
    def of(
        cls,
        devices: Sequence[str | Sequence[str]],
        split_ratios: Sequence[int],
        home: str | Sequence[str],
        merges: Sequence[str] | None = None,
        packed: bool | None = None,
        hosts: World = ALONE,
        pipeline: Pipeline = ONE_STAGE,
        ratios_of_hosts: Sequence[Sequence[int]] | None = None,
    ) -> "Plan":
        """Makes the plan of this host.

        Args:
            devices: A device string for each tower of this host, or those of its
                stages.
            split_ratios: How much of a batch each gets, relative to the others.
            home: The device of the variables, or that of each stage's.
            merges: The device that adds each stage's gradients; by default where its
                variables are.
            packed: See `Plan`.
            hosts: See `Plan`.
            pipeline: See `Plan`.
            ratios_of_hosts: The `split_ratios` of all hosts. By default hosts tell
                them, for which all call this together.
        """
        count = pipeline.micro_batches
        told = ratios_of_hosts or hosts.exchange([*split_ratios])
        ratios = [[n for n in mine for _ in range(count)] for mine in told]
        first = itertools.count(sum(map(len, ratios[: hosts.index])))
        towers = tuple(
            Tower(next(first), (each,) if isinstance(each, str) else (*each,), n)
            for each, n in zip(devices, split_ratios, strict=True)
            for _ in range(count)
        )
        homes = (home,) if isinstance(home, str) else (*home,)
        merges = homes if merges is None else (*merges,)
        on_gpus = any(is_gpu(device) for tower in towers for device in tower.devices)
        by_host, ratios = tuple(map(len, ratios)), tuple(itertools.chain(*ratios))
        values = on_gpus, packed, hosts, ratios, by_host, pipeline
        return cls(towers, homes, merges, *values)

    def of_stage(self, stage: int) -> "Plan":
        """Returns the plan as one stage sees it: each tower has one device."""
        return dataclasses.replace(
            self,
            towers=tuple(
                dataclasses.replace(tower, devices=(tower.devices[stage],))
                for tower in self.towers
            ),
            homes=(self.homes[stage],),
            merges=(self.merges[stage],),
            pipeline=self.pipeline.of_one_stage(),
        )

    def by_stage(
        self, variables: Sequence[keras.Variable]
    ) -> Iterator[tuple[list[int], "Plan"]]:
        """Yields the places of each stage's variables, and the plan as it sees it."""
        stages = [*map(self.pipeline.stage_of, variables)]
        for stage in range(len(self.homes)):
            places = [i for i, each in enumerate(stages) if each == stage]
            if places:
                yield places, self.of_stage(stage)

    @property
    def home(self) -> str:
        """The device of what runs once, such as metrics, or on rows of all towers.

        It is that of the last stage's variables, where outputs are made.
        """
        return self.homes[-1]

    @property
    def merge(self) -> str:
        """The device on which the last stage's gradients are added."""
        return self.merges[-1]

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each tower."""
        return tuple(tower.device for tower in self.towers)

    @property
    def all_devices(self) -> tuple[str, ...]:
        """The devices of all stages of all towers, each once."""
        return tuple(
            dict.fromkeys(device for tower in self.towers for device in tower.devices)
        )

    @property
    def table_devices(self) -> tuple[str, ...]:
        """The devices over which this host divides the tables that it has whole.

        They are as many on each host as the host with fewest towers has. A look-up is
        an operation for each shard, and hosts exchange what their steps have in common:
        with another number of shards, a host would exchange other tensors.
        """
        fewest = self.replicas[: min(self.replicas_by_host)]
        return tuple(dict.fromkeys(device for t in fewest for device in t.devices))

    @property
    def replicas(self) -> tuple[Tower, ...]:
        """The towers with devices of their own: the first micro-batch of each."""
        return self.towers[:: self.pipeline.micro_batches]

    @property
    def replicas_by_host(self) -> list[int]:
        """How many `replicas` each host has."""
        return [count // self.pipeline.micro_batches for count in self.by_host]

    @property
    def count(self) -> int:
        """Number of towers, of all hosts."""
        return len(self.split_ratios)

    @property
    def share(self) -> "Share":
        """What this host computes of each batch."""
        first = self.towers[0].index
        return Share(self.split_ratios, first, first + len(self.towers))

    def bounds(self, total: tf.Tensor | int) -> list[tuple[Any, Any]]:
        """Computes where the local batches of this host's towers start and end.

        Args:
            total: Number of examples of the global batch.

        Returns:
            One pair (start, end) for each tower; see `batch.split_bounds`.
        """
        share = self.share
        bounds = batch.split_bounds(total, self.split_ratios)
        return bounds[share.first : share.end]

    def gather(self, rows: T, total: tf.Tensor | int, purpose: str) -> T:
        """Puts together what the towers of all hosts have of a global batch.

        Args:
            rows: A nest of what this host's towers have; see `World.all_gather`.
            total: Number of examples of the global batch.
            purpose: See `World.all_gather`.
        """
        return self.hosts.all_gather(rows, total, purpose)

    def sizes(self, total: tf.Tensor | int) -> list[Any]:
        """Computes the sizes of the local batches of this host's towers."""
        return [end - start for start, end in self.bounds(total)]

    def fractions(
        self, sizes: Sequence[tf.Tensor | int], total: tf.Tensor | int
    ) -> list[tf.Tensor]:
        """Computes the part of the global batch that each local batch is.

        Args:
            sizes: What `sizes` returns.
            total: Number of examples of the global batch.
        """
        return batch.fractions(sizes, None if self.hosts.count == 1 else total)

    @property
    def home_of(self) -> Callable[[keras.Variable], str]:
        """What tells on which device a variable lives, if it can be there.

        The variable is one of the model, its optimizer or its metrics; see
        `Pipeline.stage_of`. GPUs have some types only in the host's memory; see
        `layers.variables.move`.
        """
        stage_of = self.pipeline.stage_of
        return lambda variable: self.homes[stage_of(variable)]

    def places_of(self, copied: bool) -> Callable[[keras.Variable], tuple[str, ...]]:
        """Returns what tells on which devices a variable has values; see `home_of`.

        Args:
            copied: Whether each tower has a copy.
        """
        stage_of, homes = self.pipeline.stage_of, [(home,) for home in self.homes]
        if copied:
            homes = [*zip(*(tower.devices for tower in self.replicas), strict=True)]
        return lambda variable: homes[stage_of(variable)]

    def packs(self, device: str) -> bool:
        """Tells whether values travel packed between home and a device.

        That pays where they travel, from one memory to another. Between logical CPUs
        nothing is copied, unless it is packed.
        """
        if self.packed is not None:
            return self.packed
        return (is_gpu(device) or is_gpu(self.home)) and device != self.home
