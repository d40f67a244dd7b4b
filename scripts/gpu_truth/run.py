"""Runs parts, each a program of its own, and keeps what they say."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from towers.doctor.gpus import seen
from towers.launch.gpus import visible_in

from .parts import Machine, Part

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULT = "result.json"
# Kernels that the driver compiles are kept for the next process.
ENVIRON = {"CUDA_CACHE_MAXSIZE": "4294967296", "TF_CPP_MIN_LOG_LEVEL": "2"}
# With less time left, no part begins.
LEAST_S = 20
_LOOK_S, _WRITE_S = 0.1, 40


def machine() -> Machine:
    """Says what GPUs there are, of which `CUDA_VISIBLE_DEVICES` may hide some."""
    found = seen.look()
    count = min(len(found.cards), len(visible_in(os.environ)))
    if not count:
        return Machine()
    return Machine(count, found.cards[0].name, found.cards[0].memory_mb, found.driver)


def is_done(folder: pathlib.Path, part: Part) -> bool:
    """Tells whether a part has run to its end."""
    return result(folder, part).get("exit_code") == 0


def result(folder: pathlib.Path, part: Part) -> Mapping:
    """Returns how a part ended; nothing if it did not run."""
    try:
        return json.loads((folder / part.name / RESULT).read_text())
    except FileNotFoundError:
        return {}


def run(folder: pathlib.Path, parts: Sequence[Part], end_s: float) -> None:
    """Runs parts beside one another, each until its limit or `end_s`."""
    running = []
    with contextlib.ExitStack() as ends:
        for part in parts:
            begun_s = time.monotonic()
            left_s = end_s - begun_s
            if left_s < LEAST_S:
                print(f"{part.name}: not run, there is no time left", flush=True)
                continue
            limit_s = min(left_s, part.limit_s)
            process = _start(folder / part.name, part, limit_s)
            # Also if Ctrl-C comes.
            ends.callback(_kill, process)
            running.append((part, process, begun_s, limit_s))
        while running:
            time.sleep(_LOOK_S)
            for each in list(running):
                part, process, begun_s, limit_s = each
                code, seconds = process.poll(), time.monotonic() - begun_s
                if code is not None or seconds >= limit_s:
                    running.remove(each)
                    _kill(process)
                    _note(folder / part.name, code, seconds, limit_s)


def _start(place: pathlib.Path, part: Part, limit_s: float) -> subprocess.Popen:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    # Of its limit, a race keeps some to write what it has found.
    filled = {"{out}": str(place), "{seconds}": str(max(1, int(limit_s - _WRITE_S)))}
    command = list(part.command)
    for name, value in filled.items():
        command = [each.replace(name, value) for each in command]
    with open(place / "log.txt", "w") as log:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | ENVIRON | dict(part.environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _kill(process: subprocess.Popen) -> None:
    """Ends a process, and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _note(place: pathlib.Path, code: int | None, seconds: float, limit_s: float):
    """Keeps how a part ended; `None` is the code of one that had to be ended."""
    found = {"exit_code": code, "seconds": seconds, "limit_s": limit_s}
    (place / RESULT).write_text(json.dumps(found))
    said = "no time left" if code is None else f"exit code {code}"
    print(f"{place.name}: {said}, {seconds:.0f} s", flush=True)
