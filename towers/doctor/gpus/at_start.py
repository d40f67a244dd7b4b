"""What a run is told of GPUs as it starts: why TensorFlow does not use them, or badly.

The doctor makes the same checks, and more. These take milliseconds.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from towers.doctor.devices import DeviceProbe
from towers.doctor.finding import OK, WRONG
from towers.doctor.gpus import checks, seen
from towers.machine.nvml import Driver


def doubts(
    build: dict[str, Any],
    found: int,
    used: Collection[str],
    looks_at_memory: bool = True,
    driver: Driver | None = None,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """Returns a sentence about each thing that is wrong, or to be known.

    Args:
        build: `built.of_tensorflow()`.
        found: How many GPUs TensorFlow finds.
        used: The UUIDs of those that the run uses.
        looks_at_memory: Whether it matters that others hold their memory.
        driver: What to ask.
        root: The folder of /dev and /sys.
        environ: The environment, which may hide GPUs.
    """
    if environ.get(seen.HIDES) in ("", "-1"):
        return []
    machine = seen.by_driver(driver or Driver(), root, environ)
    if not machine.in_use:
        return []
    probe = DeviceProbe(build=build, gpus=found)
    said = []
    finding = checks.check_gpus(machine, probe, environ)
    if finding.verdict == WRONG:
        said.append(f"GPUs: {finding.text}. Ask towers doctor for more.")
    elif machine.cut_up and seen.HIDES not in environ:
        said.append(f"GPUs: {finding.text}.")
    mine = machine._replace(cards=tuple(c for c in machine.cards if c.uuid in used))
    if not mine.cards:
        return said
    findings = {
        "driver": checks.check_driver(mine, probe),
        "GPU kernels": checks.check_kernels(mine, probe),
    }
    if looks_at_memory:
        findings["GPU memory"] = checks.check_memory(mine)
    return said + [
        f"{name}: {finding.text}."
        for name, finding in findings.items()
        if finding.verdict != OK
    ]
