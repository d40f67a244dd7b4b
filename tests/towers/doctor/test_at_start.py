"""What a run is told of GPUs as it starts, with a driver that is made up."""

import functools
import os
from importlib import metadata
from pathlib import Path

import pynvml
import pytest

from tests.made_up_nvml import NOT_SUPPORTED, Nvml, held, memory
from towers.devices.configuration import Devices
from towers.doctor.gpus import at_start, checks
from towers.machine import nvml
from towers.machine.nvml import Driver, Gpu
from towers.train.parts import devices as parts_devices
from towers.train.settings import Settings

ME = os.getpid()
BUILT = {
    "cuda_version": "12.5.1",
    "cudnn_version": "9",
    "cuda_compute_capabilities": ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"],
}
HEALTHY = {
    "DeviceGetCount": 2,
    "SystemGetDriverVersion": "570.86.15",
    "DeviceGetName": "NVIDIA A100",
    "DeviceGetUUID": lambda handle: f"GPU-{handle[-1]}",
    "DeviceGetMemoryInfo": memory(4, 80_000),
    "DeviceGetCudaComputeCapability": (8, 0),
}
BOTH = {"GPU-0", "GPU-1"}


@pytest.fixture
def doubts(tmp_path, monkeypatch):
    """Returns what a run is told on a machine of two GPUs."""
    monkeypatch.setattr(metadata, "version", lambda name: "9.9")
    monkeypatch.setattr(checks.versions, "requirements", lambda name, extra: ())
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / "dev" / name).touch()

    def find(found=2, used=BOTH, build=BUILT, environ=None, looks=True, **answers):
        driver = Driver(Nvml(**{**HEALTHY, **answers}))
        return at_start.doubts(
            build, found, used, looks, driver, tmp_path, environ or {}
        )

    return find


def test_nothing_is_wrong(doubts):
    assert doubts() == []


def test_no_gpu(tmp_path):
    lost = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    driver = Driver(Nvml(Init=lost))
    assert at_start.doubts(BUILT, 0, (), True, driver, tmp_path, {}) == []


@pytest.mark.parametrize("hides", ["", "-1"])
def test_gpus_that_are_hidden(doubts, hides):
    assert doubts(found=0, used=(), environ={"CUDA_VISIBLE_DEVICES": hides}) == []


def test_gpus_of_which_some_are_chosen(doubts):
    assert doubts(1, {"GPU-1"}, environ={"CUDA_VISIBLE_DEVICES": "1"}) == []


def test_missing_libraries(doubts, monkeypatch):
    from packaging.requirements import Requirement

    asked = [Requirement("nvidia-cudnn-cu12>=9.3")]
    monkeypatch.setattr(checks.versions, "requirements", lambda name, extra: asked)

    def version(name):
        if name == "tensorflow":
            return "2.21.0"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    install = functools.partial(checks._install, ours=Path("/nowhere"))
    monkeypatch.setattr(checks, "_install", install)
    (said,) = doubts(found=0, used=())
    assert said == (
        "GPUs: 2 in this machine, TensorFlow finds 0, because TensorFlow is built for "
        "CUDA 12.5.1 and cuDNN 9, but pip has no nvidia-cudnn-cu12; pip install "
        "'tensorflow[and-cuda]==2.21.0'. Ask towers doctor for more."
    )


def test_an_old_driver(doubts):
    (said,) = doubts(found=0, used=(), SystemGetDriverVersion="470.57.02")
    assert "because the driver is 470.57.02 (CUDA 12.5.1 expects at least" in said
    assert "525.60.13); install a newer driver. Ask towers doctor for more." in said


def test_no_driver(doubts):
    lost = pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    (said,) = doubts(found=0, used=(), Init=lost)
    assert "because NVIDIA's driver says Driver Not Loaded; start" in said


def test_a_driver_that_lists_nothing(doubts):
    (said,) = doubts(found=0, used=(), DeviceGetCount=NOT_SUPPORTED)
    assert "because NVIDIA's driver lists no GPU; start" in said


def test_tensorflow_finds_fewer(doubts):
    (said,) = doubts(found=1, used={"GPU-0"})
    assert "2 in this machine, TensorFlow finds 1, because of what" in said


def test_a_container_that_has_some_of_the_hosts_gpus(doubts, tmp_path):
    for index in range(8):
        folder = tmp_path / f"sys/bus/pci/devices/{index}"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n")
    assert doubts() == []


def test_slices(doubts):
    (said,) = doubts(found=1, used=(), DeviceGetMigMode=[1, 1])
    assert said.startswith("GPUs: 2 in this machine, TensorFlow finds 1: a GPU is cut")
    assert "one; train on each in a process of its own, with CUDA_VISIBLE_DEV" in said
    named = {"CUDA_VISIBLE_DEVICES": "MIG-1"}
    assert doubts(1, (), environ=named, DeviceGetMigMode=[1, 1]) == []
    (said,) = doubts(found=0, used=(), DeviceGetMigMode=[1, 1])
    assert "because a GPU is set to be cut up (MIG), and has no slice; make" in said


def test_a_driver_that_has_to_compile(doubts):
    (said,) = doubts(
        DeviceGetCudaComputeCapability=(9, 0), SystemGetDriverVersion="535.288.01"
    )
    assert said.startswith("driver: 535.288.01")
    assert "for compute capability 9.0 it has to compile kernels" in said


@pytest.mark.parametrize("capability", [(10, 0), (12, 0)])
def test_blackwell(doubts, capability):
    name = ".".join(map(str, capability))
    (said,) = doubts(DeviceGetCudaComputeCapability=capability)
    assert said.startswith(
        "GPU kernels: this TensorFlow is built for sm_60, sm_70, sm_80, sm_89, "
        "compute_90, so it has no kernels for GPU 0 (NVIDIA A100, compute capability "
        f"{name}): the driver compiles those for an older generation as they ar"
    )
    code = name.replace(".", "")
    assert f"install a TensorFlow that is built for sm_{code} (docs/" in said
    built = BUILT | {"cuda_compute_capabilities": ["sm_80", f"sm_{code}"]}
    assert doubts(build=built, DeviceGetCudaComputeCapability=capability) == []


def test_memory_that_others_hold(doubts):
    taken = {
        "DeviceGetMemoryInfo": memory(79_500, 80_000),
        "DeviceGetComputeRunningProcesses": [held(ME, 79_000)],
    }
    (said,) = doubts(used={"GPU-1"}, **taken)
    assert said.startswith(
        "GPU memory: GPU 1 has 500 of 80,000 MB free; GPU 1's is held by process "
        f"{ME} of "
    )
    assert said.endswith(": end it, or choose other GPUs, as by --gpu_indices=free.")
    assert doubts(used={"GPU-1"}, looks=False, **taken) == []
    some = taken | {"DeviceGetMemoryInfo": memory(20_000, 80_000)}
    (said,) = doubts(used={"GPU-1"}, **some)
    assert "GPU 1 has 60,000 of 80,000 MB free; GPU 1's is held by process" in said


@pytest.mark.parametrize(
    "refused",
    [
        "SystemGetDriverVersion",
        "DeviceGetName",
        "DeviceGetUUID",
        "DeviceGetMemoryInfo",
        "DeviceGetCudaComputeCapability",
    ],
)
def test_what_the_driver_does_not_tell_is_left_out(doubts, refused):
    for line in doubts(**{refused: NOT_SUPPORTED}):
        assert "not known" in line


@pytest.mark.parametrize(
    ("more", "looks"),
    [
        ({}, True),
        ({"gpu_indices": ("free",)}, False),
        ({"share_gpus": "0.5"}, False),
    ],
)
def test_a_run_says_it(monkeypatch, capsys, more, looks):
    asked = []

    def doubts(*args, looks_at_memory):
        asked.append((*args, looks_at_memory))
        return ["GPUs: 2 in this machine."]

    monkeypatch.setattr(at_start, "doubts", doubts)
    monkeypatch.setattr(nvml, "has_gpus", lambda: True)
    monkeypatch.setattr(nvml, "gpu", lambda index: Gpu(index, f"GPU-{index}", 1000))
    devices = Devices(("/device:GPU:0",), "", (1,), others=("/device:GPU:1",))
    parts_devices._say_doubts(Settings(**more), devices)
    ((build, found, used, looked),) = asked
    assert {name: build[name] for name in BUILT} == BUILT
    assert (found, used, looked) == (0, {"GPU-1"}, looks)
    assert "towers: Warning: GPUs: 2 in this machine." in capsys.readouterr().err


def test_a_run_says_it_of_blackwell(monkeypatch, capsys):
    name, capability = "NVIDIA GeForce RTX 5090", (12, 0)
    answers = {"DeviceGetName": name, "DeviceGetCudaComputeCapability": capability}
    driver = Driver(Nvml(**HEALTHY | answers))
    monkeypatch.setattr(at_start, "Driver", lambda: driver)
    monkeypatch.setattr(nvml, "has_gpus", lambda: True)
    monkeypatch.setattr(nvml, "gpu", lambda index: Gpu(index, f"GPU-{index}", 1000))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = Devices(("/device:GPU:0",), "", (0,), others=("/device:GPU:1",))
    parts_devices._say_doubts(Settings(), devices)
    said = " ".join(capsys.readouterr().err.split())
    assert "Warning: GPU kernels: this TensorFlow is built for sm_60, sm_70, " in said
    assert f"no kernels for GPU 0 ({name}, compute capability 12.0): the " in said


def test_without_gpus_nobody_looks_for_faults(monkeypatch):
    monkeypatch.setattr(nvml, "has_gpus", lambda: False)
    monkeypatch.setattr(at_start, "doubts", None)
    parts_devices._say_doubts(Settings(), None)


def test_gpus_are_seen_by_files(tmp_path):
    assert not nvml.has_gpus(tmp_path)
    bus = tmp_path / "sys/bus/pci/devices"
    for name, vendor, kind in (
        ("a", "0x10de", "0x040300"),
        ("b", "0x8086", "0x030000"),
    ):
        (bus / name).mkdir(parents=True)
        (bus / name / "vendor").write_text(f"{vendor}\n")
        (bus / name / "class").write_text(f"{kind}\n")
    assert not nvml.has_gpus(tmp_path)  # a sound device, and another maker's GPU
    (bus / "b" / "vendor").write_text("0x10de\n")
    assert nvml.has_gpus(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert nvml.device_files(tmp_path) == nvml.on_bus(tmp_path) == 1
