"""Describes the devices of the towers in plain text."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import tensorflow as tf

from towers.devices.configuration import Devices
from towers.machine import limits, nvml
from towers.program import words

_RIGHT_ALIGNED = "tower", "stage", "host", "smi", "memory", "local batch"


def table(
    devices: Devices,
    per_tower_batch: Sequence[int] | None = None,
    hosts: Mapping[str, Sequence[Mapping[str, str]]] | None = None,
    stages: int = 1,
    width: int | None = None,
) -> str:
    """Describes the towers in plain text.

    Args:
        devices: The result of `configure`.
        per_tower_batch: Each tower's local batch, in examples.
        hosts: With several hosts, the `rows` of each host, by its name.
        stages: The number of devices of each tower.
        width: The most characters of a line; by default those of standard output.

    Returns:
        Lines without a final newline: a row for each device, then the home of the
        variables, the numbering of the GPUs and the note.

    Raises:
        ValueError: The number of local batches is not the number of towers.
    """
    width = width or words.line_width()
    table_rows = rows(devices, per_tower_batch, stages)
    if hosts:
        table_rows = [
            {"tower": "", "host": str(k), **row}
            for k, host_rows in enumerate(hosts.values())
            for row in host_rows
        ]
        for device, row in enumerate(table_rows):
            row["tower"] = str(device // stages)
    lines, notes = _aligned(table_rows, width), []
    if hosts:
        notes.append(f"{words.count(len(hosts), 'host')}: {', '.join(hosts)}.")
    if per_tower_batch is not None:
        total = sum(int(row["local batch"]) for row in table_rows[::stages])
        size = words.count(total, "example")
        notes.append(f"Each step takes {size}: the sum of the local batches.")
    home = f"{devices.home}, {_home_in_words(devices)}"
    if stages > 1 and not devices.local_parameter_device:
        home = "the device of their layer's stage"
    notes.append(f"Variables live on {home}.")
    if devices.physical:
        notes.append(_numbering(os.environ))
    if devices.others:
        count, others = len(devices.others), ", ".join(devices.others)
        more = words.count(count, "more device is", "more devices are")
        notes.append(f"{more} set up for later: {others}.")
    if devices.note:
        notes.append(f"Note: {devices.note}")
    return "\n".join([*lines, words.wrapped("\n".join(notes), width)])


def rows(
    devices: Devices, per_tower_batch: Sequence[int] | None = None, stages: int = 1
) -> list[dict[str, str]]:
    """Returns the cells of `table` by column, one row for each device."""
    towers = len(devices.towers) // stages
    if per_tower_batch is not None and len(per_tower_batch) != towers:
        raise ValueError(
            f"per_tower_batch has {words.count(len(per_tower_batch), 'size')} for "
            f"{words.count(towers, 'tower')}; give one for each tower."
        )
    cells = _gpu_rows(devices) if devices.physical else _cpu_rows(devices)
    for k, row in enumerate(cells):
        if stages > 1:
            cells[k] = row = {"tower": str(k // stages), "stage": str(k % stages)} | {
                name: cell for name, cell in row.items() if name != "tower"
            }
        if per_tower_batch is not None:
            row["local batch"] = str(per_tower_batch[k // stages])
    return cells


def _home_in_words(devices: Devices) -> str:
    wish = devices.local_parameter_device
    if wish is None and devices.physical:
        return "the first tower's GPU, as towers are on GPUs"
    if wish is None:
        return "the host, as no tower is on a GPU"
    return f"{'the host' if wish == 'cpu' else 'the first tower'}, as was asked for"


def _gpu_rows(devices: Devices) -> list[dict[str, str]]:
    gpus = tf.config.list_physical_devices("GPU")
    rows = []
    for tower, (device, index) in enumerate(
        zip(devices.towers, devices.physical, strict=True)
    ):
        details = tf.config.experimental.get_device_details(gpus[index])
        model = details.get("device_name", "GPU of unknown model")
        if "compute_capability" in details:
            model += " (cc {}.{})".format(*details["compute_capability"])
        smi = nvml.gpu(index)
        rows.append(
            {
                "tower": str(tower),
                "device": device,
                "smi": str(smi.index) if smi else "?",
                "model": model,
                "memory": f"{smi.memory_mb} MB" if smi else "?",
                "may use": devices.memory,
            }
        )
    return rows


def _cpu_rows(devices: Devices) -> list[dict[str, str]]:
    model = _cpu_model()
    memory_mb = limits.memory().total // 2**20
    return [
        {
            "tower": str(tower),
            "device": device,
            "model": model,
            "memory": f"{memory_mb} MB",
            "may use": devices.memory,
        }
        for tower, device in enumerate(devices.towers)
    ]


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return re.sub(r"\((R|TM)\)", "", line.partition(":")[2].strip())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _aligned(rows: Sequence[Mapping[str, str]], width: int) -> list[str]:
    """Aligns rows in columns, and cuts the model to the width that is left."""
    # A host without GPUs has fewer columns.
    keys = [*max(rows, key=len)]
    cells = [{key: key for key in keys}, *rows]
    cells = [
        {key: row.get(key, "").encode("ascii", "replace").decode() for key in keys}
        for row in cells
    ]
    widths = {key: max(len(row[key]) for row in cells) for key in keys}
    too_wide = sum(widths.values()) + 2 * (len(widths) - 1) - width
    if too_wide > 0:
        widths["model"] = max(widths["model"] - too_wide, len("model"))
    return [
        "  ".join(
            row[key].rjust(size)
            if key in _RIGHT_ALIGNED
            else row[key][:size].ljust(size)
            for key, size in widths.items()
        ).rstrip()
        for row in cells
    ]


def _numbering(environ: Mapping[str, str]) -> str:
    """Explains how the numbers of CUDA, and so TensorFlow, relate to nvidia-smi's."""
    order = environ.get("CUDA_DEVICE_ORDER")
    if order != "PCI_BUS_ID":
        return (
            f"Numbering: CUDA_DEVICE_ORDER={order}, so CUDA's numbers may differ from "
            "nvidia-smi's, which are unknown here."
        )
    text = "Numbering: CUDA_DEVICE_ORDER=PCI_BUS_ID, so CUDA counts as nvidia-smi does"
    if "CUDA_VISIBLE_DEVICES" in environ:
        text += (
            f", and from 0 among CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']}"
        )
    return (
        text
        + "; TensorFlow counts from 0 among the GPUs chosen, and the column smi has "
        "nvidia-smi's number."
    )
