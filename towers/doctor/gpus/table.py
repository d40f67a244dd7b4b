"""Who holds which GPU: a table of all GPUs of this machine, and their processes."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from towers.doctor.gpus import notes as gpu_notes
from towers.elastic.requests import LOCK
from towers.machine.nvml import Driver
from towers.processes.described import Described, describe, folder_of_lock

_MB = 2**20
# A run has its flags beside the file that it locks.
_FLAGS = "flags.txt"


@dataclasses.dataclass(frozen=True)
class Holder:
    """A process that holds memory of a GPU.

    Attributes:
        process: What it is.
        memory_mb: What it holds; `None` if the driver does not tell.
        model_dir: Where it trains, if it is a run of Towers; else empty.
    """

    process: Described
    memory_mb: int | None
    model_dir: str = ""


@dataclasses.dataclass(frozen=True)
class Slice:
    """A part of a GPU that is cut up (MIG).

    Attributes:
        uuid: Its UUID, by which CUDA_VISIBLE_DEVICES names it.
        name: Its kind.
        memory_mb: Its memory.
    """

    uuid: str
    name: str
    memory_mb: int


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        index: Its number, as nvidia-smi counts.
        name: Its model.
        uuid: Its UUID.
        used_mb: The memory that all processes hold.
        memory_mb: All memory that it has.
        utilization: The part of the last moments in which it computed, 0 to 1.
        holders: The processes that hold memory of it.
        slices: Its slices, if it is cut up.
        notes: What else is to be known of it.
    """

    index: int
    name: str
    uuid: str
    used_mb: int
    memory_mb: int
    utilization: float | None
    holders: tuple[Holder, ...] = ()
    slices: tuple[Slice, ...] = ()
    notes: tuple[str, ...] = ()


def cards(
    driver: Driver | None = None, environ: Mapping[str, str] = os.environ
) -> list[Card]:
    """Lists the GPUs of this machine, whoever uses them.

    Args:
        driver: What to ask. Whatever it does not tell is left out.
        environ: The environment of programs that would use them.

    Raises:
        ValueError: The driver does not answer.
    """
    driver = driver or Driver()
    if driver.refuses:
        raise ValueError(
            f"NVIDIA's driver tells nothing of GPUs ({driver.refuses}); expected a "
            "machine with a GPU, its driver and pip install nvidia-ml-py."
        )
    count = driver.ask(lambda nvml: nvml.nvmlDeviceGetCount(), 0)
    return [_card(driver, index, environ) for index in range(count)]


def _card(driver: Driver, index: int, environ: Mapping[str, str]) -> Card:
    ask = driver.ask
    handle = ask(lambda nvml: nvml.nvmlDeviceGetHandleByIndex(index), None)
    memory = ask(
        lambda nvml: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2), None
    )
    busy = ask(lambda nvml: nvml.nvmlDeviceGetUtilizationRates(handle).gpu, None)
    return Card(
        index,
        _text(ask(lambda nvml: nvml.nvmlDeviceGetName(handle), "a GPU")),
        _text(ask(lambda nvml: nvml.nvmlDeviceGetUUID(handle), "")),
        memory.used // _MB if memory else 0,
        memory.total // _MB if memory else 0,
        None if busy is None else busy / 100,
        tuple(_holders(driver, handle)),
        tuple(_slices(driver, handle)),
        tuple(gpu_notes.notes(driver, handle, environ)),
    )


def _holders(driver: Driver, handle: Any) -> list[Holder]:
    found = driver.ask(
        lambda nvml: nvml.nvmlDeviceGetComputeRunningProcesses(handle), []
    )
    return [
        Holder(
            describe(each.pid),
            None if each.usedGpuMemory is None else each.usedGpuMemory // _MB,
            _model_dir(each.pid),
        )
        for each in found
    ]


def _model_dir(pid: int) -> str:
    folder = folder_of_lock(pid, LOCK)
    return folder if folder and os.path.exists(os.path.join(folder, _FLAGS)) else ""


def _slices(driver: Driver, handle: Any) -> list[Slice]:
    ask, found = driver.ask, []
    for index in range(
        ask(lambda nvml: nvml.nvmlDeviceGetMaxMigDeviceCount(handle), 0)
    ):
        part = ask(
            lambda nvml, index=index: nvml.nvmlDeviceGetMigDeviceHandleByIndex(
                handle, index
            ),
            None,
        )
        if part is None:
            continue  # this place is empty
        memory = ask(lambda nvml, part=part: nvml.nvmlDeviceGetMemoryInfo(part), None)
        found.append(
            Slice(
                _text(ask(lambda nvml, part=part: nvml.nvmlDeviceGetUUID(part), "")),
                _text(ask(lambda nvml, part=part: nvml.nvmlDeviceGetName(part), "MIG")),
                memory.total // _MB if memory else 0,
            )
        )
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def as_text(found: list[Card]) -> str:
    """Sets the GPUs out in lines, each with its processes, slices and notes below."""
    if not found:
        return "There is no NVIDIA GPU in this machine."
    lines = []
    for card in found:
        busy = "" if card.utilization is None else f", {card.utilization:.0%} busy"
        lines.append(
            f"GPU {card.index}  {card.name}, {card.uuid}: {card.used_mb:,} of "
            f"{card.memory_mb:,} MB held{busy}"
        )
        for holder in card.holders:
            held = "?" if holder.memory_mb is None else f"{holder.memory_mb:,}"
            lines.append(f"    {held} MB by {holder.process}")
            if holder.model_dir:
                lines.append(f"        trains in {holder.model_dir}")
        if not card.holders:
            lines.append("    no process that can be seen from here")
        for part in card.slices:
            lines.append(f"    slice {part.uuid}: {part.name}, {part.memory_mb:,} MB")
        if len(card.slices) > 1:
            lines.append(
                "    CUDA gives a process one slice: train on each in a process of its "
                f"own, with CUDA_VISIBLE_DEVICES={card.slices[0].uuid}"
            )
        lines += [f"    note: {note}" for note in card.notes]
    return "\n".join(lines)


def as_json(found: list[Card]) -> list[dict[str, Any]]:
    """Returns the same for machines, as JSON has it."""
    every = []
    for card in found:
        each = dataclasses.asdict(card)
        for holder in each["holders"]:
            holder["process"] = holder["process"]._asdict()
        every.append(each)
    return every
