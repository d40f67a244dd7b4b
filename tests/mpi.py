"""Several hosts on this machine, each a process that mpirun has started."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.mpirun import ALLOWED, MPIRUN
from tests.limits import HANG_S

ROOT = Path(__file__).parents[1]
NEEDED = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py",
)


def start(count, *command, **environ):
    """Starts processes under mpirun."""
    quiet = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [MPIRUN, "-n", str(count), sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, **ALLOWED, **quiet, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process):
    """Waits; returns the exit code, and both outputs."""
    try:
        out, err = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(process.communicate()) from None
    return process.returncode, out, err


def run(count, *command, **environ):
    """Runs processes that are to end well; returns what they have printed."""
    code, out, err = end(start(count, *command, **environ))
    assert code == 0, (out[-2000:], err[-4000:])
    return out
