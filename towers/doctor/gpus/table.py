"""Who holds which GPU: a table of all GPUs of this machine, and their processes."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from towers.doctor.gpus import notes as gpu_notes
from towers.elastic.requests import LOCK
from towers.machine.nvml import UNSEEN_MB, Driver, Gpu, Holder
from towers.processes.described import Described, describe_holder, folder_of_lock

# A run has its flags beside the file that it locks.
_FLAGS = "flags.txt"
# Of another user's run, the command alone may be seen.
_COMMAND = re.compile(r"\btowers[. ]train\b.*?--?model_dir[= ](/\S+)")


def cards(
    driver: Driver | None = None, environ: Mapping[str, str] = os.environ
) -> list[Gpu]:
    """Lists the GPUs of this machine, whoever uses them, with notes on each.

    Args:
        driver: What to ask. Whatever it does not tell is left out.
        environ: The environment of programs that would use them.

    Raises:
        ValueError: There is no driver, or it does not answer.
    """
    driver = driver or Driver()
    gpus = [
        gpu
        if gpu.fault
        else gpu._replace(notes=tuple(gpu_notes.notes(driver, gpu.index, environ)))
        for gpu in driver.gpus()
    ]
    if driver.refuses:  # before, or meanwhile
        raise ValueError(f"Received --gpus, but {driver.refuses}.")
    return gpus


def as_text(gpus: list[Gpu]) -> str:
    """Sets the GPUs out in lines, each with its processes, slices and notes below."""
    if not gpus:
        return "There is no NVIDIA GPU in this machine."
    return "\n".join(line for gpu in gpus for line in _lines(gpu))


def _lines(gpu: Gpu) -> Iterator[str]:
    if gpu.fault:
        yield (
            f"GPU {gpu.index}  the driver tells nothing of it ({gpu.fault}); start "
            "the machine anew"
        )
        return
    name = ", ".join(filter(None, [gpu.name, gpu.uuid]))
    busy = "" if gpu.utilization is None else f", {gpu.utilization:.0%} busy"
    yield f"GPU {gpu.index}  {name}: {_held(gpu)}{busy}"
    if not gpu.slices:
        yield from _of_holders(gpu)
    for part in gpu.slices:
        yield f"    slice {part.uuid}: {part.name}, {_held(part)}"
        yield from (f"    {line}" for line in _of_holders(part))
    if len(gpu.slices) > 1:
        yield (
            "    CUDA gives a process one slice: train on each in a process of its "
            f"own, with CUDA_VISIBLE_DEVICES={gpu.slices[0].uuid}"
        )
    yield from (f"    note: {note}" for note in gpu.notes)


def _held(gpu: Gpu) -> str:
    if gpu.memory_mb is None:
        return "memory unknown"
    return f"{gpu.used_mb:,} of {gpu.memory_mb:,} MB held"


def _of_holders(gpu: Gpu) -> Iterator[str]:
    for holder in gpu.holders:
        held = "?" if holder.memory_mb is None else f"{holder.memory_mb:,}"
        process = describe_holder(holder.pid)
        yield f"    {held} MB by {process}"
        if model_dir := _model_dir(process):
            yield f"        trains in {model_dir}"
    if not gpu.holders and gpu.unseen_mb >= UNSEEN_MB:
        yield "    by processes that cannot be seen from here, as those of a container"


def _model_dir(process: Described) -> str:
    """Returns where a process trains, if it is a run of Towers; else ""."""
    if process.outside:
        return ""
    folder = folder_of_lock(process.pid, LOCK)
    if folder and os.path.exists(os.path.join(folder, _FLAGS)):
        return folder
    named = _COMMAND.search(process.command)
    return named[1] if named else ""


def of_this_host() -> dict[str, Any]:
    """Returns what this host tells others: its GPUs as `text` and as JSON, `gpus`.

    Where the driver does not answer, the text says so, and `gpus` is `None`.
    """
    try:
        gpus = cards()
    except ValueError as error:
        return {"text": str(error), "gpus": None}
    return {"text": as_text(gpus), "gpus": as_json(gpus)}


def as_json(gpus: Iterable[Gpu]) -> list[dict[str, Any]]:
    """Returns the same for machines, as JSON has it."""
    return [
        gpu._asdict()
        | {"slices": as_json(gpu.slices), "holders": [*map(_as_json, gpu.holders)]}
        for gpu in gpus
    ]


def _as_json(holder: Holder) -> dict[str, Any]:
    process = describe_holder(holder.pid)
    return {
        "process": process._asdict(),
        "memory_mb": holder.memory_mb,
        "model_dir": _model_dir(process),
    }
