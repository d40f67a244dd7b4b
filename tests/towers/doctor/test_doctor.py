"""What the doctor says of machines, real and faked."""

import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import types
from importlib import metadata
from pathlib import Path
from unittest import mock

import psutil
import pynvml
import pytest

from tests.limits import HANG_S
from tests.made_up_nvml import NOT_SUPPORTED, Nvml, held, memory
from tests.variants import slow
from towers.cluster.launchers import tf_config
from towers.doctor import __main__ as doctor
from towers.doctor import (
    cluster,
    devices,
    host,
    probe,
    process,
    versions,
)
from towers.doctor.devices import DeviceProbe
from towers.doctor.finding import Finding, examine, in_a_line, ok
from towers.doctor.gpus import built, seen
from towers.doctor.gpus import checks as gpus
from towers.keras_adapter import versions as tested_versions
from towers.machine.nvml import Driver, Gpu, Holder
from towers.program.extras import install_command

ROOT = Path(__file__).parents[3]
TOWERS = ["/device:CPU:0", "/device:CPU:1"]
BUILT = {
    "cuda_version": "12.5.1",
    "cudnn_version": "9",
    "cuda_compute_capabilities": ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"],
}
HEALTHY = DeviceProbe(
    build=BUILT,
    gpus=0,
    towers=TOWERS,
    computed=dict.fromkeys(TOWERS, 1e-7),
    copies=[[a, b, 1e4, True] for a in TOWERS for b in TOWERS],
)
CLUSTER = {"worker": ["host1:2222", "host2:2222"]}


@pytest.fixture
def environ(monkeypatch):
    """The environment, without what the machine's may say."""
    for name in ("TF_CONFIG", "TF_FORCE_GPU_ALLOW_GROWTH", "TF_GPU_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return monkeypatch


@pytest.fixture
def report(environ, capsys, monkeypatch, tmp_path):
    """Runs the doctor as on a machine of two logical CPUs: exit code, findings."""
    monkeypatch.setattr(devices, "probe", lambda num_gpus: HEALTHY)
    monkeypatch.setattr(gpus, "look", lambda: gpus.SeenMachine(0, 0))

    def run(*flags):
        folders = (f"--model_dir={tmp_path}", f"--data_dir={tmp_path}")
        code = doctor.main(["", "--json", *folders, *flags])
        return code, read(capsys.readouterr().out)

    return run


def read(text):
    found = json.loads(text)
    checks = {each["name"]: each for each in found["checks"]}
    assert (found["verdict"] == "wrong") == bool(wrong(checks))
    return checks


def wrong(checks):
    return [name for name, each in checks.items() if each["verdict"] == "wrong"]


def run(*flags, **environ):
    return subprocess.run(
        [sys.executable, "-m", "towers.doctor", *map(str, flags)],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environ,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def stub(folder, text):
    """A TensorFlow of our own, for PYTHONPATH."""
    (folder / "tensorflow.py").write_text(text)
    return str(folder)


# The whole.


def test_a_machine_without_gpu(environ, tmp_path):
    folders = (f"--model_dir={tmp_path / 'new' / 'run'}", f"--data_dir={tmp_path}")
    done = run("--json", *folders)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())
    checks = read(done.stdout)
    assert wrong(checks) == []
    assert checks["Python"]["figures"]["found"] == sys.version.split()[0]
    assert checks["GPUs"]["verdict"] == "note"
    assert checks["GPUs"]["figures"]["tensorflow"] == 0
    assert checks["TensorFlow"]["figures"] == {"towers": TOWERS}
    assert checks["CPU:1"]["figures"]["difference"] < 1e-4
    rates = checks["copies"]["figures"]["mb_per_s"]
    assert [*rates] == [*rates["CPU:0"]] == [*rates["CPU:1"]] == ["CPU:0", "CPU:1"]
    assert all(rate > 0 for row in rates.values() for rate in row.values())


def test_lines(capsys, monkeypatch):
    table = {"copies": Finding("ok", "at so many MB/s:", {}, "a  b\n1  2")}
    found = table | {"cores": Finding("note", "few\nof them", {})}
    monkeypatch.setattr(
        doctor, "checks", lambda _: ((n, lambda f=f: f) for n, f in found.items())
    )
    lines = [
        "ok     copies            at so many MB/s:",
        "                         a  b",
        "                         1  2",
        "note   cores             few of them",
        "",
    ]
    assert doctor.main([""]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [*lines, "Nothing wrong, 1 to note."]
    found["disk"] = Finding("wrong", "full", {})
    assert doctor.main([""]) == 2
    said = capsys.readouterr().out.splitlines()
    lines[-1:] = ["wrong  disk              full", ""]
    assert said == [*lines, "1 wrong, 1 to note."]


def test_a_broken_tf_config(report, environ):
    environ.setenv("TF_CONFIG", '{"cluster": ')
    code, checks = report()
    assert code == 2
    assert wrong(checks) == ["TF_CONFIG"]
    assert checks["TF_CONFIG"]["text"].startswith("not JSON (Expecting value: line 1")


@contextlib.contextmanager
def mounted(folder, options):
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("options", "error"), [("size=4m", "ENOSPC"), ("size=200m,ro", "EROFS")]
)
def test_a_disk_that_cannot_be_written_to(report, tmp_path, options, error):
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder, options):
        code, checks = report(f"--model_dir={folder / 'run'}")
        assert not list(folder.iterdir())
    assert code == 2
    assert wrong(checks) == ["model_dir"]
    assert checks["model_dir"]["figures"]["error"] == error
    assert f"{folder / 'run'}: 100 MB, as for" in checks["model_dir"]["text"]


@pytest.mark.parametrize(
    ("flag", "ends"),
    [
        ("--nonsense", "; see --help.\n"),
        ("runs/mine", "; see --help.\n"),
        (
            "--num_gpus=x",
            ": Received --num_gpus=x; expected a whole number; see --help.\n",
        ),
    ],
)
def test_wrong_flags(flag, ends, capsys):
    assert doctor.main(["", flag]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("towers.doctor: ")
    assert printed.err.endswith(ends)
    assert printed.err.count("\n") == 1


def test_no_tower(capsys):
    assert doctor.main(["", "--num_gpus=0"]) == 1
    said = "towers.doctor: Received --num_gpus=0; expected at least 1.\n"
    assert capsys.readouterr().err == said


def test_ctrl_c(capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpus, "look", stop)
    assert doctor.main([""]) == 130
    assert capsys.readouterr().err == "towers.doctor: Stopped by Ctrl-C.\n"


# A check that fails itself.


def test_a_check_that_raises():
    found = examine(lambda: {}["of nothing"])
    assert found == Finding("wrong", "the check fails: KeyError: 'of nothing'", {})


def test_a_check_that_hangs():
    free = threading.Event()
    try:
        found = examine(lambda: ok(str(free.wait())), limit_s=0.01)
        assert (found.verdict, found.figures) == ("wrong", {})
        assert found.text == "the check gives nothing within 0.01 s"
    finally:
        free.set()


def test_an_error_in_a_line():
    assert in_a_line(ValueError("one\ntwo")) == "ValueError: one"
    assert in_a_line(ValueError()) == "ValueError"
    try:
        try:
            raise OSError("libcudart.so.12: cannot open")
        except OSError as error:
            raise ImportError("Traceback (most recent call last):\n ...") from error
    except ImportError as error:
        assert in_a_line(error) == "OSError: libcudart.so.12: cannot open"


# TensorFlow.


def test_a_tensorflow_that_cannot_be_imported(tmp_path):
    path = stub(tmp_path, "raise ImportError('libfoo.so: no such file')")
    done = run(f"--model_dir={tmp_path}", PYTHONPATH=path)
    assert done.returncode == 2
    assert done.stderr == ""
    (line,) = (each for each in done.stdout.splitlines() if "TensorFlow   " in each)
    assert line.startswith(
        "wrong  TensorFlow        the import of TensorFlow fails: ImportError: "
        "libfoo.so: no such file; see all of it by python -c 'import tensorflow'"
    )
    assert "\nok     model_dir " in done.stdout


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        slow("import threading; threading.Event().wait()", "gives nothing within 1 s"),
        (
            "import os; os.kill(os.getpid(), 4)",
            "ends with SIGILL, as this CPU lacks",
        ),
        ("import os; os._exit(7)", "the import of TensorFlow ends with exit code 7: "),
    ],
    ids=["hangs", "crashes", "exits"],
)
def test_a_tensorflow_that_does_not_return(tmp_path, monkeypatch, text, fault):
    monkeypatch.setenv("PYTHONPATH", stub(tmp_path, text))
    found = devices.probe(2, limit_s=1 if "within" in fault else HANG_S)
    start = devices.start(found)
    assert start.verdict == "wrong"
    assert fault in start.text
    assert devices.copies(found).verdict == "wrong"


def test_a_process_that_cannot_be_started(monkeypatch):
    no_room = mock.Mock(side_effect=OSError("no room for a process"))
    monkeypatch.setattr(process, "run", no_room)
    start = devices.start(devices.probe(2))
    assert start.verdict == "wrong"
    assert "cannot be started: no room for a process; see" in start.text


def test_the_users_settings_of_keras(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    assert versions.of_keras().verdict == "ok"
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    finding = versions.of_keras()
    assert finding.verdict == "note"
    assert re.search(
        "^KERAS_BACKEND=jax .* in Python, set KERAS_BACKEND=t", finding.text
    )
    (tmp_path / "keras.json").write_text('{"floatx": "float8"}')
    assert versions.of_keras().verdict == "wrong"


def test_towers_that_cannot_be_set_up():
    finding = devices.start(DeviceProbe(build={}, fault="of 9 GPUs"))
    assert (finding.verdict, finding.text) == ("wrong", "of 9 GPUs")


@pytest.mark.parametrize(
    ("difference", "verdict"), [(1e-6, "ok"), (0.5, "wrong"), (float("nan"), "wrong")]
)
def test_what_a_device_computes(difference, verdict):
    found = DeviceProbe(
        towers=TOWERS, computed={TOWERS[1]: difference}, fault="it hangs"
    )
    finding = devices.computation(found, TOWERS[1])
    assert finding.verdict == verdict
    json.dumps(finding.figures, allow_nan=False)
    assert devices.computation(found, TOWERS[0]).text == "not known, as it hangs"


def test_a_device_that_fails():
    found = DeviceProbe(towers=TOWERS, failed={TOWERS[0]: "UnknownError: cuDNN"})
    finding = devices.computation(found, TOWERS[0])
    assert finding.verdict == "wrong"
    assert finding.text.startswith("UnknownError: cuDNN; expected")


def links(slowest=10_000.0, unchanged=True):
    names = ["/device:CPU:0", "/device:GPU:0", "/device:GPU:1"]
    rates = {("GPU:0", "GPU:1"): slowest, ("CPU:0", "CPU:0"): 1.0}
    return [
        [a, b, rates.get((a[8:], b[8:]), 10_000.0), unchanged or a == b]
        for a in names
        for b in names
    ]


def test_each_copy_is_of_a_new_array(monkeypatch):
    """TensorFlow keeps copies on GPUs, and one of 569 GB/s was reported."""
    copied, copy = [], probe._copy

    def noted(value, source, to):
        copied.append(value)
        return copy(value, source, to)

    monkeypatch.setattr(probe, "_copy", noted)
    rows = probe.copies(TOWERS[:2], lambda *_: None)
    assert len(rows) == 4
    assert all(unchanged for *_, unchanged in rows)
    assert len({id(value) for value in copied}) == len(copied) > len(rows)


def test_copies():
    finding = devices.copies(DeviceProbe(copies=links()))
    assert finding.verdict == "ok"
    assert finding.table.splitlines()[2].split() == ["GPU:0", *["10,000"] * 3]
    slow = devices.copies(DeviceProbe(copies=links(slowest=900)))
    assert slow.verdict == "note"
    assert slow.text.startswith("from GPU:0 to GPU:1 only 900 MB/s")
    changed = devices.copies(DeviceProbe(copies=links(unchanged=False)))
    assert changed.verdict == "wrong"
    assert "from CPU:0 to GPU:0 arrives changed (6 of 9 pairs)" in changed.text


# Versions.


OURS = "keras-towers"


@pytest.fixture
def installed(monkeypatch):
    """Packages that are said to be installed, by name."""
    packages = {OURS: "1", "tensorflow": "2.21.0", "keras": "3.15.1", "wrapt": "2"}
    asks = {
        OURS: [
            *("tensorflow<3,>=2.19", "keras<4,>=3.10", "wrapt<3,>=1.14"),
            'pytest>=8; extra == "dev"',
        ],
        "tensorflow": [
            "numpy>=1.26.0",
            'nvidia-cudnn-cu12<10.0,>=9.3.0.75; extra == "and-cuda"',
            'nvidia-nccl-cu12<3.0,>=2.27.7; extra == "and-cuda"',
        ],
    }

    def find(name, known=packages):
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return known[name]

    fake = types.SimpleNamespace(
        version=find,
        requires=lambda name: find(name, asks),
        metadata=lambda name: find(name) and {"Requires-Python": ">=3.11,<3.15"},
        PackageNotFoundError=metadata.PackageNotFoundError,
    )
    for module in (versions, tested_versions):
        monkeypatch.setattr(module, "metadata", fake)
    return packages


@pytest.mark.parametrize(
    ("found", "verdict", "text"),
    [
        ("2.21.0", "ok", "2.21.0 (keras-towers expects <3,>=2.19)"),
        ("2.19.0rc1", "wrong", "; pip install 'tensorflow<3,>=2.19'"),
        ("2.18.1", "wrong", "2.18.1 (keras-towers expects <3,>=2.19); pip install"),
        (None, "wrong", "not installed (keras-towers expects <3,>=2.19); pip install"),
        ("2.99.0", "note", "tensorflow 2.99.0 is newer than 2."),
    ],
)
def test_a_packages_version(installed, found, verdict, text):
    installed["tensorflow"] = found
    if found is None:
        del installed["tensorflow"]
    finding = versions.package("tensorflow", OURS)
    assert finding.verdict == verdict
    assert text in finding.text
    assert finding.figures["found"] == found


def test_other_packages(installed):
    assert versions.others() == Finding("ok", "wrapt 2", {"found": {"wrapt": "2"}})
    del installed["wrapt"]
    finding = versions.others()
    assert finding.verdict == "wrong"
    assert finding.text.startswith("wrapt not installed (expected <3,>=1.14); pip")


@pytest.mark.parametrize(
    ("found", "verdict"), [("3.12.1", "ok"), ("3.10.9", "wrong"), ("3.15.0", "wrong")]
)
def test_pythons_version(installed, monkeypatch, found, verdict):
    monkeypatch.setattr(versions.platform, "python_version", lambda: found)
    finding = versions.python()
    assert finding.verdict == verdict
    assert finding.text.startswith(f"{found} (expected ")


def test_towers_that_are_not_installed(installed):
    del installed[OURS]
    for finding in (
        *(versions.python(), versions.others()),
        versions.package("keras", OURS),
    ):
        assert finding.verdict == "note"
        assert f"the package {OURS} is not installed" in finding.text


# GPUs, which are faked.

CARDS = {
    "DeviceGetCount": 2,
    "SystemGetDriverVersion": "555.58.02",
    "SystemGetProcessName": "python",
    "DeviceGetName": "NVIDIA H200",
    "DeviceGetUUID": {"gpu 0": "GPU-a", "gpu 1": "GPU-b"}.get,
    "DeviceGetMemoryInfo": lambda card, *_: memory(
        {"gpu 0": 559, "gpu 1": 81059}[card], 81559
    ),
    "DeviceGetCudaComputeCapability": (9, 0),
    "DeviceGetComputeRunningProcesses": lambda card: (
        [held(4194305, 60000)] if card == "gpu 1" else []
    ),
}
FOUND = DeviceProbe(build=BUILT, gpus=2)


def drive(monkeypatch, **answers):
    """Has a made-up driver answer the process that asks it."""
    driver = Driver(Nvml(**CARDS | answers))
    told = json.dumps(seen.told_by(driver))
    monkeypatch.setattr(process, "run", lambda *_: (told, "", 0))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of two GPUs, as files and the driver show it."""
    kinds = [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x040300")]
    for index, (vendor, kind) in enumerate([*kinds, ("0x1234", "0x030000")]):
        folder = tmp_path / f"sys/bus/pci/devices/{index}"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    drive(monkeypatch)
    return gpus.look(tmp_path, {})


def test_look(machine):
    assert machine.gpus == machine.on_bus == machine.device_files == 2
    assert machine.driver == "555.58.02"
    assert machine.cards[1] == Gpu(
        *(1, "GPU-b", 81559, 81059, 500, "NVIDIA H200", "9.0"),
        holders=(Holder(4194305, 60000, True, "python"),),
    )
    assert machine.fault == ""
    # Of a TensorFlow without CUDA, nothing is asked of a driver.
    without = DeviceProbe(build={}, gpus=0)
    assert gpus.check_driver(machine, without) == ok(
        *(machine.driver,),
        **{"found": machine.driver, "cuda": "", "expected": None},
    )
    assert gpus.check_libraries(machine, without).text.endswith("without CUDA")


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (("", "", None), "NVIDIA's driver gives nothing within 30 s"),
        (
            ("", "a warning\nSegmentation fault\n", -11),
            "asking NVIDIA's driver fails: Segm",
        ),
    ],
)
def test_a_driver_that_breaks_the_process(tmp_path, monkeypatch, answer, fault):
    monkeypatch.setattr(process, "run", lambda *_: answer)
    assert gpus.look(tmp_path, {}).fault.startswith(fault)


def test_holders_without_psutil(machine, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "towers.processes.described", None)
    drive(monkeypatch)
    finding = gpus.check_memory(gpus.look(tmp_path, {}))
    assert "GPU 1's is held by process 4194305 (python)" in finding.text


def test_a_driver_that_does_not_answer(machine, tmp_path, monkeypatch):
    mismatch = pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    drive(monkeypatch, Init=mismatch)
    machine = gpus.look(tmp_path, {})
    assert machine.gpus == 2
    said = f"NVIDIA's driver says {mismatch}; start the machine anew"
    assert machine.fault == said
    finding = gpus.check_gpus(machine, DeviceProbe(build=BUILT, gpus=0), {})
    assert finding.verdict == "wrong"
    assert finding.text.endswith(f"because {said}")
    assert (
        gpus.check_driver(machine, DeviceProbe(build=BUILT, gpus=0)).verdict == "wrong"
    )
    assert gpus.check_driver(machine, FOUND).verdict == "note"
    assert gpus.check_memory(machine).verdict == "note"


def test_no_gpu(tmp_path, monkeypatch):
    # In a process, whose library is missing.
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    (tmp_path / "pynvml.py").write_text(
        "class NVMLError(Exception): pass\n"
        "class NVMLError_LibraryNotFound(NVMLError): pass\n"
        "def nvmlInit(): raise NVMLError_LibraryNotFound"
    )
    machine, found = gpus.look(tmp_path, {}), DeviceProbe(build=BUILT, gpus=0)
    assert machine == gpus.SeenMachine(
        *(0, 0),
        fault="no NVIDIA driver is found on this machine; install it if there is a GPU",
    )
    assert gpus.check_gpus(machine, found, {}).verdict == "note"
    for finding in (
        gpus.check_driver(machine, found),
        gpus.check_libraries(machine, found),
        gpus.check_memory(machine),
    ):
        assert finding.verdict == "ok"


def test_gpus_that_are_hidden_on_purpose(machine, tmp_path):
    machine = gpus.look(tmp_path, {"CUDA_VISIBLE_DEVICES": "-1"})
    machine, found = (
        machine._replace(driver="", cards=()),
        DeviceProbe(build=BUILT, gpus=0),
    )
    for finding in (
        gpus.check_driver(machine, found),
        gpus.check_libraries(machine, found),
        gpus.check_memory(machine),
    ):
        assert finding.verdict == "ok"


def test_a_program_that_hangs():
    assert process.run(["sh", "-c", "exec sleep 1000"], 0.01) == ("", "", None)
    out, err, code = process.run(["sh", "-c", "echo a; echo b >&2; exit 3"], HANG_S)
    assert (out, err, code) == ("a\n", "b\n", 3)


def test_gpus_that_are_found(machine):
    finding = gpus.check_gpus(machine, FOUND, {})
    assert finding.verdict == "ok"
    assert finding.text.endswith("TensorFlow finds 2: NVIDIA H200, NVIDIA H200")
    assert gpus.check_driver(machine, FOUND).verdict == "ok"


@pytest.mark.parametrize(
    ("capability", "driver", "verdict", "expected"),
    [
        ("9.0", "525.60.12", "wrong", "525.60.13"),
        ("9.0", "535.288.01", "note", "555.42.02"),
        ("9.0", "555.42.02", "ok", "525.60.13"),
        ("12.0", "550.54.15", "note", "555.42.02"),
        ("8.6", "525.60.13", "ok", "525.60.13"),
        ("7.5", "525.60.13", "ok", "525.60.13"),
        ("6.1", "525.60.13", "ok", "525.60.13"),
        ("", "525.60.13", "ok", "525.60.13"),
    ],
)
def test_a_driver_that_has_to_compile(machine, capability, driver, verdict, expected):
    cards = tuple(card._replace(capability=capability) for card in machine.cards)
    machine = machine._replace(cards=cards, driver=driver)
    finding = gpus.check_driver(machine, FOUND)
    assert (finding.verdict, finding.figures["expected"]) == (verdict, expected)
    assert (f"capability {capability} " in finding.text) == (verdict == "note")


def test_a_driver_that_does_not_tell_the_capability(machine, tmp_path, monkeypatch):
    drive(monkeypatch, DeviceGetCudaComputeCapability=NOT_SUPPORTED)
    cards = gpus.look(tmp_path, {}).cards
    assert [card.capability for card in cards] == ["", ""]
    assert cards == tuple(card._replace(capability="") for card in machine.cards)


def test_the_command_that_installs_cuda(tmp_path, installed):
    wheel, checkout = tmp_path / "site-packages", tmp_path / "towers"
    checkout.mkdir()
    (checkout / "setup.py").touch()
    installed["tensorflow-cpu"] = installed.pop("tensorflow")
    assert gpus._install(tmp_path, wheel) == install_command("gpu")
    installed["tensorflow"] = "2.22.0rc0"
    exact = "pip install 'tensorflow[and-cuda]==2.22.0rc0'"
    assert gpus._install(tmp_path, wheel) == exact
    venv = checkout / ".venv"
    assert gpus._install(venv, checkout) == "make GPU=1"
    venv.mkdir()
    (venv / ".ready-gpu").touch()  # make has done its part
    assert gpus._install(venv, checkout) == exact


# P40, V100, T4, A100, H100, B200, RTX 5090, DGX Spark, and a generation to come.
CAPABILITIES = "6.1", "7.0", "7.5", "8.0", "9.0", "10.0", "12.0", "12.1", "13.0"
BUILDS = {
    # The wheels of TensorFlow 2.19 to 2.22.
    "sm_60 sm_70 sm_80 sm_89 compute_90": "code code code code ptx old old old old",
    # Blackwell only, as somebody's wheel is; with PTX; for CUDA 13.
    "sm_120": "none none none none none none code code none",
    "sm_89 compute_120": "none none none none none none ptx ptx old",
    "sm_75 sm_80 sm_90 sm_100 compute_120": "none none code code code code ptx ptx old",
    # PTX only, as the header of a wheel for one generation is read.
    "compute_120": "none none none none none none ptx ptx old",
    "": "unknown " * len(CAPABILITIES),
}
SAID = {
    "code": ("ok", "this TensorFlow is built for sm_"),
    "ptx": ("ok", "the driver compiles kernels as they are first used"),
    "old": (
        "note",
        "which may take 30 minutes, and some fail with CUDA_ERROR_INVALID_",
    ),
    "none": (
        "wrong",
        "so it has no kernels for GPU 0 (NVIDIA H200, compute capability",
    ),
    "unknown": ("note", "not known for which GPUs TensorFlow has kernels"),
}


@pytest.mark.parametrize("code", BUILDS)
def test_kernels(machine, code):
    found = DeviceProbe(build=BUILT | {"cuda_compute_capabilities": code.split()})
    for capability, kind in zip(CAPABILITIES, BUILDS[code].split(), strict=True):
        cards = tuple(card._replace(capability=capability) for card in machine.cards)
        finding = gpus.check_kernels(machine._replace(cards=cards), found)
        verdict, text = SAID[kind]
        assert finding.verdict == verdict, capability
        assert text in finding.text
        assert ("compiles" in finding.text) == (kind in ("ptx", "old"))
        hidden = machine._replace(cards=cards, hidden=True)
        assert gpus.check_kernels(hidden, found).verdict == "ok"


def test_slices(machine, tmp_path, monkeypatch):
    assert not machine.cut_up
    modes = {"gpu 0": (pynvml.NVML_DEVICE_MIG_ENABLE, 1)}
    drive(monkeypatch, DeviceGetMigMode=lambda card: modes.get(card, NOT_SUPPORTED))
    cut_up = gpus.look(tmp_path, {})
    cards = machine.cards[0]._replace(cut_up=True), machine.cards[1]
    assert cut_up == machine._replace(cut_up=True, cards=cards)
    finding = gpus.check_gpus(cut_up, DeviceProbe(build=BUILT, gpus=1), {})
    assert finding.verdict == "note"
    assert "train on each in a process of its own, with CUDA_VISIBLE" in finding.text


def test_who_holds_the_memory(machine, tmp_path, monkeypatch):
    mine = [held(os.getpid(), 60000)]
    drive(monkeypatch, DeviceGetComputeRunningProcesses=mine)
    finding = gpus.check_memory(gpus.look(tmp_path, {}))
    user = psutil.Process().username()
    assert f"GPU 1's is held by process {os.getpid()} of {user}" in finding.text


def test_a_gpu_whose_capability_is_not_known(machine):
    cards = tuple(card._replace(capability="") for card in machine.cards)
    finding = gpus.check_kernels(machine._replace(cards=cards), FOUND)
    assert finding.verdict == "note"
    assert finding.text == SAID["unknown"][1]


def test_the_wheels_machine_code():
    wheel = built.of_tensorflow()
    assert {name: wheel[name] for name in BUILT} == BUILT


@pytest.mark.parametrize(
    ("found", "hides", "verdict", "text"),
    [
        (0, "", "note", "finds 0, as CUDA_VISIBLE_DEVICES='' hides the others"),
        (1, "1", "note", "finds 1, as CUDA_VISIBLE_DEVICES='1' hides the others"),
        (0, "7", "wrong", "because CUDA_VISIBLE_DEVICES='7' names none of them"),
        (None, None, "wrong", "not known to TensorFlow, which fails"),
    ],
)
def test_gpus_that_tensorflow_does_not_find(
    machine, tmp_path, found, hides, verdict, text
):
    environ = {} if hides is None else {"CUDA_VISIBLE_DEVICES": hides}
    machine = gpus.look(tmp_path, environ)
    finding = gpus.check_gpus(machine, DeviceProbe(build=BUILT, gpus=found), environ)
    assert finding.verdict == verdict
    assert text in finding.text


def test_why_gpus_are_not_found(machine, installed, monkeypatch):
    monkeypatch.setattr(gpus, "_install", lambda: "make GPU=1")

    def reason(machine=machine, **found):
        found = DeviceProbe(**{"build": BUILT, "gpus": 0} | found)
        finding = gpus.check_gpus(machine, found, {})
        assert finding.verdict == "wrong"
        return finding.figures["reason"]

    bare = gpus.SeenMachine(on_bus=1, device_files=0, fault="the library is missing")
    assert reason(bare).startswith("there is no /dev/nvidia0, so the driver is not")
    assert reason(build={}).startswith("this TensorFlow is built without CUDA")
    assert reason(build={"is_cuda_build": True}) == "of what TensorFlow does not tell"
    old = machine._replace(driver="470.57.02")
    assert reason(old).startswith("the driver is 470.57.02 (CUDA 12.5.1 expects at")
    assert "but pip has no nvidia-cudnn-cu12, nvidia-nccl-cu12; make GPU=1" in reason()
    installed |= {"nvidia-cudnn-cu12": "8.9.7.29", "nvidia-nccl-cu12": "2.28.1"}
    assert "but there is nvidia-cudnn-cu12 8.9.7.29 (expected <10.0,>=9" in reason()
    installed["nvidia-cudnn-cu12"] = "9.3.0.75"
    log = "E0000 00:00:1.2 3 cuda.cc:4] failed call to cuInit: UNKNOWN ERROR (303)\n"
    assert reason(log=log) == "it says: failed call to cuInit: UNKNOWN ERROR (303)"


def test_cuda_of_the_system(machine, installed):
    finding = gpus.check_libraries(machine, FOUND)
    assert finding.verdict == "ok"
    assert finding.text.endswith("as the system has them")
    assert finding.figures == {"cuda": "12.5.1", "cudnn": "9"}


@pytest.mark.parametrize(
    ("capability", "cudnn", "verdict"),
    [
        ("7.0", "9.10.2.21", "ok"),
        ("7.5", "9.11.0.98", "ok"),
        ("7.0", "9.28.0", "wrong"),
    ],
)
def test_cudnn_leaves_old_gpus_out(machine, installed, capability, cudnn, verdict):
    installed |= {"nvidia-cudnn-cu12": cudnn, "nvidia-nccl-cu12": "2.28.1"}
    cards = tuple(card._replace(capability=capability) for card in machine.cards)
    finding = gpus.check_libraries(machine._replace(cards=cards), FOUND)
    assert finding.verdict == verdict
    said = "; pip install 'nvidia-cudnn-cu12<9.11'"
    assert finding.text.endswith(said) == (verdict == "wrong")


def test_memory_of_gpus(machine):
    finding = gpus.check_memory(machine)
    assert finding.verdict == "wrong"
    assert (
        "GPU 1 has 500 of 81,559 MB free; GPU 1's is held by process 4194305 (python)"
        in (finding.text)
    )
    card = machine.cards[1]._replace(free_mb=40_000, holders=())
    some = machine._replace(cards=(machine.cards[0], card))
    finding = gpus.check_memory(some)
    assert finding.verdict == "note"
    assert "that NVIDIA's driver does not name here" in finding.text
    assert gpus.check_memory(some._replace(cards=some.cards[:1])).verdict == "ok"


@pytest.mark.parametrize(
    ("environ", "verdict"),
    [
        ({}, "ok"),
        ({"TF_GPU_ALLOCATOR": "cuda_malloc_async"}, "ok"),
        ({"TF_FORCE_GPU_ALLOW_GROWTH": "true"}, "note"),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "note"),
        ({"TF_FORCE_GPU_ALLOW_GROWTH": "1"}, "wrong"),
        ({"TF_GPU_ALLOCATOR": "async"}, "wrong"),
        ({"TF_GPU_THREAD_MODE": "GPU_SHARED"}, "ok"),
        ({"TF_GPU_THREAD_MODE": "private"}, "wrong"),
    ],
)
def test_settings(environ, verdict):
    finding = gpus.check_settings(environ)
    assert (finding.verdict, finding.figures) == (verdict, environ)


# TF_CONFIG.


def config(cluster=CLUSTER, kind="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON (Expecting property name"),
        ("[]", "no cluster in []; expected such as"),
        ('{"task": {"type": "worker", "index": 0}}', "no cluster in "),
        (config({"worker": []}), "the cluster's 'worker' is []; expected a list"),
        (config({"worker": ["a"]}), 'the address "a"; expected HOST:PORT'),
        (config({"worker": ["http://a:1"]}), 'the address "http://a:1"; expected'),
        (config({"worker": ["a:70000"]}), 'the address "a:70000"; expected HOST:PORT'),
        (config({"worker": [7]}), "the address 7; expected HOST:PORT"),
        (config({"worker": ["a:1", "a:1"]}), "the address a:1 is there 2 times"),
        (
            config({"worker": ["a:1"], "ps": ["a:1"]}),
            "the address a:1 is there 2 times",
        ),
        (json.dumps({"cluster": CLUSTER}), "the task is null, whose type"),
        (config(kind=["x"]), "whose type the cluster has not; expected one of worker"),
        (
            config(kind="chief"),
            "whose type the cluster has not; expected one of worker",
        ),
        (config(index=2), "has 2 of type worker; expected an index from 0 to 1"),
        (config(index=-1), "expected an index from 0 to 1"),
        (config(index="x"), "expected an index from 0 to 1"),
    ],
)
def test_a_tf_config_that_is_wrong(text, message):
    finding = cluster.check({"TF_CONFIG": text})
    assert finding.verdict == "wrong"
    assert message in finding.text
    assert finding.figures == {"received": text}


@pytest.mark.parametrize(
    ("kind", "index", "address"),
    [("worker", 1, "host2:2222"), ("worker", "1", "[::1]:1"), ("evaluator", 0, "a:1")],
)
def test_a_tf_config_that_is_right(kind, index, address):
    listed = {"worker": ["host1:2222", address], "chief": "host3:2222"}
    known = listed | {"chief": ["host3:2222"]}
    assert tf_config.read(config(listed, kind, index)) == (known, kind, int(index))


def test_no_tf_config():
    assert cluster.check({}) == ok("not set: one host")


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        text = config({"worker": [f"127.0.0.1:{port}"]})
        finding = cluster.check({"TF_CONFIG": text})
        assert finding.verdict == "note"
        assert finding.text.startswith(
            f"1 task, this one is worker 0; the port {port} of this task cannot"
        )
    finding = cluster.check({"TF_CONFIG": text})
    assert finding.verdict == "ok"


def test_a_host_that_is_not_known(monkeypatch):
    def resolve(host, port):
        if host != "known":
            raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(cluster.socket, "getaddrinfo", resolve)
    text = config({"worker": ["known:1", "else:1"]}, "evaluator")
    finding = cluster.check({"TF_CONFIG": text})
    assert finding.verdict == "note"
    assert finding.text.endswith("; the host else is not known here; check its name")


# The host.


def test_a_data_dir_that_is_read_only(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder, "size=4m"):
        assert host.data_dir(str(folder)).verdict == "ok"
        remount = ["mount", "-o", "remount,ro", str(folder)]
        subprocess.run(remount, check=True)
        assert host.data_dir(str(folder)).verdict == "wrong"
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
        (folder / "record").touch()
        subprocess.run(remount, check=True)
        finding = host.data_dir(str(folder))
    assert finding.verdict == "note"
    assert finding.text.endswith(
        "(Read-only file system); the data sets in it can be read"
    )


def test_a_remote_model_dir():
    assert host.model_dir("gs://bucket/run").verdict == "note"
    assert host.data_dir("gs://bucket/data").verdict == "note"


@pytest.mark.parametrize(
    ("free_mb", "count", "verdict"),
    [(64, 2, "wrong"), (64, 1, "note"), (512, 2, "note"), (1024, 2, "ok")],
)
def test_shared_memory(monkeypatch, tmp_path, free_mb, count, verdict):
    usage = types.SimpleNamespace(free=free_mb << 20, total=2048 << 20)
    monkeypatch.setattr(host.shutil, "disk_usage", lambda folder: usage)
    assert host.shared_memory(count, str(tmp_path)).verdict == verdict
    assert host.shared_memory(count, str(tmp_path / "absent")).verdict == "note"


@pytest.mark.parametrize(("soft", "verdict"), [(64, "wrong"), (512, "note")])
def test_a_low_limit_of_open_files(soft, verdict):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        finding = host.open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert finding.verdict == verdict
    assert finding.figures == {"soft": soft, "hard": before[1]}
    assert finding.text.startswith(f"at most {soft} open files (hard limit ")


def test_a_low_hard_limit_of_open_files(monkeypatch):
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: (512, 2048))
    assert "have the hard limit raised (limits.conf, doc" in host.open_files().text


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


V1 = {
    "proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n",
    "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{3 << 30}\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{2 << 30}\n",
    "sys/fs/cgroup/memory/job/memory.stat": f"x 1\ntotal_inactive_file {1 << 28}\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{4 << 30}\n",
    "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
}
V2 = {
    "proc/self/cgroup": "0::/slice/job\n",
    "sys/fs/cgroup/slice/cpu.max": "50000 100000\n",
    "sys/fs/cgroup/slice/job/cpu.max": "max 100000\n",
    "sys/fs/cgroup/slice/job/memory.max": "max\n",
    "sys/fs/cgroup/slice/job/memory.current": "1\n",
    "sys/fs/cgroup/slice/memory.max": f"{3 << 30}\n",
    "sys/fs/cgroup/slice/memory.current": f"{2 << 30}\n",
    "sys/fs/cgroup/slice/memory.stat": f"anon 1\ninactive_file {1 << 28}\n",
}


@pytest.fixture
def free(monkeypatch):
    """Sets the machine's memory, in MB: free, all."""

    def have(free_mb, total_mb):
        there = types.SimpleNamespace(available=free_mb << 20, total=total_mb << 20)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: there)

    return have


@pytest.mark.parametrize("files", [V1, V2], ids=["v1", "v2"])
def test_the_limits_of_a_container(tmp_path, free, files):
    free(7 << 10, 8 << 10)
    root = write(tmp_path, files)
    finding = host.cores(root)
    assert finding.verdict == "note"
    assert finding.figures["quota"] == 0.5
    assert "so TensorFlow and the input get 1 thread each" in finding.text
    finding = host.memory(root=root)
    assert finding.verdict == "note"
    assert finding.figures == {"free_mb": 1024 + 256, "total_mb": 3072}


@pytest.mark.parametrize(
    ("free_mb", "verdict"), [(4000, "ok"), (1000, "note"), (500, "wrong")]
)
def test_memory(tmp_path, free, free_mb, verdict):
    free(free_mb, 8000)
    finding = host.memory(root=tmp_path)
    assert finding.verdict == verdict
    assert finding.figures == {"free_mb": free_mb, "total_mb": 8000}


@pytest.mark.parametrize(("gpus_mb", "verdict"), [(4000, "ok"), (4001, "note")])
def test_memory_of_twice_the_gpus(tmp_path, free, gpus_mb, verdict):
    free(4000, 8000)
    finding = host.memory(gpus_mb, tmp_path)
    assert finding.verdict == verdict
    assert ("twice the memory of its GPUs" in finding.text) == (verdict == "note")


def test_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert host.cores(tmp_path).verdict == "ok"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3})
    finding = host.cores(tmp_path)
    assert (finding.verdict, finding.text) == ("note", "2 of 8 may be used (taskset)")
