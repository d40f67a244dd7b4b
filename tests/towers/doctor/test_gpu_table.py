"""Who holds which GPU, with a driver that is made up."""

import fcntl
import json
import os
import subprocess
import sys
import types

import psutil
import pynvml
import pytest

from towers.doctor import __main__ as doctor
from towers.doctor.gpus import notes as gpu_notes
from towers.doctor.gpus import table as gpu_table
from towers.machine.nvml import Driver
from towers.processes.described import container, describe, folder_of_lock

MB = 2**20
ME = os.getpid()
# No process has such a number.
STRANGER = 2**22 + 1
NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
HEX = "0123456789abcdef" * 4


class Nvml:
    """nvidia-ml-py with the answers that are given; it refuses all other questions."""

    def __init__(self, **answers):
        self.answers = {
            "Init": None,
            "DeviceGetCount": 1,
            "DeviceGetHandleByIndex": lambda index: f"gpu {index}",
            **answers,
        }

    def __getattr__(self, name):
        if name.startswith(("NVML", "nvmlClocks", "nvmlMemory_v2")):
            return getattr(pynvml, name)
        getattr(pynvml, name)  # a name of the real library

        def ask(*arguments):
            if name.removeprefix("nvml") not in self.answers:
                raise NOT_SUPPORTED
            found = self.answers[name.removeprefix("nvml")]
            return found(*arguments) if callable(found) else found

        return ask


def held(pid, used_mb):
    used = None if used_mb is None else used_mb * MB
    return types.SimpleNamespace(pid=pid, usedGpuMemory=used)


def cards(**answers):
    return gpu_table.cards(Driver(Nvml(**answers)), {})


def notes(environ=None, **answers):
    return gpu_notes.notes(Driver(Nvml(**answers)), "gpu 0", environ or {})


def test_who_holds_a_gpu(tmp_path):
    (tmp_path / "flags.txt").touch()
    with open(tmp_path / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (card,) = cards(
            DeviceGetName=b"NVIDIA H200",
            DeviceGetUUID="GPU-aaa",
            DeviceGetMemoryInfo=types.SimpleNamespace(used=900 * MB, total=1000 * MB),
            DeviceGetUtilizationRates=types.SimpleNamespace(gpu=87),
            DeviceGetComputeRunningProcesses=[held(ME, 700), held(STRANGER, None)],
        )
    mine, strange = card.holders
    assert mine.process.user == psutil.Process().username()
    assert "python" in mine.process.command
    assert (mine.memory_mb, mine.model_dir) == (700, str(tmp_path))
    assert strange.process == describe(STRANGER) == (STRANGER, "", "", "")
    assert (strange.memory_mb, strange.model_dir) == (None, "")
    lines = gpu_table.as_text([card]).splitlines()
    assert lines[0] == "GPU 0  NVIDIA H200, GPU-aaa: 900 of 1,000 MB held, 87% busy"
    assert lines[1].startswith(f"    700 MB by process {ME} of {mine.process.user}")
    assert lines[2] == f"        trains in {tmp_path}"
    assert lines[3] == f"    ? MB by process {STRANGER}"
    found = json.loads(json.dumps(gpu_table.as_json([card])))
    assert found[0]["holders"][0]["process"]["pid"] == ME
    assert found[0]["utilization"] == 0.87


def test_a_driver_that_tells_nothing_more():
    (card,) = cards()
    assert (card.name, card.uuid, card.memory_mb) == ("a GPU", "", 0)
    assert (card.utilization, card.holders, card.slices) == (None, (), ())
    assert card.notes == ()
    assert "no process that can be seen from here" in gpu_table.as_text([card])


def test_no_gpu():
    assert gpu_table.as_text(cards(DeviceGetCount=0)) == (
        "There is no NVIDIA GPU in this machine."
    )


def test_no_driver(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert doctor.main(["--gpus"]) == 1
    said = capsys.readouterr().err
    assert "nvidia-ml-py is not installed" in said
    assert "expected a machine with a GPU" in said


def test_the_doctor_lists_gpus(monkeypatch, capsys):
    monkeypatch.setattr(gpu_table, "Driver", lambda: Driver(Nvml(DeviceGetCount=2)))
    assert doctor.main(["--gpus"]) == 0
    assert "GPU 1  a GPU" in capsys.readouterr().out
    assert doctor.main(["--gpus", "--json"]) == 0
    assert [each["index"] for each in json.loads(capsys.readouterr().out)] == [0, 1]
    assert doctor.main(["--gpus", "--hosts=a:1"]) == 1
    assert "--gpus and --hosts=a:1; expected one" in capsys.readouterr().err


def test_slices():
    names = ["MIG-1", "MIG-2"]

    def part(handle, index):
        if index > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return names[index]

    (card,) = cards(
        DeviceGetMaxMigDeviceCount=7,
        DeviceGetMigDeviceHandleByIndex=part,
        DeviceGetUUID=lambda handle: handle,
        DeviceGetName="H200 MIG 3g.71gb",
        DeviceGetMemoryInfo=lambda *_: types.SimpleNamespace(used=0, total=71 * MB),
    )
    assert [each.uuid for each in card.slices] == names
    text = gpu_table.as_text([card])
    assert "slice MIG-2: H200 MIG 3g.71gb, 71 MB" in text
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


def test_it_needs_no_tensorflow():
    code = (
        "import sys, towers.doctor.gpus.table; assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
