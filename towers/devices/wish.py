"""Checks the requested devices before any device is touched."""

import collections
import dataclasses
import numbers
from collections.abc import Sequence

# The most devices for one process; without GPUs, it would create as many CPUs.
MOST_DEVICES = 256


@dataclasses.dataclass(frozen=True)
class DeviceWish:
    """The arguments of `configure`, under the same names.

    Raises:
        ValueError: An argument is not understood, or contradicts another.
    """

    num_gpus: int | None = None
    gpu_indices: Sequence[int] | None = None
    allow_growth: bool | None = None
    gpu_memory_limit_mb: int | None = None
    gpu_split: int = 1
    local_parameter_device: str | None = None
    max_gpus: int | None = None
    gpu_memory_fraction: float | None = None

    def __post_init__(self):
        """Checks that the arguments fit together."""
        _check_counts(self.num_gpus, self.gpu_memory_limit_mb, self.gpu_split)
        _check_indices(self.num_gpus, self.gpu_indices)
        self._check_most()
        self._check_wanted()
        self._check_fraction()
        _check_memory(self.allow_growth, self.limit, self.gpu_split)
        if self.local_parameter_device not in (None, "cpu", "gpu"):
            raise ValueError(
                'local_parameter_device must be "cpu", "gpu" or None, but '
                f"{self.local_parameter_device!r} was received; choose one of them."
            )

    @property
    def begins_with(self) -> int | None:
        """The number of GPUs that have towers at first; `None` for all."""
        return self.num_gpus if self.gpu_indices is None else len(self.gpu_indices)

    @property
    def most(self) -> int | None:
        """The number of GPUs to set up; `None` for all."""
        return self.begins_with if self.max_gpus is None else self.max_gpus

    def _check_most(self):
        most, first = self.max_gpus, self.begins_with
        if most is None:
            return
        if not is_int(most) or most < (first or 1):
            raise ValueError(
                f"max_gpus must be a whole number of at least {first or 1}, with which "
                f"training begins, but {most!r} was received; leave it out to use no "
                "others later."
            )

    def _check_wanted(self):
        wanted = (self.most or 1) * self.gpu_split
        if wanted <= MOST_DEVICES:
            return
        names = "num_gpus", "max_gpus"
        given = [f"{n}={v}" for n in names if (v := getattr(self, n)) is not None]
        raise ValueError(
            f"{', '.join(given)} and gpu_split={self.gpu_split} were received, which "
            f"are {wanted:,} devices; use at most {MOST_DEVICES}."
        )

    @property
    def grows(self) -> bool:
        """Whether TensorFlow takes a GPU's memory as needed."""
        return not self.limit and self.allow_growth is not False

    @property
    def limit(self) -> str:
        """The memory limit as it was given; empty without one."""
        for name in ("gpu_memory_limit_mb", "gpu_memory_fraction"):
            if (value := getattr(self, name)) is not None:
                return f"{name}={value}"
        return ""

    def _check_fraction(self):
        fraction = self.gpu_memory_fraction
        if fraction is None:
            return
        if not isinstance(fraction, float | int) or not 0 < fraction <= 1:
            raise ValueError(
                "gpu_memory_fraction must be more than 0 and at most 1, but "
                f"{fraction!r} was received; leave it out for no limit."
            )
        if self.gpu_memory_limit_mb is not None:
            raise ValueError(
                f"gpu_memory_fraction={fraction} was received with {self.limit}, and "
                "both limit the memory of a GPU; leave one of the two out."
            )


def is_int(value: object) -> bool:
    """Returns whether a value is a whole number; `True` is not one."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_unique(
    name: str, received: Sequence[object], values: Sequence[object]
) -> None:
    """Raises a ValueError if one of `values`, made of `received`, comes twice."""
    repeated = [v for v, n in collections.Counter(values).items() if n > 1]
    if repeated:
        raise ValueError(
            f"{name}={list(received)} was received, which names {repeated[0]} more "
            "than once; name each device once."
        )


def _check_counts(
    num_gpus: int | None, gpu_memory_limit_mb: int | None, gpu_split: int
) -> None:
    for name, value, fix in (
        ("num_gpus", num_gpus, "leave it out to use all GPUs"),
        ("gpu_memory_limit_mb", gpu_memory_limit_mb, "leave it out for no limit"),
        ("gpu_split", gpu_split, "use 1 for whole GPUs"),
    ):
        if value is None and name != "gpu_split":
            continue
        if not is_int(value) or value < 1:
            raise ValueError(
                f"{name} must be a whole number of at least 1, but {value!r} was "
                f"received; {fix}."
            )


def _check_indices(num_gpus: int | None, gpu_indices: Sequence[int] | None) -> None:
    if gpu_indices is None:
        return
    if (
        not isinstance(gpu_indices, Sequence)
        or not gpu_indices
        or not all(is_int(index) and index >= 0 for index in gpu_indices)
    ):
        raise ValueError(
            f"gpu_indices must be a list of GPU numbers from 0, but {gpu_indices!r} "
            "was received; write for example [0, 2], or leave it out to use all GPUs."
        )
    check_unique("gpu_indices", gpu_indices, gpu_indices)
    if num_gpus is not None and num_gpus != len(gpu_indices):
        raise ValueError(
            f"num_gpus={num_gpus} was received with gpu_indices={list(gpu_indices)}, "
            f"which has {len(gpu_indices)}; leave one of the two out."
        )


def _check_memory(allow_growth: bool | None, limit: str, gpu_split: int) -> None:
    if allow_growth not in (None, True, False):
        raise ValueError(
            f"allow_growth must be True, False or None, but {allow_growth!r} was "
            "received; leave it out to let memory grow unless there is a limit."
        )
    if allow_growth and limit:
        raise ValueError(
            f"allow_growth=True was received with {limit}, but TensorFlow takes "
            "limited memory at once; leave one of the two out."
        )
    if gpu_split > 1 and not limit:
        raise ValueError(
            f"gpu_split={gpu_split} was received without gpu_memory_limit_mb, but "
            "TensorFlow needs a limit for each logical GPU; add gpu_memory_limit_mb, "
            f"at most 1/{gpu_split} of a GPU's memory."
        )
