"""Has a process of its own try a batch size, and says how it ended."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from towers.find_batch_size import probe
from towers.find_batch_size.search import Probe
from towers.find_batch_size.search_flags import Search
from towers.program import commands

# Most that a probe may take: compiling a large model with XLA takes minutes.
_PROBE_S = 900


def run(settings: Search, batch_size: int) -> dict[str, Any]:
    """Has a process try a batch size, rounded down to what towers divide exactly.

    Returns:
        What the process told: see `probe.probe`.

    Raises:
        ValueError: If it failed, and not for want of memory.
    """
    command = ["-m", probe.__name__, *settings.for_a_probe(batch_size)]
    several = (settings.hosts or 1) > 1
    with tempfile.TemporaryDirectory() as folder:
        start = [sys.executable]
        if several:
            start = commands.on_hosts(settings.hosts, settings.num_gpus, folder)
        try:
            # It ends the process if anything is raised meanwhile, such as by Ctrl-C.
            done = subprocess.run(
                [*start, *command],
                capture_output=True,
                text=True,
                # How a stage fails is said in warnings alone.
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1"},
                errors="replace",
                timeout=_PROBE_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(
                f"A batch of {batch_size} took longer than {_PROBE_S} s; expected "
                "less, so give fewer --probe_steps or a smaller --max_batch_size."
            ) from error
        logs = [path.read_text(errors="replace") for path in Path(folder).iterdir()]
    if several and done.returncode > 128:
        done.returncode = 128 - done.returncode  # the launcher's, for a signal
    told = of_all_hosts(_told(done.stdout), [*map(_told, logs)])
    if not told.keys() & {"fits", "error"}:
        limited = told.get("memory") == "process"
        told |= how_it_died(done.returncode, done.stderr, limited)
    if "error" in told:
        raise ValueError(told["error"])
    if "batch_size" not in told:
        raise ValueError(
            f"A probe ended before it had any tower ({told['why']}); expected memory "
            "for TensorFlow at least, so allow more."
        )
    return told


def _told(output):
    """What a process has told, in lines of JSON; others may have written, too."""
    told = {}
    for line in output.splitlines():
        if line.startswith("{"):
            told |= json.loads(line)
    return told


def of_all_hosts(first: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """Puts together what hosts have told: all have to fit, and the fullest counts."""
    told = dict(first)
    for other in others:
        for name in ("fits", "error"):
            # Whoever has failed knows why; another host knows only that it has.
            if other.get(name, True) is not True and told.get("fits") is not False:
                told.pop("error", None)
                told |= {key: other[key] for key in (name, "why") if key in other}
        if "peak_memory_mb" in told and "peak_memory_mb" in other:
            most = max(told["peak_memory_mb"], other["peak_memory_mb"])
            told["peak_memory_mb"] = most
    return told


def how_it_died(code: int, stderr: str, limited: bool) -> dict[str, Any]:
    """Says why a probe ended that could not say so itself, as it would have told.

    Args:
        code: Its exit code, a signal if negative.
        stderr: What it wrote.
        limited: Whether its process had a limit of memory.
    """
    if code == -signal.SIGKILL:
        return {"fits": False, "why": "killed, as the kernel does for want of memory"}
    if why := probe.no_memory(stderr):
        return {"fits": False, "why": why}
    if limited and code < 0:
        # oneDNN, for one, does not look whether it got what it allocates.
        why = f"crashed by {signal.Signals(-code).name} under the limit of memory"
        return {"fits": False, "why": why}
    last = (stderr.strip() or "it wrote nothing").splitlines()[-1]
    return {"error": f"A probe ended with exit code {code}: {last}"}


def as_probe(told: dict[str, Any]) -> Probe:
    """Takes the figures out of what a process told."""
    names = Probe.__dataclass_fields__
    return Probe(**{name: told[name] for name in names if name in told})
