"""GPUs that nobody uses, with a driver that is made up."""

import contextlib
import multiprocessing
import os

import pynvml
import pytest
import tensorflow as tf

from tests.limits import HANG_S
from tests.made_up_nvml import Nvml, held, memory
from towers.devices import free
from towers.find_batch_size import search_flags
from towers.hosts.group import Membership
from towers.machine import nvml
from towers.machine.nvml import Gpu, Holder
from towers.parity import check_flags
from towers.program import voice
from towers.scaling import scaling_flags
from towers.train.parts import devices as parts_devices
from towers.train.settings import Settings

ME = os.getpid()


def held_by(used_mb, *pids):
    """A GPU that is held by processes, and what else is taken of it."""
    holders = tuple(Holder(pid, 0) for pid in pids)
    return Gpu(0, "GPU-0", 1000, used_mb, holders=holders)


FREE, TAKEN = held_by(4), held_by(0, ME)
# As of a container's processes, which are not seen outside.
HIDDEN = held_by(500)


class Driver:
    refuses = None

    def __init__(self, *gpus):
        self._gpus = gpus

    def gpus(self):
        return tuple(
            gpu._replace(index=k, uuid=f"GPU-{k}") for k, gpu in enumerate(self._gpus)
        )


@pytest.fixture
def gpus(monkeypatch):
    """Has TensorFlow find so many GPUs, which nvidia-smi numbers from the end."""

    def found(count):
        monkeypatch.setattr(
            tf.config, "list_physical_devices", lambda kind=None: ["gpu"] * count
        )
        cards = [Gpu(count - 1 - k, f"GPU-{k}", 1000) for k in range(count)]
        monkeypatch.setattr(nvml, "gpu", lambda index: cards[index])

    return found


@pytest.mark.parametrize(
    ("count", "uses", "expected"),
    [
        (None, [FREE, FREE], [0, 1]),
        (1, [FREE, FREE], [0]),
        (None, [TAKEN, FREE, HIDDEN, FREE], [1, 3]),
        (2, [TAKEN, FREE, HIDDEN, FREE], [1, 3]),
        (1, [HIDDEN, FREE], [1]),
        (None, [held_by(99), held_by(100)], [0]),
    ],
)
def test_free_gpus(gpus, count, uses, expected):
    gpus(len(uses))
    assert free.choose(count, Driver(*uses)) == expected


def test_what_is_said(gpus, capsys):
    gpus(3)
    free.choose(None, Driver(TAKEN, FREE, HIDDEN))
    said = capsys.readouterr().err
    assert "towers: Of 3 GPUs, the run takes 1; GPU 2 is held by process " in said
    assert f"process {ME} of " in said
    assert "GPU 0 is held by processes that cannot be seen from here." in said


@pytest.mark.parametrize(
    ("count", "uses", "said"),
    [
        (None, [TAKEN, HIDDEN], "for a GPU, but none of 2 is free; .* GPU 1 is held"),
        (2, [FREE, TAKEN], "for 2 GPUs, but 1 of 2 is free; .* GPU 0 is held by"),
        (3, [FREE, FREE], "for 3 GPUs, but 2 of 2 are free"),
        (None, [FREE, held_by(None)], "does not tell who uses GPU 1; expected numbers"),
        (None, [], "TensorFlow finds no GPU; expected --num_gpus"),
    ],
)
def test_too_few(gpus, count, uses, said):
    gpus(len(uses))
    with pytest.raises(ValueError, match=f"Received --gpu_indices=free.*{said}"):
        free.choose(count, Driver(*uses))


def test_a_gpu_without_a_number(gpus, monkeypatch):
    gpus(1)
    monkeypatch.setattr(nvml, "gpu", lambda index: None)
    with pytest.raises(ValueError, match="does not tell who uses GPU 0"):
        free.choose(None, Driver(FREE))


def test_a_machine_with_slices(gpus, monkeypatch):
    gpus(1)
    monkeypatch.setattr(nvml, "gpu", lambda index: None)
    driver = nvml.Driver(Nvml(DeviceGetMigMode=[1, 1]))
    with pytest.raises(ValueError, match=r"cut up into slices \(MIG.* expected none"):
        free.choose(None, driver)


def test_a_driver_that_refuses(gpus, monkeypatch):
    gpus(1)
    lost = pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    with pytest.raises(
        ValueError, match=r"who uses GPU 0 \(.* Driver Not Loaded; .*\); exp"
    ):
        free.choose(None, nvml.Driver(Nvml(Init=lost)))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"DeviceGetMemoryInfo": memory(4, 1000)}, ([], 4)),
        (
            {
                "DeviceGetMemoryInfo": memory(304, 1000),
                "DeviceGetGraphicsRunningProcesses": [held(7, 200), held(8, 100)],
            },
            ([], 4),
        ),
        (
            {
                "DeviceGetMemoryInfo": memory(600, 1000),
                "DeviceGetComputeRunningProcesses": [held(7, 200)],
                "DeviceGetMPSComputeRunningProcesses": [held(8, 100)],
            },
            ([7, 8], 300),
        ),
        (
            {
                "DeviceGetMemoryInfo": memory(600, 1000),
                "DeviceGetComputeRunningProcesses": [held(7, None)],
            },
            ([7], 0),
        ),
        ({}, ([], 0)),
    ],
)
def test_who_holds_a_gpu(answers, expected):
    (gpu,) = nvml.Driver(Nvml(**answers)).gpus()
    computing = [holder.pid for holder in gpu.holders if holder.computes]
    assert (computing, gpu.unseen_mb) == expected


def test_what_the_driver_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        nvml._ask(lambda: 1 // 0, unknown=None)


def test_who_keeps_others_waiting_is_named(tmp_path, monkeypatch):
    def waited_for(path, seconds, message):
        raise TimeoutError("process 7 holds it")

    monkeypatch.setenv("TOWERS_REGISTRY", str(tmp_path))
    monkeypatch.setattr(free.locks, "waited_for", waited_for)
    said = "gpu_indices=free, but process 7 holds it; end that process, or expect numb"
    with pytest.raises(ValueError, match=said), free.one_at_a_time():
        pass


def _choose(begun, go_on):
    with free.one_at_a_time():
        begun.set()
        go_on.wait(HANG_S)


def test_programs_choose_one_after_another(tmp_path):
    # A folder that is not there yet.
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TOWERS_REGISTRY", str(tmp_path / "new"))
        context = multiprocessing.get_context("fork")
        first, second, waits, go_on = (context.Event() for _ in range(4))

        def say(line):
            assert "Waiting until another program has taken" in line
            waits.set()

        # The processes have it, too.
        patched.setattr(voice, "say", say)
        one = context.Process(target=_choose, args=(first, go_on))
        one.start()
        assert first.wait(HANG_S) and not waits.is_set()
        other = context.Process(target=_choose, args=(second, go_on))
        other.start()
        assert waits.wait(HANG_S) and not second.is_set()
        go_on.set()
        assert second.wait(HANG_S)
        one.join()
        other.join()


def test_a_run_takes_them(monkeypatch, tmp_path):
    monkeypatch.setenv("TOWERS_REGISTRY", str(tmp_path))
    asked, found = [], []

    def choose(count):
        asked.append(count)
        return [3, 1]

    def configure(count, gpu_indices, **others):
        found.append((count, gpu_indices))

    monkeypatch.setattr(free, "choose", choose)
    monkeypatch.setattr(parts_devices, "configure", configure)
    monkeypatch.setattr(parts_devices, "_say_doubts", lambda settings, devices: None)
    for more in ({}, {"num_gpus": 2}, {"num_gpus": 1, "max_gpus": 2}):
        parts_devices.configure_devices(Settings(gpu_indices=("free",), **more))
    assert asked == [None, 2, 2]
    assert found == [(None, [3, 1]), (None, [3, 1]), (1, [3])]


def test_hosts_meet_before_they_choose(monkeypatch, tmp_path):
    monkeypatch.setenv("TOWERS_REGISTRY", str(tmp_path))
    events = []

    @contextlib.contextmanager
    def one_at_a_time():
        events.append("lock")
        yield
        events.append("unlock")

    def join(hosts):
        events.append(hosts)
        return Membership(0, addresses, ("host 0", "host 1"))

    monkeypatch.setattr(free, "one_at_a_time", one_at_a_time)
    monkeypatch.setattr(parts_devices.group, "join_as_started", join)
    monkeypatch.setattr(parts_devices, "_configure", lambda settings: "devices")
    monkeypatch.setattr(
        parts_devices, "_say_doubts", lambda settings, devices: events.append(devices)
    )
    addresses = "10.0.0.1:1", "10.0.0.2:1"
    parts_devices.configure_devices(Settings(gpu_indices=("free",)))
    # Here TensorFlow finds no GPU, and why is said before that is an error.
    assert events == ["auto", None, "lock", "unlock", "devices"]
    events.clear()
    # One would hold the lock, and wait for the other one that waits for the lock.
    addresses = "10.0.0.1:1", "10.0.0.1:2"
    with pytest.raises(ValueError, match="free for 2 hosts on this machine, which"):
        parts_devices.configure_devices(Settings(gpu_indices=("free",)))
    assert events == ["auto"]


def test_a_program_whose_processes_use_them(monkeypatch, tmp_path):
    monkeypatch.setenv("TOWERS_REGISTRY", str(tmp_path))
    monkeypatch.setattr(free, "choose", lambda count: [3, 1, 0][:count])
    every = parts_devices.with_free_gpus(Settings(gpu_indices=("free",)))
    assert (every.gpu_indices, every.num_gpus) == (("3", "1", "0"), None)
    two = parts_devices.with_free_gpus(Settings(gpu_indices=("free",), num_gpus=2))
    assert (two.gpu_indices, two.num_gpus) == (("3", "1"), None)
    fixed = Settings(gpu_indices=("2",))
    assert parts_devices.with_free_gpus(fixed) is fixed


def test_flags_say_free_and_not_which():
    settings = Settings(gpu_indices=("free",), num_gpus=2, model="mlp")
    assert "--gpu_indices=free" in settings.as_text().splitlines()


@pytest.mark.parametrize(
    "read", [check_flags.read, search_flags.read, scaling_flags.read]
)
def test_other_programs_take_free_gpus(read):
    found = read(["program", "--model=mlp", "--gpu_indices=free"], "What it is for.")
    assert found.finds_free
