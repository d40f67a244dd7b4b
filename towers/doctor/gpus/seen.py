"""NVIDIA's GPUs as the machine shows them, without TensorFlow."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from towers.doctor import process
from towers.doctor.finding import in_a_line
from towers.machine.nvml import Driver

HIDES = "CUDA_VISIBLE_DEVICES"
"""The variable by which GPUs are chosen, or hidden."""

_VENDOR, _DISPLAY = "0x10de", "0x03"  # of the PCI bus
_SMI_S = 20
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
    """Looks for GPUs, by nvidia-smi; nothing that it finds or misses is an error."""
    machine = _by_files(root, environ)
    try:
        return _listed(machine)
    except FileNotFoundError:
        return machine._replace(fault="nvidia-smi is not installed")
    except _SmiError as error:
        return machine._replace(fault=str(error))
    except (OSError, ValueError) as error:
        return machine._replace(fault=f"nvidia-smi fails: {in_a_line(error)}")


def by_driver(
    driver: Driver, root: Path = Path("/"), environ: Mapping[str, str] = os.environ
) -> SeenMachine:
    """Looks for GPUs as `look` does, by the driver's library, which takes no second.

    Args:
        driver: What to ask.
        root: The folder of /dev and /sys.
        environ: The environment, which may hide GPUs.
    """
    machine = _by_files(root, environ)
    count = driver.ask(lambda nvml: nvml.nvmlDeviceGetCount(), 0)
    asked = (_card(driver, index) for index in range(count))
    found = [each for each in asked if each is not None]
    version = driver.ask(lambda nvml: nvml.nvmlSystemGetDriverVersion(), "")
    return machine._replace(
        cards=tuple(card for card, _ in found),
        holders=tuple(each for _, held in found for each in held),
        driver=version,
        fault=driver.refuses or ("" if found else "it lists no GPU"),
        cut_up=driver.has_slices(),
    )


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
    return card, [(card.uuid, _who(pid), (used or 0) // _MB) for pid, used in held]


def _by_files(root: Path, environ: Mapping[str, str]) -> SeenMachine:
    on_bus = sum(
        _read(folder / "vendor") == _VENDOR
        and _read(folder / "class").startswith(_DISPLAY)
        for folder in (root / "sys/bus/pci/devices").glob("*")
    )
    files = len([*(root / "dev").glob("nvidia[0-9]*")])
    return SeenMachine(on_bus, files, hidden=environ.get(HIDES) in ("", "-1"))


def _listed(machine: SeenMachine) -> SeenMachine:
    """Adds what nvidia-smi tells."""
    rows = _ask_smi("gpu=index,name,uuid,memory.total,memory.free,driver_version")
    capabilities = _of_each("compute_cap")  # of drivers from 510 on
    modes = _of_each("mig.mode.current")
    held = _ask_smi("compute-apps=gpu_uuid,pid,process_name,used_memory")
    cards = tuple(
        SeenCard(
            int(i), name, uuid, _number(memory), _number(free), capabilities.get(i, "")
        )
        for i, name, uuid, memory, free, _ in rows
    )
    holders = tuple(
        (uuid, _who(int(pid), name), _number(used)) for uuid, pid, name, used in held
    )
    driver = rows[0][-1] if rows else ""
    return machine._replace(
        cards=cards,
        driver=driver,
        holders=holders,
        cut_up="Enabled" in modes.values(),
    )


def _who(pid: int, name: str = "") -> str:
    """Says what a process is, as far as it can be seen from here."""
    short = f"process {pid} ({name})" if name else f"process {pid}"
    try:
        from towers.processes.described import describe_holder
    except ImportError:
        return short  # psutil may be what is missing
    found = describe_holder(pid)
    return str(found) if found.command or not name else short


def _of_each(field: str) -> dict[str, str]:
    """What nvidia-smi tells by the GPU's number; nothing if it does not know it."""
    try:
        return dict(_ask_smi(f"gpu=index,{field}"))
    except (_SmiError, ValueError):
        return {}


class _SmiError(Exception):
    """nvidia-smi does not answer."""


def _ask_smi(query: str) -> list[list[str]]:
    # Not `machine.nvml`: a broken driver would keep this process, and its package may
    # be what is missing.
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    out, err, code = process.run(command, _SMI_S)
    if code is None:
        raise _SmiError(f"nvidia-smi gives nothing within {_SMI_S} s")
    if code:
        raise _SmiError(f"nvidia-smi says: {' '.join((out or err).split())}")
    return [[field.strip() for field in line.split(",")] for line in out.splitlines()]


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
