"""A process that trains for a while: how it is started, and how it tells what it finds.

It tells in lines of JSON on stdout. The program that starts it waits for its end.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tensorflow as tf

from towers.devices.configuration import Devices
from towers.hosts import group
from towers.hosts.group import HostFailedError
from towers.program import commands, startup, words
from towers.program.ending import ANOTHER_FAILED
from towers.program.progress import SWITCH
from towers.tower.errors import StageError

T = TypeVar("T")

PROBE_S = 900
"""Most seconds of a process: compiling a large model with XLA takes minutes."""

# What TensorFlow, CUDA and its libraries, oneDNN, glibc and Python say where there is
# no memory.
_NO_MEMORY = re.compile(
    r"\bOOM\b|out[ _]of[ _]memory|resource[ _]?exhausted|bad_alloc|MemoryError"
    r"|ALLOC_FAILED|cannot allocate memory|failed to allocate memory"
    r"|pthread_create.* failed|could not create a (primitive|memory)",
    re.IGNORECASE,
)


def ask(
    module: str,
    flags: Sequence[str],
    too_long: str,
    hosts: int = 1,
    num_gpus: int | None = None,
) -> dict[str, Any]:
    """Runs a module in a process of its own, or one for each host, and waits for it.

    Args:
        module: It prints what it finds in lines of JSON, "towers" first, and "fits" or
            "error" last.
        flags: Its flags.
        too_long: What to say if it takes longer than `PROBE_S`.
        hosts: Number of hosts on this machine.
        num_gpus: GPUs of each host.

    Returns:
        What it told, with "fits" and, if that is False, "why".

    Raises:
        ValueError: If it failed, and not for want of memory.
    """
    command = ["-m", module, *flags]
    with tempfile.TemporaryDirectory() as folder:
        start = [sys.executable]
        if hosts > 1:
            start = commands.on_hosts(hosts, num_gpus, folder)
        try:
            # It ends the process if anything is raised meanwhile, such as by Ctrl-C.
            done = subprocess.run(
                [*start, *command],
                capture_output=True,
                text=True,
                # How a stage fails is said in warnings alone.
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1", SWITCH: "0"},
                errors="replace",
                timeout=PROBE_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(too_long) from error
        logs = [path.read_text(errors="replace") for path in Path(folder).iterdir()]
    if hosts > 1 and done.returncode > 128:
        done.returncode = 128 - done.returncode  # the launcher's, for a signal
    told = of_all_hosts(_told(done.stdout), [*map(_told, logs)])
    if not told.keys() & {"fits", "error"}:
        limited = told.get("memory") == "process"
        told |= how_it_died(done.returncode, done.stderr, limited)
    if "error" in told:
        raise ValueError(told["error"])
    if "towers" not in told:
        raise ValueError(
            f"A process ended before it had any tower ({told['why']}); expected memory "
            "for TensorFlow at least, so allow more."
        )
    return told


def as_value(kind: type[T], told: dict[str, Any]) -> T:
    """Makes a value of a dataclass of what a process told; other facts are left out."""
    names = kind.__dataclass_fields__
    return kind(**{name: told[name] for name in names if name in told})


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
    if why := no_memory(stderr):
        return {"fits": False, "why": why}
    if limited and code < 0:
        # oneDNN, for one, does not look whether it got what it allocates.
        why = f"crashed by {words.signal_name(-code)} under the limit of memory"
        return {"fits": False, "why": why}
    last = (stderr.strip() or "it wrote nothing").splitlines()[-1]
    return {"error": f"A probe ended with exit code {code}: {last}"}


def answer(body: Callable[[Callable[..., None]], None]) -> int:
    """Runs the body of a process that `processes.ask` has started.

    Args:
        body: It trains. It is given a function that takes facts, and tells them.

    Returns:
        The exit code. It is 0 also if training fails, as JSON says why. But if a stage
        has failed, TensorFlow alone knows how.
    """
    startup.end()
    commands.quieten()
    stdout = sys.stdout

    def tell(**facts):
        print(json.dumps(facts), file=stdout, flush=True)

    # It is for JSON; a model of the user's may print.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            with group.together():
                body(tell)
        except HostFailedError:
            return ANOTHER_FAILED  # which says why
        except StageError:
            traceback.print_exc()
            return 1  # what TensorFlow writes says why, and the search reads it
        except Exception as error:  # whatever it is, the search says it
            traceback.print_exc()
            if shortage := no_memory(f"{type(error).__name__}: {error}"):
                tell(fits=False, why=shortage)
            else:
                said = " ".join(str(error).split()) or type(error).__name__
                tell(error=said[:500])  # a graph's error may go on for pages
    return 0


def no_memory(text: str) -> str:
    """Returns what in a text tells of a lack of memory, empty if nothing does."""
    lines = [line.strip().removeprefix("what():  ") for line in text.splitlines()]
    found = [
        line
        for line in lines
        if _NO_MEMORY.search(line) and not line.startswith("Hint:")
    ]
    # Best is the one that says of what size; else the last, as errors of a graph begin
    # with where, and end with what.
    found.sort(key=lambda line: "OOM when allocating" in line)
    return textwrap.shorten(found[-1], 120, placeholder="...") if found else ""


def peak_memory_mb(devices: Devices) -> float:
    """Returns the most memory taken: of the fullest GPU, or of the process."""
    if devices.physical:
        info = tf.config.experimental.get_memory_info
        peaks = [
            info(tower.removeprefix("/device:"))["peak"] for tower in devices.towers
        ]
        return max(peaks) / 2**20
    return of_process_mb("VmHWM")


def of_process_mb(name: str) -> float:
    """Returns what /proc tells of this process's memory, by its name there."""
    # Not getrusage: its peak is the larger of this process's and its parent's.
    with open("/proc/self/status") as lines:
        facts = dict(line.split(":", 1) for line in lines)
    return int(facts[name].split()[0]) / 1024
