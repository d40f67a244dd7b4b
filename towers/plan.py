"""The plan of a run, a value: hosts, towers, and where variables live.

Whoever computes asks the plan where. Nothing here makes an operation.
"""

import dataclasses
from collections.abc import Sequence

import keras

from towers.collectives.hosts import ONE_HOST, OneHost
from towers.devices import is_gpu


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
    """

    towers: tuple[Tower, ...]
    home: str
    merge: str
    on_gpus: bool
    packed: bool | None = None
    hosts: OneHost = ONE_HOST

    @classmethod
    def of(
        cls,
        devices: Sequence[str],
        split_ratios: Sequence[int],
        home: str,
        merge: str | None = None,
        packed: bool | None = None,
    ) -> "Plan":
        """Makes the plan of one host.

        Args:
            devices: A device string for each tower.
            split_ratios: How much of a batch each gets, relative to the others.
            home: See `Plan`.
            merge: See `Plan`; `home` by default.
            packed: See `Plan`.
        """
        pairs = zip(devices, split_ratios, strict=True)
        towers = tuple(Tower(k, (device,), n) for k, (device, n) in enumerate(pairs))
        on_gpus = any(map(is_gpu, devices))
        return cls(towers, home, merge or home, on_gpus, packed)

    def of_each_tower(self) -> "Plan":
        """Returns the plan of a tower by itself, on whichever device calls it.

        That device is unknown, "", and nothing travels.
        """
        alone = (Tower(0, ("",)),)
        return dataclasses.replace(self, towers=alone, merge=self.home, packed=False)

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each tower."""
        return tuple(tower.device for tower in self.towers)

    @property
    def split_ratios(self) -> tuple[int, ...]:
        """How much of a batch each tower gets, relative to the others."""
        return tuple(tower.ratio for tower in self.towers)

    @property
    def count(self) -> int:
        """Number of towers, of all hosts."""
        return self.hosts.sum(len(self.towers))

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
