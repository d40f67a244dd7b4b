"""towers.devices.sharing.others, with a made-up driver."""

import os
import subprocess
import sys
import types
from unittest import mock

import pytest

from towers.devices.sharing import Others, machine
from towers.machine.nvml import Driver, Use
from towers.processes import described

ME = os.getpid()
# No process has such a number.
STRANGER, ANOTHER = 2**22 + 1, 2**22 + 2
PLACES = ["GPU-a/0", "GPU-a/1", "GPU-b/0", "cpu:0"]
ON_A = {"GPU-a/0", "GPU-a/1"}


class Nvml:
    """What nvidia-ml-py gives of GPUs of 1000 bytes; refuses what is in `refused`.

    Attributes:
        memory: For a GPU what each process takes.
        hidden: What processes take that are not listed.
        compute: For a GPU samples: a process, how long ago, and per cent.
    """

    nvmlMemory_v2 = 2

    class NVMLError(Exception):
        pass

    def __init__(self, memory=None, compute=None, hidden=0, refused=()):
        self.memory, self.compute = memory or {}, compute or {}
        self.hidden, self.refused = hidden, refused

    def check(self, name):
        if name in self.refused:
            raise self.NVMLError("Not Supported")

    def nvmlInit(self):
        self.check("init")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.check("handle")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, gpu, version):
        self.check("memory")
        assert version == self.nvmlMemory_v2
        taken = [used or 0 for used in self.memory.get(gpu, {}).values()]
        return types.SimpleNamespace(used=sum(taken) + self.hidden, total=1000)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        self.check("processes")
        return [
            types.SimpleNamespace(pid=pid, usedGpuMemory=used)
            for pid, used in self.memory.get(gpu, {}).items()
        ]

    def nvmlDeviceGetProcessUtilization(self, gpu, since):
        self.check("utilization")
        if gpu not in self.compute:
            raise self.NVMLError("Not Found")
        return [
            types.SimpleNamespace(pid=pid, timeStamp=since + later, smUtil=part)
            for pid, later, part in self.compute[gpu]
        ]


@pytest.fixture(autouse=True)
def numbers_all(monkeypatch):
    """Makes this no container."""
    monkeypatch.setattr(described, "numbers_all", lambda: True)
    return monkeypatch


def filled(*args, pids=(ME,), **options):
    return Others(Driver(Nvml(*args, **options))).filled(PLACES, pids)


def test_memory_of_others():
    assert filled() == set()
    assert filled({"GPU-a": {STRANGER: 101}}) == ON_A
    assert filled({"GPU-a": {STRANGER: 100}}) == set()
    assert filled({"GPU-a": {STRANGER: 60, ANOTHER: 60}}) == ON_A
    assert filled({"GPU-a": {ME: 900, STRANGER: 90}}) == set()
    assert filled({"GPU-a": {ME: 700, STRANGER: 200}}) == ON_A
    assert filled({"GPU-a": {ME: 900}, "GPU-b": {STRANGER: 900}}) == {"GPU-b/0"}
    assert filled({"GPU-a": {STRANGER: 900}}, pids=[ME, STRANGER]) == set()


def test_memory_of_processes_that_are_not_listed():
    places = ON_A | {"GPU-b/0"}
    assert filled({"GPU-a": {ME: 500}}, hidden=200) == places


def test_compute_of_others():
    assert filled(compute={"GPU-a": [(STRANGER, 10, 51)]}) == ON_A
    assert filled(compute={"GPU-a": [(STRANGER, 10, 50)]}) == set()
    assert filled(compute={"GPU-a": [(STRANGER, 10, 30), (ANOTHER, 10, 30)]}) == ON_A
    assert filled(compute={"GPU-a": [(ME, 10, 100), (STRANGER, 10, 20)]}) == set()
    # The last of several counts, and none from before.
    assert filled(compute={"GPU-a": [(STRANGER, 20, 9), (STRANGER, 10, 99)]}) == set()
    assert filled(compute={"GPU-a": [(STRANGER, -10, 99)]}) == set()


def test_other_limits():
    others = Others(Driver(Nvml({"GPU-a": {STRANGER: 300}})), memory=0.5)
    assert others.filled(PLACES, [ME]) == set()
    busy = Nvml(compute={"GPU-a": [(STRANGER, 10, 70)]})
    assert Others(Driver(busy), compute=0.8).filled(PLACES, [ME]) == set()


def test_what_a_run_has_started_is_the_runs():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as child:
        memory = {"GPU-a": {child.pid: 900}}
        assert filled(memory) == set()
        assert filled(memory, pids=[STRANGER]) == ON_A
        child.communicate(b"\n")


@pytest.mark.parametrize("refused", ["init", "handle", "memory", "processes"])
def test_what_is_unknown_is_not_filled(refused):
    assert filled({"GPU-a": {STRANGER: 900}}, refused=[refused]) == set()


def test_a_driver_that_tells_memory_only():
    memory = {"GPU-a": {STRANGER: 900}}
    assert filled(memory, refused=["utilization"]) == ON_A
    # As on Windows.
    assert filled({"GPU-a": {STRANGER: None, ME: 900}}) == set()


def test_in_a_container(numbers_all):
    numbers_all.setattr(described, "numbers_all", lambda: False)
    # The driver may tell of this process by another number.
    assert filled({"GPU-a": {STRANGER: 900}}) == set()
    # This one tells its number here.
    memory = {"GPU-a": {STRANGER: 900}, "GPU-b": {ME: 10}}
    assert filled(memory) == ON_A


def test_the_driver_tells_who_uses_a_gpu():
    driver = Driver(Nvml({"GPU-a": {ME: 250}}, {"GPU-a": [(ME, 10, 40)]}, hidden=50))
    assert driver.use("GPU-a") == Use(0.3, {ME: 0.25}, {ME: 0.4})
    assert Driver(Nvml(refused=["init"])).use("GPU-a") is None


def test_without_a_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Others().filled(PLACES, [ME]) == set()


def test_this_machine(monkeypatch):
    assert isinstance(described.numbers_all(), bool)
    assert machine.file_name().startswith("runs-")
    # A system without namespaces of processes.
    monkeypatch.setattr(machine, "os", mock.Mock(stat=mock.Mock(side_effect=OSError)))
    assert machine.file_name() == "runs.json"
