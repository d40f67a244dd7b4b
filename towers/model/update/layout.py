"""Which devices compute, and how much of a batch each tower gets: a value."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from towers.devices.names import nccl_fits, resolve
from towers.program import words


@dataclasses.dataclass(frozen=True)
class Layout:
    """The towers of this host.

    Attributes:
        towers: The devices of each tower: one for each of its stages.
        split_ratios: How much of a batch each gets, relative to the others.
    """

    towers: tuple[tuple[str, ...], ...]
    split_ratios: tuple[int, ...]

    @classmethod
    def of(
        cls,
        gpus: int | Sequence[int] | Sequence[str] | None,
        stages: int,
        split_ratios: Sequence[int] | None,
    ) -> "Layout":
        """Reads arguments of `multi_gpu_model`.

        Raises:
            ValueError: A device does not exist, or the numbers do not fit.
        """
        towers = tuple(grouped(resolve(gpus), stages))
        return cls(towers, _checked(split_ratios, len(towers)))

    @property
    def firsts(self) -> list[str]:
        """The first device of each tower."""
        return [each[0] for each in self.towers]

    @property
    def nccl_fits(self) -> bool:
        """Whether NCCL can add gradients of these towers."""
        return nccl_fits(self.firsts)

    def __str__(self) -> str:
        text = words.count(len(self.towers), "tower")
        if len({*self.split_ratios}) > 1:
            text += f" in the ratio {':'.join(map(str, self.split_ratios))}"
        return text


def grouped(devices: Sequence[str], stages: Any) -> list[tuple[str, ...]]:
    """Returns the devices of each tower: as many as there are stages."""
    check_count("stages", stages)
    if len(devices) % stages:
        raise ValueError(
            f"Received stages={stages} for {words.count(len(devices), 'device')}; "
            "expected a number of stages that divides that of the devices, as each "
            "tower takes one for each stage."
        )
    firsts = range(0, len(devices), stages)
    return [tuple(devices[k : k + stages]) for k in firsts]


def _checked(ratios: Any, towers: int) -> tuple[int, ...]:
    """Returns the ratios, even by default."""
    if ratios is None:
        return (1,) * towers
    try:
        found = tuple(map(operator.index, ratios))
    except TypeError:
        found = ()
    if len(found) != towers or min(found) < 1:
        raise ValueError(
            f"Received split_ratios={ratios} for {towers} towers; expected a positive "
            "integer for each, such as (2, 3, 3)."
        )
    return found


def check_count(name: str, value: Any) -> None:
    """Checks that an argument is a number of things."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"Received {name}={value!r}; expected an integer from 1.")
