"""The plan of a run, a value: hosts, towers, stages, and the devices of variables.

The code that computes asks the plan for devices. The plan itself only adds operations
that compute row ranges.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from towers.collectives import batch
from towers.collectives.world import ALONE, World
from towers.devices.names import is_gpu, nccl_fits
from towers.layers.pipeline import ONE_STAGE, Pipeline

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Share:
    """The share of each batch that a host computes, for input pipelines.

    Attributes:
        split_ratios: The share of a batch of each tower of all hosts.
        first: Index of the first tower of this host.
        end: Index after the last tower of this host.
    """

    split_ratios: tuple[int, ...]
    first: int
    end: int

    def bounds(self, total: tf.Tensor | int) -> tuple[Any, Any]:
        """Returns this host's row range (start, end) of a batch of `total` examples."""
        bounds = batch.split_bounds(total, self.split_ratios)[self.first : self.end]
        return bounds[0][0], bounds[-1][1]

    def of_batch(self, x: Any, first: Any, total: Any, mark: Any) -> batch.HostPart:
        """Describes the rows of a batch that `x` has; see `batch.HostPart`."""
        return batch.HostPart(x, *(tf.cast(n, tf.int32) for n in (first, total, mark)))


@dataclasses.dataclass(frozen=True)
class Tower:
    """One replica of the model, for its own rows of each batch.

    Towers on the same devices compute micro-batches: in turn, stage by stage.

    Attributes:
        index: The index among the towers of all hosts.
        devices: The devices of the tower's stages, in order.
        ratio: The tower's share of a batch, relative to the other towers.
    """

    index: int
    devices: tuple[str, ...]
    ratio: int = 1

    @property
    def device(self) -> str:
        """The device that receives the tower's batch and returns its results."""
        return self.devices[0]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The towers that compute, and the devices of variables.

    Attributes:
        towers: The towers of this host.
        homes: The device of each stage's variables, which are updated there.
        merges: The device on which each stage's gradients are added.
        on_gpus: Whether a tower is on a GPU.
        packed: Whether parameters and gradients are sent in one buffer for each type;
            `None` to pack where this is faster.
        hosts: The hosts that train together.
        split_ratios: The share of a batch of each tower of all hosts, relative to the
            others.
        by_host: Number of towers of each host.
        pipeline: The stages of each tower, and the schedule of micro-batches.
        members: The devices of the towers of each host, without those of later stages.
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
    members: tuple[tuple[str, ...], ...] = ()

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
            split_ratios: The share of a batch of each tower, relative to the others.
            home: The device of the variables, or that of each stage's.
            merges: The device that adds each stage's gradients; by default the device
                of the stage's variables.
            packed: See `Plan`.
            hosts: See `Plan`.
            pipeline: See `Plan`.
            ratios_of_hosts: The `split_ratios` of all hosts. By default the hosts
                exchange these, for which all hosts call this method together.
        """
        count = pipeline.micro_batches
        own = [device if isinstance(device, str) else device[0] for device in devices]
        if ratios_of_hosts is None:
            exchanged = hosts.exchange([[*split_ratios], own])
        else:
            exchanged = [(ratios, own) for ratios in ratios_of_hosts]
        ratios = [
            [n for n in ratios_of_host for _ in range(count)]
            for ratios_of_host, _ in exchanged
        ]
        members = tuple(tuple(of_host) for _, of_host in exchanged)
        first = itertools.count(sum(map(len, ratios[: hosts.index])))
        towers = tuple(
            Tower(
                next(first),
                (stage_devices,)
                if isinstance(stage_devices, str)
                else (*stage_devices,),
                n,
            )
            for stage_devices, n in zip(devices, split_ratios, strict=True)
            for _ in range(count)
        )
        homes = (home,) if isinstance(home, str) else (*home,)
        merges = homes if merges is None else (*merges,)
        on_gpus = any(is_gpu(device) for tower in towers for device in tower.devices)
        by_host, ratios = tuple(map(len, ratios)), tuple(itertools.chain(*ratios))
        values = on_gpus, packed, hosts, ratios, by_host, pipeline, members
        return cls(towers, homes, merges, *values)

    def of_stage(self, stage: int) -> "Plan":
        """Returns the plan of one stage, in which each tower has one device."""
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
        """Yields the indices of each stage's variables, and the plan of the stage."""
        stages = [*map(self.pipeline.stage_of, variables)]
        for stage in range(len(self.homes)):
            indices = [
                i
                for i, stage_of_variable in enumerate(stages)
                if stage_of_variable == stage
            ]
            if indices:
                yield indices, self.of_stage(stage)

    @property
    def home(self) -> str:
        """The device of operations that run once, such as metrics, or on all rows.

        It is the device of the last stage's variables, where outputs are made.
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
        """The devices over which this host shards the tables that are its own.

        Their number is the same on each host: that of the host with the fewest towers.
        A look-up has an operation for each shard, and hosts exchange the tensors that
        their steps have in common: with another number of shards, a host would exchange
        other tensors.
        """
        fewest = self.replicas[: min(self.replicas_by_host)]
        return tuple(dict.fromkeys(device for t in fewest for device in t.devices))

    @property
    def replicas(self) -> tuple[Tower, ...]:
        """The towers with devices of their own: the first micro-batch of each."""
        return self.towers[:: self.pipeline.micro_batches]

    @property
    def replicas_by_host(self) -> list[int]:
        """Number of `replicas` of each host."""
        return [count // self.pipeline.micro_batches for count in self.by_host]

    @property
    def count(self) -> int:
        """Number of towers, of all hosts."""
        return len(self.split_ratios)

    @property
    def share(self) -> "Share":
        """The share of each batch that this host computes."""
        first = self.towers[0].index
        return Share(self.split_ratios, first, first + len(self.towers))

    def bounds(self, total: tf.Tensor | int) -> list[tuple[Any, Any]]:
        """Computes the row ranges of the local batches of this host's towers.

        Args:
            total: Number of examples of the global batch.

        Returns:
            One pair (start, end) for each tower; see `batch.split_bounds`.
        """
        share = self.share
        bounds = batch.split_bounds(total, self.split_ratios)
        return bounds[share.first : share.end]

    def gather(self, rows: T, total: tf.Tensor | int, purpose: str) -> T:
        """Gathers the rows of a global batch from the towers of all hosts.

        Args:
            rows: A nest of the rows of this host's towers; see `World.all_gather`.
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
        """Computes each local batch's fraction of the global batch.

        Args:
            sizes: The result of `sizes`.
            total: Number of examples of the global batch.
        """
        return batch.fractions(sizes, None if self.hosts.count == 1 else total)

    @property
    def home_of(self) -> Callable[[keras.Variable], str]:
        """A function that returns the device of a variable, if its type is allowed.

        The variable is one of the model, its optimizer or its metrics; see
        `Pipeline.stage_of`. Variables of some types stay in host memory if the device
        is a GPU; see `layers.variables.move`.
        """
        stage_of = self.pipeline.stage_of
        return lambda variable: self.homes[stage_of(variable)]

    def places_of(self, copied: bool) -> Callable[[keras.Variable], tuple[str, ...]]:
        """Returns a function that returns all devices of a variable; see `home_of`.

        Args:
            copied: Whether each tower has a copy.
        """
        stage_of, homes = self.pipeline.stage_of, [(home,) for home in self.homes]
        if copied:
            homes = [*zip(*(tower.devices for tower in self.replicas), strict=True)]
        return lambda variable: homes[stage_of(variable)]

    def algorithm_for(self, name: str) -> str:
        """Returns how copies' gradients are added: a key of `reduce.ALGORITHMS`.

        With "auto", NCCL adds those of several hosts, if all can use it. Otherwise, the
        first GPU adds those of this host, or else the CPU. All hosts call this
        together.

        Args:
            name: The algorithm that the user has set, or "auto".
        """
        if name != "auto":
            return name
        fits = nccl_fits([tower.device for tower in self.replicas])
        if self.hosts.connects_devices and all(self.hosts.exchange(fits)):
            return "nccl"
        return "device" if is_gpu(self.home) else "cpu"

    def packs(self, device: str) -> bool:
        """Checks whether values are sent packed between home and a device.

        Packing is faster between different memories. Between logical CPUs no value is
        copied unless it is packed.
        """
        if self.packed is not None:
            return self.packed
        return (is_gpu(device) or is_gpu(self.home)) and device != self.home
