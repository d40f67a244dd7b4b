"""NVIDIA's GPUs as the machine and its driver show them, without TensorFlow."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from towers.doctor import process
from towers.machine import nvml
from towers.machine.nvml import Driver

HIDES = "CUDA_VISIBLE_DEVICES"
"""The variable by which GPUs are chosen, or hidden."""

_LIMIT_S = 30  # longer than `Driver` waits
_MB = 2**20


class SeenCard(NamedTuple):
    """A GPU.

    Attributes:
        index: Its number, as nvidia-smi counts.
        name: Its model.
        uuid: Its identity.
        memory_mb: Its memory.
        free_mb: What is free of that.
        capability: Its compute capability, such as "9.0"; empty if unknown.
    """

    index: int
    name: str
    uuid: str
    memory_mb: int
    free_mb: int
    capability: str = ""


class SeenMachine(NamedTuple):
    """What the machine shows of its GPUs.

    Attributes:
        on_bus: NVIDIA's GPUs on the PCI bus; a container sees the host's.
        device_files: Files /dev/nvidia0, ...
        cards: Those that the driver lists.
        driver: The driver's version, or empty.
        holders: (uuid of a GPU, who holds memory of it, MB).
        fault: Why the driver tells nothing, if so.
        hidden: Whether the environment hides all of them on purpose.
        cut_up: Whether one is cut up into slices (MIG).
    """

    on_bus: int
    device_files: int
    cards: tuple[SeenCard, ...] = ()
    driver: str = ""
    holders: tuple[tuple[str, str, int], ...] = ()
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
        return machine._replace(fault=f"it gives nothing within {_LIMIT_S} s")
    if code:
        *_, last = err.strip().splitlines() or [""]
        return machine._replace(fault=f"asking it fails: {last}")
    told = json.loads(out)
    told["cards"] = tuple(SeenCard(*card) for card in told["cards"])
    told["holders"] = tuple(map(tuple, told["holders"]))
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
    count = driver.ask(lambda nvml: nvml.nvmlDeviceGetCount(), 0)
    asked = (_card(driver, index) for index in range(count))
    found = [each for each in asked if each is not None]
    version = driver.ask(lambda nvml: nvml.nvmlSystemGetDriverVersion(), "")
    return {
        "cards": tuple(card for card, _ in found),
        "holders": tuple(each for _, held in found for each in held),
        "driver": version,
        "fault": driver.refuses or ("" if found else "it lists no GPU"),
        "cut_up": driver.has_slices(),
    }


def _card(
    driver: Driver, index: int
) -> tuple[SeenCard, list[tuple[str, str, int]]] | None:
    """Returns a card, and who holds its memory; `None` if the driver does not tell."""
    ask = driver.ask
    handle = ask(lambda nvml: nvml.nvmlDeviceGetHandleByIndex(index), None)
    memory = None if handle is None else driver.memory(handle)
    if memory is None:
        return None
    major, minor = ask(
        lambda nvml: nvml.nvmlDeviceGetCudaComputeCapability(handle), (0, 0)
    )
    card = SeenCard(
        index,
        ask(lambda nvml: nvml.nvmlDeviceGetName(handle), "a GPU"),
        ask(lambda nvml: nvml.nvmlDeviceGetUUID(handle), ""),
        memory.total // _MB,
        memory.free // _MB,
        f"{major}.{minor}" if major else "",
    )
    held = driver.processes(handle).items()
    return card, [
        (card.uuid, _who(driver, pid), (used or 0) // _MB) for pid, used in held
    ]


def _by_files(root: Path, environ: Mapping[str, str]) -> SeenMachine:
    return SeenMachine(
        nvml.on_bus(root),
        nvml.device_files(root),
        hidden=environ.get(HIDES) in ("", "-1"),
    )


def _who(driver: Driver, pid: int) -> str:
    """Says what a process is, as far as it can be seen from here."""
    name = driver.ask(lambda nvml: nvml.nvmlSystemGetProcessName(pid), "")
    short = f"process {pid} ({name})" if name else f"process {pid}"
    try:
        from towers.processes.described import describe_holder
    except ImportError:
        return short  # psutil may be what is missing
    found = describe_holder(pid)
    return str(found) if found.command or not name else short


if __name__ == "__main__":
    print(json.dumps(told_by(Driver())))
