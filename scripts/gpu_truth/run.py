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

from .parts import Machine, Part

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULT = "result.json"
# Kernels that the driver compiles are kept for the next process.
ENVIRON = {"CUDA_CACHE_MAXSIZE": "4294967296", "TF_CPP_MIN_LOG_LEVEL": "2"}
# With less time left, no part begins.
LEAST_S = 20


def machine() -> Machine:
    """Says what GPUs there are."""
    fields = "name,memory.total,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return Machine()
    gpus = [line.split(", ") for line in said.stdout.splitlines() if line]
    (name, memory_mb, driver), *_ = gpus
    return Machine(len(gpus), name, int(memory_mb), driver)


def is_done(folder: pathlib.Path, part: Part) -> bool:
    """Tells whether a part has run to its end."""
    return result(folder, part).get("exit_code") == 0


def result(folder: pathlib.Path, part: Part) -> Mapping:
    """Returns how a part ended; nothing if it did not run."""
    try:
        return json.loads((folder / part.name / RESULT).read_text())
    except FileNotFoundError:
        return {}


def run(
    folder: pathlib.Path, parts: Sequence[Part], end_s: float, machine: Machine
) -> None:
    """Runs parts beside one another, each until its limit or `end_s`."""
    with contextlib.ExitStack() as started:
        running = {}
        for part in parts:
            left_s = end_s - time.monotonic()
            if left_s < LEAST_S:
                print(f"{part.name}: not run, there is no time left", flush=True)
                continue
            place = folder / part.name
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            log = started.enter_context(open(place / "log.txt", "w"))
            command = [each.replace("{out}", str(place)) for each in part.command]
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=os.environ | ENVIRON | dict(part.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            running[part] = process, time.monotonic(), min(left_s, part.limit_s)
        for part, (process, begun_s, limit_s) in running.items():
            code = _wait(process, begun_s + limit_s)
            seconds = time.monotonic() - begun_s
            found = {"exit_code": code, "seconds": seconds, "limit_s": limit_s}
            (folder / part.name / RESULT).write_text(json.dumps(found))
            said = "no time left" if code is None else f"exit code {code}"
            print(f"{part.name}: {said}, {seconds:.0f} s", flush=True)


def _wait(process: subprocess.Popen, end_s: float) -> int | None:
    """Returns the exit code; None if the process had to be ended."""
    try:
        return process.wait(max(0.0, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Also the processes that it has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
