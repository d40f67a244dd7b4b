"""NVIDIA's GPUs as the machine and its driver show them, without TensorFlow."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from towers.doctor import process
from towers.machine import nvml
from towers.machine.nvml import Driver, Gpu, Holder

HIDES = "CUDA_VISIBLE_DEVICES"
"""The variable by which GPUs are chosen, or hidden."""

_LIMIT_S = 30  # longer than `Driver` waits


class SeenMachine(NamedTuple):
    """What the machine shows of its GPUs.

    Attributes:
        on_bus: NVIDIA's GPUs on the PCI bus; a container sees the host's.
        device_files: Files /dev/nvidia0, ...
        cards: Those whose memory the driver tells.
        driver: The driver's version, or empty.
        fault: Why the driver tells nothing, if so, and what to do.
        hidden: Whether the environment hides all of them on purpose.
        cut_up: Whether one is cut up into slices (MIG).
    """

    on_bus: int
    device_files: int
    cards: tuple[Gpu, ...] = ()
    driver: str = ""
    fault: str = ""
    hidden: bool = False
    cut_up: bool = False

    @property
    def gpus(self) -> int:
        """How many there are: those that a container has, or else the host's."""
        return max(self.device_files, len(self.cards)) or self.on_bus

    @property
    def in_use(self) -> bool:
        """Whether there are any, and they are meant to be used."""
        return self.gpus > 0 and not self.hidden


def look(
    root: Path = Path("/"), environ: Mapping[str, str] = os.environ
) -> SeenMachine:
    """Looks for GPUs; nothing that it finds or misses is an error.

    The driver is asked by a process of its own: one that waits for a broken driver
    cannot even be killed.

    Args:
        root: The folder of /dev and /sys.
        environ: The environment, which may hide GPUs.
    """
    machine = _by_files(root, environ)
    command = [sys.executable, "-m", "towers.doctor.gpus.seen"]
    out, err, code = process.run(command, _LIMIT_S)
    if code is None:
        return machine._replace(
            fault=f"NVIDIA's driver gives nothing within {_LIMIT_S} s; {nvml.RESTART}"
        )
    if code:
        *_, last = err.strip().splitlines() or [""]
        return machine._replace(
            fault=f"asking NVIDIA's driver fails: {last}; {nvml.RESTART}"
        )
    told = json.loads(out)
    told["cards"] = tuple(map(_read, told["cards"]))
    return machine._replace(**told)


def by_driver(
    driver: Driver, root: Path = Path("/"), environ: Mapping[str, str] = os.environ
) -> SeenMachine:
    """Looks for GPUs as `look` does, in this process, which takes milliseconds.

    Args:
        driver: What to ask.
        root: The folder of /dev and /sys.
        environ: The environment, which may hide GPUs.
    """
    return _by_files(root, environ)._replace(**told_by(driver))


def told_by(driver: Driver) -> dict[str, Any]:
    """Returns what the driver tells of a `SeenMachine`, by the names of attributes."""
    listed = driver.gpus()
    cards = tuple(gpu for gpu in listed if gpu.memory_mb is not None)
    nothing = "" if cards else f"NVIDIA's driver lists no GPU; {nvml.RESTART}"
    return {
        "cards": cards,
        "driver": driver.ask(lambda nvml: nvml.nvmlSystemGetDriverVersion(), ""),
        "fault": driver.refuses or nothing,
        "cut_up": any(gpu.cut_up for gpu in listed),
    }


def _read(card: Sequence[Any]) -> Gpu:
    """Returns a GPU as it was before it was JSON."""
    gpu = Gpu(*card)
    return gpu._replace(
        holders=tuple(Holder(*each) for each in gpu.holders),
        slices=tuple(map(_read, gpu.slices)),
        notes=tuple(gpu.notes),
    )


def _by_files(root: Path, environ: Mapping[str, str]) -> SeenMachine:
    return SeenMachine(
        nvml.on_bus(root),
        nvml.device_files(root),
        hidden=environ.get(HIDES) in ("", "-1"),
    )


if __name__ == "__main__":
    print(json.dumps(told_by(Driver())))
