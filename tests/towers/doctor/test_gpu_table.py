"""Who holds which GPU, with a driver that is made up."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import types

import psutil
import pynvml
import pytest

from tests.limits import HANG_S
from tests.made_up_nvml import Nvml, held, memory
from towers.doctor import __main__ as doctor
from towers.doctor import hosts
from towers.doctor.gpus import notes as gpu_notes
from towers.doctor.gpus import table as gpu_table
from towers.machine import nvml
from towers.machine.nvml import Driver
from towers.processes import described
from towers.processes.described import (
    Described,
    container,
    describe,
    describe_holder,
    folder_of_lock,
)

ME = os.getpid()
# No process has such a number.
STRANGER = 2**22 + 1
FUNCTION_NOT_FOUND = pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
# What the real library makes of that for functions that have versions.
MISMATCH = pynvml.NVMLLibraryMismatchError("use a versioned function")
HEX = "0123456789abcdef" * 4


def cards(**answers):
    return gpu_table.cards(Driver(Nvml(**answers)), {})


def notes(environ=None, **answers):
    return gpu_notes.notes(Driver(Nvml(**answers)), 0, environ or {})


def test_who_holds_a_gpu(tmp_path):
    (tmp_path / "flags.txt").touch()
    with open(tmp_path / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (card,) = cards(
            DeviceGetName=b"NVIDIA H200",
            DeviceGetUUID="GPU-aaa",
            DeviceGetMemoryInfo=memory(900, 1000),
            DeviceGetUtilizationRates=types.SimpleNamespace(gpu=87),
            DeviceGetComputeRunningProcesses=[held(ME, 700), held(STRANGER, None)],
        )
        lines = gpu_table.as_text([card]).splitlines()
        (shown,) = json.loads(json.dumps(gpu_table.as_json([card])))
    mine, strange = shown["holders"]
    user = psutil.Process().username()
    assert mine["process"]["user"] == user
    assert "python" in mine["process"]["command"]
    assert (mine["memory_mb"], mine["model_dir"]) == (700, str(tmp_path))
    assert strange["process"] == Described(STRANGER)._asdict()
    assert (strange["memory_mb"], strange["model_dir"]) == (None, "")
    assert describe(STRANGER) == Described(STRANGER)
    assert lines[0] == "GPU 0  NVIDIA H200, GPU-aaa: 900 of 1,000 MB held, 87% busy"
    assert lines[1].startswith(f"    700 MB by process {ME} of {user}")
    assert lines[2] == f"        trains in {tmp_path}"
    assert lines[3] == f"    ? MB by process {STRANGER}"
    assert mine["process"]["pid"] == ME
    assert (shown["index"], shown["utilization"]) == (0, 0.87)


def test_a_driver_that_tells_nothing_more():
    (card,) = cards()
    assert (card.name, card.uuid, card.memory_mb) == ("a GPU", "", None)
    assert (card.utilization, card.holders, card.slices) == (None, (), ())
    assert card.notes == ()
    lines = gpu_table.as_text([card]).splitlines()
    assert lines[0] == "GPU 0  a GPU: memory unknown"
    assert len(lines) == 1
    found = cards(DeviceGetMemoryInfo=memory(4, 1000))
    assert "cannot be seen" not in gpu_table.as_text(found)
    found = cards(DeviceGetMemoryInfo=memory(500, 1000))
    said = "    by processes that cannot be seen from here, as those of a container"
    assert gpu_table.as_text(found).splitlines()[1] == said


WHOLE = {
    "DeviceGetName": "NVIDIA H200",
    "DeviceGetUUID": "GPU-aaa",
    "DeviceGetMemoryInfo": memory(900, 1000),
    "DeviceGetUtilizationRates": types.SimpleNamespace(gpu=87),
    "DeviceGetComputeRunningProcesses": [held(ME, 700)],
    "DeviceGetGraphicsRunningProcesses": [held(STRANGER, 10)],
    "DeviceGetTotalEccErrors": 2,
    "DeviceGetCurrentClocksEventReasons": 0x40,
    "DeviceGetCurrPcieLinkWidth": 4,
    "DeviceGetMaxPcieLinkWidth": 16,
    "DeviceGetNvLinkState": 0,
    "DeviceGetCudaComputeCapability": (9, 0),
}


@pytest.mark.parametrize(
    ("refused", "lost"),
    [
        ("DeviceGetName", "NVIDIA H200"),
        ("DeviceGetUUID", "GPU-aaa"),
        ("DeviceGetMemoryInfo", "900 of 1,000 MB held"),
        ("DeviceGetUtilizationRates", "87% busy"),
        ("DeviceGetComputeRunningProcesses", "700 MB by process "),
        ("DeviceGetGraphicsRunningProcesses", "10 MB by process "),
        ("DeviceGetTotalEccErrors", "ECC has found"),
        ("DeviceGetCurrentClocksEventReasons", "heat lowers"),
        ("DeviceGetCurrPcieLinkWidth", "4 of 16 lanes"),
        ("DeviceGetMaxPcieLinkWidth", "4 of 16 lanes"),
        ("DeviceGetNvLinkState", "NVLinks is up"),
        ("DeviceGetCudaComputeCapability", "TF32 is on"),
    ],
)
def test_each_question_may_be_refused(refused, lost):
    whole = gpu_table.as_text(cards(**WHOLE))
    assert lost in whole
    rest = {name: answer for name, answer in WHOLE.items() if name != refused}
    told = gpu_table.as_text(cards(**rest))
    assert lost not in told
    gone = [line for line in whole.splitlines()[1:] if line not in told]
    assert all(lost in line for line in gone)


def test_a_gpu_that_is_lost():
    lost = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    def handle(index):
        return lost if index else "gpu 0"

    found = cards(DeviceGetCount=2, DeviceGetHandleByIndex=handle)
    text = gpu_table.as_text(found)
    said = "GPU 1  the driver tells nothing of it (GPU is lost); start the machine anew"
    assert text.splitlines()[-1] == said
    assert gpu_table.as_json(found)[1]["fault"] == "GPU is lost"


def test_a_driver_that_hangs(monkeypatch, capsys):
    monkeypatch.setattr(nvml, "_hangs", threading.Event())
    monkeypatch.setattr(nvml, "_LIMIT_S", 0.01)
    goes_on = threading.Event()
    hangs = Nvml(DeviceGetName=lambda handle: goes_on.wait())
    monkeypatch.setattr(gpu_table, "Driver", lambda: Driver(hangs))
    assert doctor.main(["", "--gpus"]) == 1
    goes_on.set()
    said = capsys.readouterr()
    assert said.out == ""
    assert (
        "Received --gpus, but NVIDIA's driver gives nothing within 0.01 s; " in said.err
    )


@pytest.mark.parametrize(
    ("code", "begins"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver is found on this ma"),
        (
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
            "NVIDIA's driver says Driver Not Loaded; start the machine anew.",
        ),
    ],
)
def test_no_driver_is_another_matter_than_one_that_is_silent(
    code, begins, monkeypatch, capsys
):
    silent = Nvml(Init=pynvml.NVMLError(code))
    monkeypatch.setattr(gpu_table, "Driver", lambda: Driver(silent))
    assert doctor.main(["", "--gpus"]) == 1
    assert capsys.readouterr().err.startswith(
        f"towers.doctor: Received --gpus, but {begins}"
    )


def test_all_kinds_of_processes():
    (card,) = cards(
        DeviceGetComputeRunningProcesses=[held(ME, 700)],
        DeviceGetMPSComputeRunningProcesses=[held(STRANGER, 50)],
        DeviceGetGraphicsRunningProcesses=[held(STRANGER + 1, 20), held(ME, 700)],
    )
    found = {each.pid: each.memory_mb for each in card.holders}
    assert found == {ME: 700, STRANGER: 50, STRANGER + 1: 20}
    assert [each.computes for each in card.holders] == [True, True, False]


def test_a_driver_that_is_older_than_the_library():
    def memory_info(handle, version=None):
        return FUNCTION_NOT_FOUND if version else memory(900, 1000)

    (card,) = cards(
        DeviceGetMemoryInfo=memory_info,
        DeviceGetComputeRunningProcesses=MISMATCH,
        DeviceGetComputeRunningProcesses_v2=[held(ME, 700)],
    )
    assert (card.used_mb, card.memory_mb) == (900, 1000)
    assert [each.memory_mb for each in card.holders] == [700]
    old = Driver(Nvml(DeviceGetComputeRunningProcesses=MISMATCH))
    assert old.use("GPU-aaa") is None


def test_no_gpu():
    assert gpu_table.as_text(cards(DeviceGetCount=0)) == (
        "There is no NVIDIA GPU in this machine."
    )


def test_no_driver(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert doctor.main(["", "--gpus"]) == 1
    said = capsys.readouterr().err
    expected = "nvidia-ml-py is not installed; pip install nvidia-ml-py.\n"
    assert said == f"towers.doctor: Received --gpus, but {expected}"


def test_the_doctor_lists_gpus(monkeypatch, capsys):
    monkeypatch.setattr(gpu_table, "Driver", lambda: Driver(Nvml(DeviceGetCount=2)))
    assert doctor.main(["", "--gpus"]) == 0
    assert "GPU 1  a GPU" in capsys.readouterr().out
    assert doctor.main(["", "--gpus", "--json"]) == 0
    assert [each["index"] for each in json.loads(capsys.readouterr().out)] == [0, 1]


def test_the_doctor_lists_the_gpus_of_all_hosts(monkeypatch, capsys):
    monkeypatch.setattr(gpu_table, "Driver", lambda: Driver(Nvml()))
    without = {"text": "NVIDIA's driver tells nothing", "gpus": None}
    monkeypatch.setattr(
        hosts, "gather", lambda place, told: {"host 0": told, "host 1": without}
    )
    flags = ["--gpus", "--hosts=203.0.113.1:8476,127.0.0.1:8477"]
    assert doctor.main(["", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["host 0", "GPU 0  a GPU: memory unknown"]
    assert lines[-2:] == ["host 1", "NVIDIA's driver tells nothing"]
    assert doctor.main(["", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["host 0"][0]["index"], found["host 1"]) == (0, None)


def test_hosts_that_do_not_meet(monkeypatch, capsys):
    def fail(place, told):
        raise ConnectionRefusedError("host 1 does not come")

    monkeypatch.setattr(hosts, "gather", fail)
    flags = ["--gpus", "--hosts=203.0.113.1:8476,127.0.0.1:8477"]
    assert doctor.main(["", *flags]) == 1
    assert capsys.readouterr().err == "towers.doctor: host 1 does not come\n"


def test_a_host_without_a_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    told = gpu_table.of_this_host()
    assert told["gpus"] is None and "nvidia-ml-py is not installed" in told["text"]


def test_slices():
    names = ["MIG-1", "MIG-2"]

    def part(handle, index):
        if index > 1:
            return pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return names[index]

    def processes(handle):
        return [held(ME, 5)] if handle == "MIG-2" else []

    (card,) = cards(
        DeviceGetMaxMigDeviceCount=7,
        DeviceGetMigDeviceHandleByIndex=part,
        DeviceGetUUID=lambda handle: handle,
        DeviceGetName="H200 MIG 3g.71gb",
        DeviceGetMemoryInfo=memory(6, 71),
        DeviceGetComputeRunningProcesses=processes,
    )
    assert [each.uuid for each in card.slices] == names
    text = gpu_table.as_text([card])
    assert "slice MIG-2: H200 MIG 3g.71gb, 6 of 71 MB held" in text
    assert f"        5 MB by process {ME}" in text
    assert len(gpu_table.as_json([card])[0]["slices"][1]["holders"]) == 1
    assert "a process one slice: train on each" in text
    assert "CUDA_VISIBLE_DEVICES=MIG-1" in text


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"DeviceGetTotalEccErrors": 2}, "ECC has found 2 errors of its memory"),
        ({"DeviceGetTotalEccErrors": 0}, None),
        ({"DeviceGetRemappedRows": (0, 1, 1, 0)}, "wait to be replaced; start"),
        ({"DeviceGetRemappedRows": (0, 1, 0, 1)}, "could not replace bad rows"),
        ({"DeviceGetRemappedRows": (1, 0, 0, 0)}, None),
        ({"DeviceGetRetiredPagesPendingStatus": 1}, "wait to be replaced; start"),
        ({"DeviceGetCurrentClocksEventReasons": 0x4}, "its power limit lowers"),
        ({"DeviceGetCurrentClocksEventReasons": 0x40}, "heat lowers its clocks"),
        ({"DeviceGetCurrentClocksThrottleReasons": 0x80}, "the power supply lowers"),
        ({"DeviceGetCurrentClocksEventReasons": 0x1}, None),
        ({"DeviceGetCurrentClocksEventReasons": 0x8}, "heat or the power supply"),
        ({"DeviceGetCurrentClocksEventReasons": 0x48}, "heat lowers its clocks; look"),
        (
            {"DeviceGetCurrPcieLinkWidth": 4, "DeviceGetMaxPcieLinkWidth": 16},
            "PCIe has 4 of 16 lanes",
        ),
        ({"DeviceGetCurrPcieLinkWidth": 16, "DeviceGetMaxPcieLinkWidth": 16}, None),
        ({"DeviceGetNvLinkState": lambda _, link: int(link != 3)}, "1 of its 36 NVLi"),
        ({"DeviceGetNvLinkState": 0}, "none of its 36 NVLinks is up"),
        ({"DeviceGetNvLinkState": 1}, None),
        ({"DeviceGetCudaComputeCapability": (9, 0)}, "TF32 is on: float32"),
        ({"DeviceGetCudaComputeCapability": (7, 5)}, None),
    ],
)
def test_notes(answers, said):
    found = notes(**answers)
    assert len(found) == (said is not None)
    if said is not None:
        assert said in found[0]


def test_tf32_that_is_off():
    (said,) = notes(
        {"NVIDIA_TF32_OVERRIDE": "0"}, DeviceGetCudaComputeCapability=(9, 0)
    )
    assert "TF32 is off, as NVIDIA_TF32_OVERRIDE=0" in said


def test_heat_is_said_once():
    (said,) = notes(DeviceGetCurrentClocksEventReasons=0x60)
    assert "heat lowers its clocks" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0::/user.slice/user-0.slice/session-1.scope\n", ""),
        ("0::/\n", ""),
        ("", ""),
        (f"0::/system.slice/docker-{HEX}.scope\n", "docker 0123456789ab"),
        (f"12:memory:/docker/{HEX}\n1:name=systemd:/docker/{HEX}\n", "docker 012345"),
        (f"0::/machine.slice/libpod-{HEX}.scope/container\n", "podman 0123456789ab"),
        (
            f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{HEX}.scope\n",
            "containerd 0123456789ab",
        ),
        (f"0::/kubepods.slice/kubepods-pod1.slice/crio-{HEX}.scope\n", "cri-o 01234"),
        (f"3:cpu:/kubepods/burstable/pod5f/{HEX}\n", "kubernetes 0123456789ab"),
        ("0::/system.slice/slurmstepd.scope/job_4711/step_0/user\n", "slurm job 4711"),
        ("4:memory:/slurm/uid_1000/job_4711/step_batch\n", "slurm job 4711"),
        ("0::/lxc.payload.train/system.slice\n", "lxc train"),
    ],
)
def test_containers(text, expected):
    found = container(text)
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_a_process_in_a_container(tmp_path):
    folder = tmp_path / "proc" / str(ME)
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(f"0::/docker/{HEX}\n")
    assert " in docker 0123456789ab: " in str(describe(ME, tmp_path))


def test_a_process_that_hides(monkeypatch):
    def hide(self):
        raise psutil.AccessDenied

    for name in ("username", "cmdline", "open_files"):
        monkeypatch.setattr(psutil.Process, name, hide)
    assert describe(ME)[:3] == (ME, "", "")
    assert folder_of_lock(ME, "lock") == ""


def test_a_number_of_the_host(tmp_path, monkeypatch):
    """In a container, the driver may name a process by a number of another one here."""
    assert describe_holder(ME, tmp_path).user
    monkeypatch.setattr(described, "numbers_all", lambda: False)
    found = describe_holder(ME, tmp_path)
    assert found == Described(ME, outside=True)
    said = f"process {ME} of the host, which this container does not see"
    assert str(found) == said
    (card,) = cards(DeviceGetComputeRunningProcesses=[held(ME, 700)])
    assert f"700 MB by {said}" in gpu_table.as_text([card])
    files = tmp_path / "proc" / str(ME) / "fd"
    files.mkdir(parents=True)
    (files / "3").symlink_to("/dev/null")
    assert describe_holder(ME, tmp_path).outside
    (files / "4").symlink_to("/dev/nvidia0")
    assert describe_holder(ME, tmp_path).command


def test_long_commands_are_cut():
    text = str(Described(7, "anna", "python " + "x" * 500))
    assert len(text) < 100 and text.endswith("xxx...")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -m towers.train --model=mlp --model_dir=/runs/a --seed=1", "/runs/a"),
        ("/usr/bin/towers train --model_dir /runs/a", "/runs/a"),
        ("python -m towers.train --model_dir=runs/a", ""),
        ("python mine.py --model_dir=/runs/a", ""),
    ],
)
def test_the_model_dir_of_another_users_run(monkeypatch, command, expected):
    stranger = Described(STRANGER, "anna", command)
    monkeypatch.setattr(gpu_table, "describe_holder", lambda pid: stranger)
    (card,) = cards(DeviceGetComputeRunningProcesses=[held(STRANGER, 1)])
    (shown,) = gpu_table.as_json([card])
    assert shown["holders"][0]["model_dir"] == expected


def test_it_needs_no_tensorflow():
    code = (
        "import sys, towers.doctor.gpus.table; assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)
