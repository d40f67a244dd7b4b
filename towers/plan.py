"""The plan of a run, a value: hosts, towers, and where variables live.

Whoever computes asks the plan where. It makes no operation but to tell which rows.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from towers.collectives import batch
from towers.collectives.hosts import ONE_HOST, OneHost
from towers.devices import is_gpu

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

    def of_batch(self, x: Any, first: Any, total: Any, mark: Any) -> batch.Part:
        """Says which rows of a batch x has; see `batch.Part`."""
        return batch.Part(x, *(tf.cast(n, tf.int32) for n in (first, total, mark)))


@dataclasses.dataclass(frozen=True)
class Tower:
    """One computation of the model, for its own rows of each batch.

    Attributes:
        index: Its number among the towers of all hosts, from 0.
        devices: The devices of its stages, in order; so far every tower has one stage.
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
        home: The device of the variables: updates, losses of gathered outputs and
            metrics are computed there.
        merge: The device on which gradients are added.
        on_gpus: Whether a tower is on a GPU.
        packed: Whether parameters and gradients travel in one buffer for each type;
            `None` for where that pays.
        hosts: The hosts that train together.
        split_ratios: How much of a batch each tower of all hosts gets, relative to the
            others.
    """

    towers: tuple[Tower, ...]
    home: str
    merge: str
    on_gpus: bool
    packed: bool | None
    hosts: OneHost
    split_ratios: tuple[int, ...]

    @classmethod
    def of(
        cls,
        devices: Sequence[str],
        split_ratios: Sequence[int],
        home: str,
        merge: str | None = None,
        packed: bool | None = None,
        hosts: OneHost = ONE_HOST,
    ) -> "Plan":
        """Makes the plan of this host; all hosts call it together.

        Args:
            devices: A device string for each tower of this host.
            split_ratios: How much of a batch each gets, relative to the others.
            home: See `Plan`.
            merge: See `Plan`; `home` by default.
            packed: See `Plan`.
            hosts: See `Plan`.
        """
        ratios = hosts.tell_all([*split_ratios])
        first = sum(map(len, ratios[: hosts.index]))
        pairs = zip(devices, split_ratios, strict=True)
        towers = tuple(
            Tower(first + k, (device,), n) for k, (device, n) in enumerate(pairs)
        )
        on_gpus = any(map(is_gpu, devices))
        ratios = tuple(itertools.chain(*ratios))
        return cls(towers, home, merge or home, on_gpus, packed, hosts, ratios)

    def of_each_tower(self) -> "Plan":
        """Returns the plan of a tower by itself, on whichever device calls it.

        That device is unknown, "", and nothing travels.
        """
        return dataclasses.replace(
            self,
            towers=(Tower(0, ("",)),),
            merge=self.home,
            packed=False,
            hosts=ONE_HOST,
            split_ratios=(1,),
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each tower."""
        return tuple(tower.device for tower in self.towers)

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
            rows: A nest of what this host's towers have; see `OneHost.gather`.
            total: Number of examples of the global batch.
            purpose: See `OneHost.gather`.
        """
        return self.hosts.gather(rows, total, purpose)

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

    def home_of(self, variable: keras.Variable) -> str:
        """Returns the device on which a variable lives, if it can be there.

        It is one of the model, its optimizer or its metrics. GPUs have some types only
        in the host's memory; see `layers.variables.move`.
        """
        return self.home

    def packs(self, device: str) -> bool:
        """Tells whether values travel packed between home and a device.

        That pays where they travel, from one memory to another. Between logical CPUs
        nothing is copied, unless it is packed.
        """
        if self.packed is not None:
            return self.packed
        return (is_gpu(device) or is_gpu(self.home)) and device != self.home
