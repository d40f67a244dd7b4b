"""Children act as those of a plain Python process, however they are started."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.limits import HANG_S
from tests.towers.program.forking import STARTS
from towers.elastic import requests

ROOT = Path(__file__).parents[3]


def start(*arguments):
    """Starts a process that has a child; the state of that."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.towers.program.forking", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    return process, json.loads(process.stdout.readline())


def wait_for_the_end_of(pid):
    """Waits until a process has ended, also if its parent has not waited for it yet."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with open(descriptor, "rb", buffering=0) as process:
        assert select.select([process], [], [], HANG_S)[0]


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize("how", STARTS)
def test_a_child_has_what_one_of_a_plain_process_has(tmp_path, how):
    states = []
    for kind in "plain", "run":
        process, state = start(kind, how, tmp_path)
        for pid in process.pid, state.pop("pid"):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=HANG_S)
        states.append(state)
    assert states[1] == states[0]


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize("how", STARTS)
def test_what_ends_a_child_is_no_signal_to_the_run(tmp_path, how):
    kept = tmp_path / "removed at exit"
    kept.touch()
    process, state = start("run", how, tmp_path)
    os.kill(state["pid"], signal.SIGTERM)
    wait_for_the_end_of(state["pid"])
    assert kept.exists()
    out, _ = process.communicate("\n", timeout=HANG_S)
    assert (process.returncode, out) == (0, "done\n")
    assert not kept.exists()


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize("how", STARTS)
def test_a_child_of_a_killed_run_keeps_no_lock(tmp_path, how):
    process, state = start("run", how, tmp_path)
    assert requests.is_running(tmp_path)
    process.kill()
    process.wait()
    try:
        assert not requests.is_running(tmp_path)
        assert psutil.pid_exists(state["pid"])
    finally:
        os.kill(state["pid"], signal.SIGTERM)
        process.communicate(timeout=HANG_S)  # all that write have ended
