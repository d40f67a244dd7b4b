"""Who holds which GPU: a table of all GPUs of this machine, and their processes."""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from towers.doctor.gpus import notes as gpu_notes
from towers.elastic.requests import LOCK
from towers.machine.nvml import UNSEEN_MB, Driver
from towers.processes.described import Described, describe_holder, folder_of_lock

_MB = 2**20
# A run has its flags beside the file that it locks.
_FLAGS = "flags.txt"
# Of another user's run, the command alone may be seen.
_COMMAND = re.compile(r"\btowers[. ]train\b.*?--?model_dir[= ](/\S+)")


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
        used_mb: The memory of it that is held; `None` if the driver does not tell.
        memory_mb: All memory that it has; likewise.
        holders: The processes that hold memory of it.
    """

    uuid: str
    name: str
    used_mb: int | None = None
    memory_mb: int | None = None
    holders: tuple[Holder, ...] = ()


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        index: Its number, as nvidia-smi counts.
        name: Its model.
        uuid: Its UUID.
        used_mb: The memory that all processes hold; `None` if the driver does not tell.
        memory_mb: All memory that it has; likewise.
        utilization: The part of the last moments in which it computed, 0 to 1.
        holders: The processes that hold memory of it.
        slices: Its slices, if it is cut up.
        notes: What else is to be known of it.
        fault: Why the driver tells nothing of it, if so.
    """

    index: int
    name: str = "a GPU"
    uuid: str = ""
    used_mb: int | None = None
    memory_mb: int | None = None
    utilization: float | None = None
    holders: tuple[Holder, ...] = ()
    slices: tuple[Slice, ...] = ()
    notes: tuple[str, ...] = ()
    fault: str = ""


def cards(
    driver: Driver | None = None, environ: Mapping[str, str] = os.environ
) -> list[Card]:
    """Lists the GPUs of this machine, whoever uses them.

    Args:
        driver: What to ask. Whatever it does not tell is left out.
        environ: The environment of programs that would use them.

    Raises:
        ValueError: There is no driver, or it does not answer.
    """
    driver = driver or Driver()
    if driver.absent:
        raise ValueError(
            "No NVIDIA driver was found on this machine; expected one, so install it "
            "if there is a GPU, or leave out --gpus."
        )
    count = driver.ask(lambda nvml: nvml.nvmlDeviceGetCount(), 0)
    found = [_card(driver, index, environ) for index in range(count)]
    if driver.refuses:  # before, or meanwhile
        raise ValueError(
            f"NVIDIA's driver tells nothing of GPUs ({driver.refuses}); expected a "
            "machine with a GPU, its driver and pip install nvidia-ml-py."
        )
    return found


def _card(driver: Driver, index: int, environ: Mapping[str, str]) -> Card:
    ask = driver.ask
    handle, fault = ask(lambda nvml: _handle(nvml, index), (None, ""))
    if handle is None:
        return Card(index, fault=fault)
    busy = ask(lambda nvml: nvml.nvmlDeviceGetUtilizationRates(handle).gpu, None)
    return Card(
        index,
        _text(ask(lambda nvml: nvml.nvmlDeviceGetName(handle), Card.name)),
        _text(ask(lambda nvml: nvml.nvmlDeviceGetUUID(handle), "")),
        *_memory_mb(driver, handle),
        None if busy is None else busy / 100,
        tuple(_holders(driver, handle)),
        tuple(_slices(driver, handle)),
        tuple(gpu_notes.notes(driver, handle, environ)),
    )


def _handle(nvml: Any, index: int) -> tuple[Any | None, str]:
    """Returns NVML's handle of a GPU, or why there is none, as of one that is lost."""
    try:
        return nvml.nvmlDeviceGetHandleByIndex(index), ""
    except nvml.NVMLError as error:
        return None, str(error)


def _memory_mb(driver: Driver, handle: Any) -> tuple[int | None, int | None]:
    memory = driver.memory(handle)
    return (None, None) if memory is None else (memory.used // _MB, memory.total // _MB)


def _holders(driver: Driver, handle: Any) -> list[Holder]:
    return [
        Holder(
            found := describe_holder(pid),
            None if used is None else used // _MB,
            _model_dir(found),
        )
        for pid, used in driver.processes(handle).items()
    ]


def _model_dir(process: Described) -> str:
    if process.outside:
        return ""
    folder = folder_of_lock(process.pid, LOCK)
    if folder and os.path.exists(os.path.join(folder, _FLAGS)):
        return folder
    named = _COMMAND.search(process.command)
    return named[1] if named else ""


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
        found.append(
            Slice(
                _text(ask(lambda nvml, part=part: nvml.nvmlDeviceGetUUID(part), "")),
                _text(ask(lambda nvml, part=part: nvml.nvmlDeviceGetName(part), "MIG")),
                *_memory_mb(driver, part),
                tuple(_holders(driver, part)),
            )
        )
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def as_text(found: list[Card]) -> str:
    """Sets the GPUs out in lines, each with its processes, slices and notes below."""
    if not found:
        return "There is no NVIDIA GPU in this machine."
    return "\n".join(line for card in found for line in _lines(card))


def _lines(card: Card) -> Iterator[str]:
    if card.fault:
        yield (
            f"GPU {card.index}  the driver tells nothing of it ({card.fault}); start "
            "the machine anew"
        )
        return
    name = ", ".join(filter(None, [card.name, card.uuid]))
    busy = "" if card.utilization is None else f", {card.utilization:.0%} busy"
    yield f"GPU {card.index}  {name}: {_held(card)}{busy}"
    if not card.slices:
        yield from _of_holders(card)
    for part in card.slices:
        yield f"    slice {part.uuid}: {part.name}, {_held(part)}"
        yield from (f"    {line}" for line in _of_holders(part))
    if len(card.slices) > 1:
        yield (
            "    CUDA gives a process one slice: train on each in a process of its "
            f"own, with CUDA_VISIBLE_DEVICES={card.slices[0].uuid}"
        )
    yield from (f"    note: {note}" for note in card.notes)


def _held(part: Card | Slice) -> str:
    if part.memory_mb is None:
        return "memory unknown"
    return f"{part.used_mb:,} of {part.memory_mb:,} MB held"


def _of_holders(part: Card | Slice) -> Iterator[str]:
    for holder in part.holders:
        held = "?" if holder.memory_mb is None else f"{holder.memory_mb:,}"
        yield f"    {held} MB by {holder.process}"
        if holder.model_dir:
            yield f"        trains in {holder.model_dir}"
    if not part.holders and (part.used_mb or 0) >= UNSEEN_MB:
        yield "    by processes that cannot be seen from here, as those of a container"


def of_this_host() -> dict[str, Any]:
    """Returns what this host tells others: its GPUs as `text` and as JSON, `gpus`.

    Where the driver does not answer, the text says so, and `gpus` is `None`.
    """
    try:
        found = cards()
    except ValueError as error:
        return {"text": str(error), "gpus": None}
    return {"text": as_text(found), "gpus": as_json(found)}


def as_json(found: list[Card]) -> list[dict[str, Any]]:
    """Returns the same for machines, as JSON has it."""
    every = [dataclasses.asdict(card) for card in found]
    for each in every:
        for part in (each, *each["slices"]):
            for holder in part["holders"]:
                holder["process"] = holder["process"]._asdict()
    return every
