"""What `probe.py` has found: whether TensorFlow starts, computes and copies."""

import dataclasses
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from towers.doctor import process
from towers.doctor.finding import Finding, note, ok, wrong
from towers.program import words

# float32, summed in another order than NumPy's; TensorFloat-32 is off.
_TOLERANCE = 1e-4
_HINTS = {
    signal.SIGILL: ", as this CPU lacks instructions that TensorFlow was built for",
    signal.SIGKILL: ", as by a system that has no memory left",
}


@dataclasses.dataclass(frozen=True)
class DeviceProbe:
    """What the probe has said, until it ended or was ended.

    Attributes:
        build: `built.of_tensorflow()`; None if TensorFlow could not be imported.
        gpus: GPUs that TensorFlow finds; None if it did not come to that.
        towers: The devices that were tried.
        computed: By device, the difference from NumPy's numbers.
        failed: By device, why it could not compute.
        copies: [from, to, MB/s, unchanged] by pair.
        fault: Why it did not come to its end, if so; else empty.
        log: What TensorFlow has logged.
    """

    build: dict[str, Any] | None = None
    gpus: int | None = None
    towers: Sequence[str] = ()
    computed: dict[str, float] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    copies: Sequence[Sequence[Any]] = ()
    fault: str = ""
    log: str = ""


def probe(num_gpus: int | None, limit_s: float = 120.0) -> DeviceProbe:
    """Tries TensorFlow out in a process of its own, for at most `limit_s` seconds.

    `num_gpus` are the towers to try; None for all GPUs, or else two logical CPUs.
    """
    options = json.dumps({"num_gpus": num_gpus})
    command = [sys.executable, "-m", "towers.doctor.probe", options]
    # TensorFlow logs why it does not find a GPU.
    environ = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "0"}
    try:
        out, log, code = process.run(command, limit_s, environ)
    except OSError as error:
        return DeviceProbe(fault=f"a process to try it in cannot be started: {error}")
    # Of a process that was killed, the last line may be a part of one; and Python's own
    # start may have printed something.
    whole = out.split("\n")[:-1]
    lines = [json.loads(line) for line in whole if line.startswith('["')]
    said = dict(lines)
    return DeviceProbe(
        build=said.get("build"),
        gpus=said.get("gpus"),
        towers=said.get("towers", ()),
        computed=dict(value for name, value in lines if name == "computed"),
        failed=dict(value for name, value in lines if name == "failed"),
        copies=said.get("copies", ()),
        fault=_fault(said, code, limit_s, log),
        log=log,
    )


def _fault(said: dict[str, Any], code: int | None, limit_s: float, log: str) -> str:
    """Why a probe did not come to its end, if so."""
    does = said.get("does", "the start of Python")
    if code is None:
        return f"{does} gives nothing within {limit_s:g} s"
    if "error" in said:
        return f"{does} fails: {said['error']}"
    if code < 0:
        return f"{does} ends with {words.signal_name(-code)}{_HINTS.get(-code, '')}"
    if code:
        *_, last = log.strip().splitlines() or [""]
        return f"{does} ends with exit code {code}: {last}"
    return ""


def start(found: DeviceProbe) -> Finding:
    """Checks that TensorFlow can be imported, and the towers be set up."""
    if found.build is None:
        return wrong(
            f"{found.fault}; see all of it by python -c 'import tensorflow', and if "
            "that fails too, install it anew: pip install --force-reinstall tensorflow",
            fault=found.fault,
        )
    if not found.towers:
        return wrong(found.fault, fault=found.fault)
    return ok(
        f"is imported, and has {words.count(len(found.towers), 'device')} for towers",
        towers=found.towers,
    )


def computation(found: DeviceProbe, device: str) -> Finding:
    """Checks what one of the probe's towers has computed."""
    if device in found.failed:
        return wrong(
            f"{found.failed[device]}; expected a convolution and a matrix product: "
            "look at the lines on CUDA, driver and memory here",
        )
    if device not in found.computed:
        return wrong(f"not known, as {found.fault}")
    difference = found.computed[device]
    # Not "if larger", as that is not so of NaN.
    if difference <= _TOLERANCE:
        return ok(
            f"computes as NumPy does (difference {difference:.0e})",
            difference=difference,
        )
    return wrong(
        f"computes other numbers than NumPy (difference {difference:.0e}, expected at "
        f"most {_TOLERANCE:.0e}): the device is broken, or overclocked; leave it out "
        "by --gpu_indices",
        # JSON has no other.
        difference=difference if math.isfinite(difference) else None,
    )


def copies(found: DeviceProbe) -> Finding:
    """Checks copies: that all arrive, and no link is much slower than its like."""
    if not found.copies:
        return wrong(f"not known, as {found.fault}")
    rates: dict[str, dict[str, float]] = {}
    for source, to, rate, _ in found.copies:
        rates.setdefault(_short(source), {})[_short(to)] = round(rate, 1)
    changed = [row for row in found.copies if not row[3]]
    if changed:
        source, to, *_ = changed[0]
        finding = wrong(
            f"what is copied from {_short(source)} to {_short(to)} arrives changed "
            f"({len(changed)} of {len(found.copies)} pairs): switch off IOMMU or ACS "
            "in the BIOS, or do not use these GPUs together",
            mb_per_s=rates,
        )
    elif slow := _slow(found.copies):
        finding = note(slow, mb_per_s=rates)
    else:
        finding = ok("arrive unchanged, at so many MB/s:", mb_per_s=rates)
    return finding._replace(table=_table(rates))


def _slow(rows: Sequence[Sequence[Any]]) -> str:
    """Says which link is much slower than the others of its kind, if one is."""
    kinds: dict[tuple[bool, bool], list[tuple[float, str, str]]] = {}
    for source, to, rate, _ in rows:
        # In the host's memory, nothing travels over a link.
        if source != to and ("GPU" in source or "GPU" in to):
            kind = "GPU" in source, "GPU" in to
            kinds.setdefault(kind, []).append((rate, _short(source), _short(to)))
    for links in kinds.values():
        slowest, fastest = min(links), max(links)
        if slowest[0] < fastest[0] / 4:
            rate, source, to = slowest
            return (
                f"from {source} to {to} only {rate:,.0f} MB/s, where others like it "
                f"have up to {fastest[0]:,.0f}: look at its slot and link (nvidia-smi "
                "topo -m)"
            )
    return ""


def _table(rates: dict[str, dict[str, float]]) -> str:
    """Rows are where from, columns where to."""
    width = max(10, *(len(name) + 2 for name in rates))
    lines = ["from \\ to".ljust(width) + "".join(name.rjust(width) for name in rates)]
    for source, row in rates.items():
        cells = "".join(f"{rate:,.0f}".rjust(width) for rate in row.values())
        lines.append(source.ljust(width) + cells)
    return "\n".join(lines)


def _short(device: str) -> str:
    return device.removeprefix("/device:")
