"""Hosts that stay together: they stop, differ and fail together, in real processes."""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import free_ports
from tests.limits import HANG_S
from tests.towers.cluster import on_hosts
from towers.cluster import mpi_watch, tensorflow_watch
from towers.program.ending import ANOTHER_FAILED

ROOT = Path(__file__).parents[3]
HOSTS = 2

pytestmark = pytest.mark.slow


def start(*names):
    """Starts hosts that do what the names say."""
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(HOSTS))
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.towers.cluster.on_hosts"),
                *(str(rank), addresses, *names),
            ],
            cwd=ROOT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(HOSTS)
    ]


def ends(processes):
    """Waits for hosts; returns of each its exit code, and the records by name."""

    def end(process):
        try:
            said, errors = process.communicate(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(process.communicate()) from None
        lines = [line for line in said.splitlines() if line.startswith("{")]
        records = [json.loads(line) for line in lines]
        return process.returncode, {each["name"]: each for each in records}, errors

    with concurrent.futures.ThreadPoolExecutor(HOSTS) as pool:
        return [*pool.map(end, processes)]


def test_hosts_stop_train_and_evaluate_alike():
    names = (
        *("stops", "stops, 3 steps", "stops, eager", "stops early", "trains twice"),
        *("evaluates", "predicts", "of batches", "two models"),
    )
    (_, first, errors), (_, second, _) = ends(start(*names))
    assert [*first] == [*names], errors[-2000:]
    assert first == second
    assert all("found" in each for each in first.values()), first
    stopped = {name: first[name]["found"][0] for name in names[:3]}
    assert stopped == {"stops": 4, "stops, 3 steps": 6, "stops, eager": 4}
    # The first host asks for too much, and stops after its second epoch.
    assert first["stops early"]["found"][0] == 10


def test_gradients_of_gpus_stay_there():
    """CPUs stand in for GPUs; `tests/exact` has the numbers."""
    (_, first, errors), (_, second, _) = ends(start("in memory", "on devices"))
    found = {name: each.get("found") for name, each in first.items()}
    # 4 x 501 numbers of gradients; others are the batch's digest, the loss and so on.
    (in_memory, size), (on_devices, other_size) = found.values()
    assert in_memory >= 2004 and on_devices < 100, (found, errors)
    assert size == other_size == 4 * 2004
    assert {name: each.get("found") for name, each in second.items()} == found


def test_hosts_that_differ_say_so():
    names = [name for name in on_hosts.DO if name.startswith(("other ", "fewer "))]
    names.append("evaluates or predicts")
    (_, first, errors), (_, second, _) = ends(start(*names))
    assert [*first] == [*names], errors[-2000:]
    # Each host calls it by what it does itself.
    first.pop(names[-1]), second.pop(names[-1])
    assert first == second
    names.pop()
    kinds = {name: each.get("error") for name, each in first.items()}
    assert kinds == dict.fromkeys(names, "HostsDifferError"), first
    assert (
        "examples of the data: [40, 40] on host 0 and [32, 32] on host 1"
        in (first["fewer batches to evaluate"]["said"])
    )


@pytest.mark.parametrize("where", ["callback", "data", "loss"])
def test_an_error_of_one_host_ends_all(where):
    name = f"raises in {where}"
    (code, first, errors), (_, second, _) = ends(start(name))
    assert name in first, (code, errors[-3000:])
    assert (code, first[name]["error"]) == (ANOTHER_FAILED, "HostFailedError")
    assert "host 1 has" in first[name]["said"]
    assert f"an error in {where}" in first[name]["said"]
    assert f"an error in {where}" in second[name]["said"]


KILLED = [name for name in on_hosts.DO if name.startswith("SIG")]


@pytest.mark.parametrize("name", KILLED)
def test_a_host_that_is_killed_or_stopped_ends_all(name):
    kind, victim = name.split()[0], int(name.split()[1])
    processes = start(name)
    harmed = processes[victim]
    while True:
        _, status = os.waitpid(harmed.pid, os.WUNTRACED)
        if os.WIFSTOPPED(status) or os.WIFSIGNALED(status):
            break
    other = processes[1 - victim]
    try:
        said, errors = other.communicate(timeout=HANG_S)
    finally:
        if kind == "SIGSTOP":
            os.kill(harmed.pid, signal.SIGKILL)
            os.waitpid(harmed.pid, 0)
        harmed.returncode = -signal.SIGKILL
        harmed.communicate()
    assert other.returncode == ANOTHER_FAILED, (said, errors[-2000:])
    assert f"host {victim} has" in said + errors


def test_hosts_notice_within_the_time_that_documents_say():
    """The tests above wait longer: the machine may be busy."""
    text = (ROOT / "docs/scale/hosts.md").read_text()
    assert f"notice after {tensorflow_watch.SILENT_S:.0f} s" in text
    assert f"MPI, after {mpi_watch.SILENT_S:.0f} s" in text


def test_the_end_of_a_fork_is_not_that_of_its_host():
    done = subprocess.run(
        [sys.executable, "-c", _FORKS],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=HANG_S,
    )
    assert done.stdout == "finished by the parent\n"


_FORKS = """
import os, sys, types

from towers.cluster import process_group
from towers.hosts import group

parent = os.getpid()

def finish(seconds):
    print("finished by the", "parent" if os.getpid() == parent else "child", flush=True)

group.current = group.Joined(None, types.SimpleNamespace(finish=finish), None, None)
process_group._tell_of_the_end()
if not (child := os.fork()):
    sys.exit(0)
os.waitpid(child, 0)
"""
