"""towers.devices, with made-up GPUs under TensorFlow's own rules for them."""

import functools
import os
import subprocess
import sys
import textwrap
import threading
import types

import pynvml
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tests import warm
from tests.made_up_nvml import NOT_SUPPORTED, Nvml, memory
from towers import devices
from towers.devices import listing
from towers.hosts import group
from towers.hosts.group import Membership
from towers.machine import limits, nvml
from towers.machine.limits import Processors
from towers.machine.nvml import Gpu
from towers.program import words

# Before tests replace it.
list_gpus = nvml.gpus.__wrapped__


def run_python(script: str) -> subprocess.CompletedProcess:
    """Runs a script in a process whose TensorFlow is not initialised yet."""
    return warm.run("tests.program", textwrap.dedent(script))


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    """Keeps this machine's CUDA variables and driver out of the tests."""
    for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "TF_GPU_THREAD_MODE"):
        # Set before deleted, so that what configure() sets is undone as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "")
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH")
    monkeypatch.setattr(nvml, "gpus", lambda: ())
    have_cpus(monkeypatch, 8)
    return monkeypatch


def have_cpus(monkeypatch, allowed, quota=None):
    """Gives this process so many CPUs, of which its container may use a part."""
    cpus = Processors(8, allowed, quota)
    monkeypatch.setattr(limits, "processors", lambda: cpus)


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that makes a TensorFlow context with made-up GPUs.

    It is TensorFlow's own Context, before it is initialised, so its rules hold,
    and what it would ask of the GPUs can be read from `_compute_gpu_options()`.
    """
    # Without a context of its own, TensorFlow crashes as it makes a tensor.
    tf.zeros([])

    def make(gpus: int) -> context.Context:
        made = context.Context()
        kinds = ["CPU"] + ["GPU"] * gpus
        found = [
            context.PhysicalDevice(f"/physical_device:{kind}:{max(i - 1, 0)}", kind)
            for i, kind in enumerate(kinds)
        ]
        made._physical_devices = found
        made._physical_device_to_index = {d: i for i, d in enumerate(found)}
        made._visible_device_list = list(found)
        made._pluggable_devices = []
        made._memory_growth_map = {d: None for d in found if d.device_type == "GPU"}
        monkeypatch.setattr(context, "context", lambda: made)
        return made

    return make


@pytest.fixture
def initialised(monkeypatch):
    """Returns a function that makes a made-up context refuse changes."""

    def freeze(made: context.Context) -> None:
        monkeypatch.setattr(made, "_context_handle", object())
        # These two would be passed on to the runtime, which is not there.
        monkeypatch.setattr(tf.config, "set_soft_device_placement", lambda on: None)
        monkeypatch.setattr(tf.debugging, "set_log_device_placement", lambda on: None)

    return freeze


def gpu_strings(*indices: int) -> tuple[str, ...]:
    return tuple(f"/device:GPU:{index}" for index in indices)


# configure, with GPUs


def test_default_is_all_gpus_with_growth(machine):
    made = machine(3)
    result = devices.configure()
    assert result.towers == gpu_strings(0, 1, 2)
    assert result.physical == (0, 1, 2)
    assert result.home == "/device:GPU:0"
    assert result.memory == "grows as needed"
    assert not result.note
    options = made._compute_gpu_options()
    assert options.allow_growth
    assert options.visible_device_list == "0,1,2"


def test_count_takes_the_first_gpus(machine):
    made = machine(3)
    assert devices.configure(2).towers == gpu_strings(0, 1)
    assert made._compute_gpu_options().visible_device_list == "0,1"


def test_count_keeps_hidden_gpus_hidden(machine):
    made = machine(3)
    tf.config.set_visible_devices(tf.config.list_physical_devices("GPU")[1:], "GPU")
    assert devices.configure().physical == (1, 2)
    assert devices.configure(1).physical == (1,)
    assert made._compute_gpu_options().visible_device_list == "1"


def test_indices_keep_the_users_order(machine):
    # TensorFlow numbers by physical GPU whatever the order of visible devices, so
    # the first tower, on GPU 2, is its second device.
    made = machine(4)
    result = devices.configure(gpu_indices=[2, 0])
    assert result.towers == gpu_strings(1, 0)
    assert result.physical == (2, 0)
    assert made._compute_gpu_options().visible_device_list == "0,2"


def test_more_are_set_up_for_later(machine):
    made = machine(4)
    result = devices.configure(1, max_gpus=3)
    assert (result.towers, result.others) == (gpu_strings(0), gpu_strings(1, 2))
    assert (result.physical, result.physical_others) == ((0,), (1, 2))
    assert made._compute_gpu_options().visible_device_list == "0,1,2"
    every = result.every
    assert (every.towers, every.physical) == (gpu_strings(0, 1, 2), (0, 1, 2))


def test_more_than_the_indices_that_are_asked_for(machine):
    machine(4)
    result = devices.configure(gpu_indices=[2, 0], max_gpus=3)
    assert (result.towers, result.others) == (gpu_strings(2, 0), gpu_strings(1))
    assert (result.physical, result.physical_others) == ((2, 0), (1,))


def test_more_parts_of_gpus_for_later(machine):
    machine(2)
    result = devices.configure(1, gpu_split=2, gpu_memory_limit_mb=9, max_gpus=2)
    assert (result.towers, result.others) == (gpu_strings(0, 1), gpu_strings(2, 3))
    assert result.physical_others == (1, 1)


def test_more_than_there_are(machine):
    machine(2)
    with pytest.raises(ValueError, match="max_gpus=3 was received, but TensorFlow see"):
        devices.configure(1, max_gpus=3)


@pytest.mark.parametrize("wish", [{"num_gpus": 2}, {"gpu_indices": [0, 1]}], ids=str)
def test_fewer_than_to_begin_with(wish):
    with pytest.raises(ValueError, match="max_gpus must be a whole number of at least"):
        devices.configure(**wish, max_gpus=1)


def test_growth_off(machine):
    made = machine(2)
    assert devices.configure(allow_growth=False).memory == "all of it"
    assert not made._compute_gpu_options().allow_growth


def test_growth_survives_logical_cpus(machine):
    # TensorFlow drops it from the options once the CPU is split.
    made = machine(1)
    cpu = tf.config.list_physical_devices("CPU")[0]
    part = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [part] * 2)
    devices.configure()
    assert not made._compute_gpu_options().allow_growth
    assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"


def test_limit(machine):
    made = machine(2)
    result = devices.configure(gpu_memory_limit_mb=4096)
    assert result.towers == gpu_strings(0, 1)
    assert result.memory == "at most 4096 MB"
    virtual = made._compute_gpu_options().experimental.virtual_devices
    assert [list(v.memory_limit_mb) for v in virtual] == [[4096], [4096]]


def test_a_fraction(machine, environ):
    made = machine(2)
    gpus = Gpu(0, "GPU-a", 1000), Gpu(1, "GPU-b", 4001)
    environ.setattr(nvml, "gpus", lambda: gpus)
    result = devices.configure(gpu_memory_fraction=0.5, gpu_split=2)
    assert result.memory == "at most 50% / 2"
    virtual = made._compute_gpu_options().experimental.virtual_devices
    assert [list(v.memory_limit_mb) for v in virtual] == [[250, 250], [1000, 1000]]


def test_a_fraction_of_what_is_unknown(machine):
    machine(1)
    with pytest.raises(ValueError, match=r"memory of GPU 0 is unknown, .* use gpu_mem"):
        devices.configure(gpu_memory_fraction=0.5)


def test_split(machine):
    made = machine(3)
    result = devices.configure(
        gpu_indices=[0, 2], gpu_split=2, gpu_memory_limit_mb=1000
    )
    assert result.towers == gpu_strings(0, 1, 2, 3)
    assert result.physical == (0, 0, 2, 2)
    virtual = made._compute_gpu_options().experimental.virtual_devices
    assert [list(v.memory_limit_mb) for v in virtual] == [[1000, 1000]] * 2


def test_split_in_the_users_order(machine):
    machine(3)
    result = devices.configure(
        gpu_indices=[2, 0], gpu_split=2, gpu_memory_limit_mb=1000
    )
    assert result.towers == gpu_strings(2, 3, 0, 1)


def test_home_on_the_first_tower(machine):
    machine(3)
    result = devices.configure(gpu_indices=[2, 0], local_parameter_device="gpu")
    assert result.home == result.towers[0] == "/device:GPU:1"


@pytest.mark.parametrize("on", [True, False])
def test_placement_flags(machine, on):
    made = machine(1)
    devices.configure(soft_placement=on, log_device_placement=on)
    assert made.soft_device_placement == on
    assert made.log_device_placement == on


@pytest.mark.parametrize(
    ("name", "default", "other"),
    [
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "FASTEST_FIRST"),
        ("TF_GPU_THREAD_MODE", "gpu_private", "global"),
    ],
)
def test_what_the_user_has_set_stays(machine, environ, name, default, other):
    machine(1)
    devices.configure()
    assert os.environ[name] == default
    environ.setenv(name, other)
    devices.configure()
    assert os.environ[name] == other


@pytest.mark.parametrize(
    ("gpus", "wish", "home", "said"),
    [
        (2, None, "/device:GPU:1", "the first tower's GPU, as towers are on GPUs"),
        (2, "gpu", "/device:GPU:1", "the first tower, as was asked for"),
        (2, "cpu", "/device:CPU:0", "the host, as was asked for"),
        (0, None, "/device:CPU:0", "the host, as no tower is on a GPU"),
        (0, "gpu", "/device:CPU:0", "the first tower, as was asked for"),
        (0, "cpu", "/device:CPU:0", "the host, as was asked for"),
    ],
)
def test_home(machine, monkeypatch, gpus, wish, home, said):
    machine(gpus)
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {})
    options = {"gpu_indices": [1, 0]} if gpus else {"num_gpus": 2}
    result = devices.configure(local_parameter_device=wish, **options)
    assert result.home == home
    assert f"\nVariables live on {home}, {said}.\n" in devices.table(result) + "\n"


# configure, too late


def test_late_is_accepted_where_it_fits(machine, initialised):
    made = machine(4)
    before = devices.configure()
    initialised(made)
    assert devices.configure() == before
    assert devices.configure(2).towers == gpu_strings(0, 1)
    # All four stay visible, so GPU 2 is still TensorFlow's third.
    assert devices.configure(gpu_indices=[2]).towers == gpu_strings(2)


@pytest.mark.parametrize(
    "wish",
    [
        {"gpu_indices": [0, 1]},
        {"num_gpus": 1, "allow_growth": False},
        {"num_gpus": 1, "gpu_memory_limit_mb": 100},
    ],
)
def test_late_is_refused_where_it_does_not(machine, initialised, wish):
    made = machine(2)
    devices.configure(1)
    initialised(made)
    with pytest.raises(
        RuntimeError, match=r"call towers\.configure\(\) before anything else"
    ):
        devices.configure(**wish)


def test_growth_on_a_gpu_somebody_limited(machine):
    machine(1)
    gpu = tf.config.list_physical_devices("GPU")[0]
    part = tf.config.LogicalDeviceConfiguration(memory_limit=100)
    tf.config.set_logical_device_configuration(gpu, [part])
    with pytest.raises(ValueError, match="GPU:0 was given logical devices"):
        devices.configure()


# configure, errors


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"num_gpus": 0}, "num_gpus must be .* at least 1, but 0 was received"),
        ({"num_gpus": True}, "num_gpus must be a whole number"),
        ({"num_gpus": "2"}, "num_gpus must be a whole number"),
        ({"num_gpus": 3}, "num_gpus=3 was received, .* sees 2 .* use at most 2"),
        ({"gpu_indices": [0, 2]}, "no GPU 2; TensorFlow finds 2, so choose from 0, 1"),
        ({"gpu_indices": [-1]}, "numbers from 0"),
        ({"gpu_indices": []}, "leave it out to use all"),
        ({"gpu_indices": "01"}, "gpu_indices must be a list"),
        ({"gpu_indices": [1, 1]}, "names 1 more than once"),
        ({"gpu_indices": [0], "num_gpus": 2}, "which has 1; leave one"),
        ({"gpu_memory_limit_mb": 0}, "gpu_memory_limit_mb must be .* at least 1"),
        ({"num_gpus": 10**6}, "which are 1,000,000 devices; use at most 256"),
        ({"gpu_split": 0}, "gpu_split must be .* at least 1"),
        ({"gpu_split": None}, "gpu_split must be .* at least 1"),
        ({"gpu_split": 2}, "add gpu_memory_limit_mb, at most 1/2"),
        ({"gpu_memory_fraction": 0}, "must be more than 0 and at most 1, but 0 was"),
        ({"gpu_memory_fraction": "x"}, "more than 0 and at most 1, but 'x' was"),
        (
            {"gpu_memory_fraction": 0.5, "gpu_memory_limit_mb": 9},
            "gpu_memory_fraction=0.5 was received with gpu_memory_limit_mb=9",
        ),
        (
            {"gpu_memory_fraction": 0.5, "allow_growth": True},
            "allow_growth=True was received with gpu_memory_fraction=0.5",
        ),
        (
            {"allow_growth": True, "gpu_memory_limit_mb": 9},
            "allow_growth=True was received with gpu_memory_limit_mb=9",
        ),
        ({"allow_growth": "yes"}, "allow_growth must be True, False or None"),
        ({"local_parameter_device": "tpu"}, '"cpu", "gpu" or None, but \'tpu\''),
    ],
)
def test_a_wrong_wish_touches_nothing(machine, wish, message):
    made = machine(2)
    visible, growth = made.get_visible_devices(), dict(made._memory_growth_map)
    with pytest.raises(ValueError, match=message):
        devices.configure(**wish)
    assert made.get_visible_devices() == visible
    assert made._memory_growth_map == growth
    assert not made._virtual_device_map


def test_more_memory_than_the_gpu_has(machine, environ):
    machine(1)
    environ.setattr(nvml, "gpus", lambda: (Gpu(0, "GPU-a", 1000),))
    devices.configure(gpu_split=2, gpu_memory_limit_mb=500)
    with pytest.raises(ValueError, match="GPU 0 has 1000 MB; use at most 500"):
        devices.configure(gpu_split=2, gpu_memory_limit_mb=501)


# configure, without GPUs


def test_one_cpu_tower_by_default(machine):
    made = machine(0)
    result = devices.configure()
    assert result.towers == ("/device:CPU:0",)
    assert result.physical == ()
    assert result.note == "TensorFlow sees no GPU, so the one tower runs on the CPU."
    assert not made._virtual_device_map


def test_logical_cpus_stand_in(machine):
    made = machine(0)
    result = devices.configure(2, gpu_split=2, gpu_memory_limit_mb=8)
    assert result.towers == tuple(f"/device:CPU:{i}" for i in range(4))
    assert result.home == "/device:CPU:0"
    assert "on 4 logical CPUs of this host" in result.note
    assert "gpu_memory_limit_mb has no effect" in result.note
    assert [len(parts) for parts in made._virtual_device_map.values()] == [4]


def test_more_logical_cpus_for_later(machine):
    machine(0)
    result = devices.configure(1, max_gpus=3)
    assert result.towers == ("/device:CPU:0",)
    assert result.others == ("/device:CPU:1", "/device:CPU:2")
    table = devices.table(result)
    assert "2 more devices are set up for later: /device:CPU:1" in table
    assert "so the one tower runs on the CPU" in result.note


def test_indices_without_a_gpu(machine):
    machine(0)
    with pytest.raises(ValueError, match=r"finds no GPU; use num_gpus=2"):
        devices.configure(gpu_indices=[0, 1])


def test_hidden_gpus_are_as_none(machine):
    machine(2)
    tf.config.set_visible_devices([], "GPU")
    assert devices.configure(2).towers == ("/device:CPU:0", "/device:CPU:1")


def test_in_a_process_of_its_own():
    result = run_python("""
        from towers import devices
        first = devices.configure(2, local_parameter_device="gpu")
        print(first.towers, first.home)
        import tensorflow as tf
        # configure must leave this possible, for the collectives between hosts.
        cpu = tf.config.list_physical_devices("CPU")[0]
        part = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [part] * 3)
        print(devices.resolve())
        print(devices.configure(2).towers)
        try:
            devices.configure(5)
        except RuntimeError as error:
            print(error)
    """)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "('/device:CPU:0', '/device:CPU:1') /device:CPU:0"
    assert lines[1] == "('/device:CPU:0', '/device:CPU:1', '/device:CPU:2')"
    assert lines[2] == "('/device:CPU:0', '/device:CPU:1')"
    assert "than 5 logical CPUs; restart the program (in a notebook, the" in lines[3]
    assert "kernel), and call towers.configure() before anything else" in lines[3]
    assert len(lines) == 4


# resolve


@pytest.fixture
def logical(monkeypatch):
    """Returns a function that sets the names of the logical devices."""

    def make(*names: str) -> None:
        made = [types.SimpleNamespace(name=name) for name in names]
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: made)

    return make


def test_resolve_means_gpus_where_there_are_any(logical):
    logical("/device:CPU:0", "/device:GPU:0", "/device:GPU:1", "/device:GPU:2")
    assert devices.resolve() == gpu_strings(0, 1, 2)
    assert devices.resolve(2) == gpu_strings(0, 1)
    assert devices.resolve([2, 0]) == gpu_strings(2, 0)
    assert devices.resolve((1, "cpu:0")) == ("/device:GPU:1", "/device:CPU:0")


def test_resolve_means_logical_cpus_otherwise(logical):
    logical("/device:CPU:0", "/device:CPU:1")
    assert devices.resolve() == ("/device:CPU:0", "/device:CPU:1")
    assert devices.resolve(1) == ("/device:CPU:0",)
    assert devices.resolve([1]) == ("/device:CPU:1",)


@pytest.mark.parametrize(
    "spelling",
    [
        "/gpu:1",
        "gpu:1",
        "GPU:1",
        "/GPU:1",
        "device:GPU:1",
        "/device:gpu:1",
        "/job:localhost/replica:0/task:0/device:GPU:1",
    ],
)
def test_resolve_understands_every_spelling(logical, spelling):
    logical("/device:CPU:0", "/device:GPU:0", "/device:GPU:1")
    assert devices.resolve([spelling]) == gpu_strings(1)


def test_resolve_in_a_cluster(logical):
    """Another host may have more."""
    own, other = (f"/job:localhost/replica:0/task:{k}/device" for k in range(2))
    logical(*(f"{host}:CPU:0" for host in (own, other)), f"{other}:CPU:1")
    assert devices.resolve() == ("/device:CPU:0",)
    logical(f"{own}:GPU:0", f"{other}:GPU:0", f"{other}:GPU:1")
    assert devices.resolve() == gpu_strings(0)


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (0, "gpus=0 was received, but a count must be from 1 to 2 here"),
        (3, "gpus=3 was received, .* /device:GPU:0, /device:GPU:1; make more"),
        (-1, "gpus=-1 was received"),
        (True, "gpus must be None, a count or a list"),
        (1.0, "gpus must be None, a count or a list"),
        ("gpu:0", "gpus must be None, a count or a list"),
        ([], "gpus must be None, a count or a list"),
        ([2], "gpus names 2, which does not exist here"),
        ([-1], "gpus names -1, which does not exist here"),
        (["gpu:2"], "gpus names 'gpu:2', which does not exist here"),
        (["tpu:0"], "'tpu:0' in gpus is neither an index nor a device string"),
        ([None], "None in gpus is neither an index nor a device string"),
        ([False], "False in gpus is neither an index nor a device string"),
        ([0, "/gpu:0"], "names /device:GPU:0 more than once"),
    ],
)
def test_resolve_errors(logical, gpus, message):
    logical("/device:CPU:0", "/device:GPU:0", "/device:GPU:1")
    with pytest.raises(ValueError, match=message):
        devices.resolve(gpus)


# The driver and the table

GPUS = Gpu(0, "GPU-aaa1", 40960), Gpu(1, "GPU-bbb2", 81920)


def answers(**others):
    """What NVML tells of `GPUS`."""
    return {
        "DeviceGetCount": len(GPUS),
        "DeviceGetHandleByIndex": GPUS.__getitem__,
        "DeviceGetUUID": lambda gpu: gpu.uuid,
        "DeviceGetMemoryInfo": lambda gpu, *_: memory(0, gpu.memory_mb),
        **others,
    }


def whole(monkeypatch, **others):
    """Returns the indices of GPUs that CUDA's numbers may be of."""
    monkeypatch.setattr(
        nvml, "Driver", functools.partial(nvml.Driver, Nvml(**answers(**others)))
    )
    return [gpu.index for gpu in list_gpus()]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({}, [0, 1]),
        ({"DeviceGetMigMode": [pynvml.NVML_DEVICE_MIG_DISABLE, 0]}, [0, 1]),
        ({"DeviceGetMigMode": lambda gpu: [gpu.index, 0]}, []),
        ({"Init": NOT_SUPPORTED}, []),
        ({"DeviceGetHandleByIndex": NOT_SUPPORTED}, []),
        ({"DeviceGetUUID": NOT_SUPPORTED}, []),
        ({"DeviceGetMemoryInfo": NOT_SUPPORTED}, []),
    ],
)
def test_the_driver_lists_gpus(monkeypatch, others, expected):
    assert whole(monkeypatch, **others) == expected


def test_a_driver_that_hangs_is_asked_once(monkeypatch, capsys):
    monkeypatch.setattr(nvml, "_hangs", threading.Event())
    monkeypatch.setattr(nvml, "_LIMIT_S", 0.01)
    goes_on = threading.Event()
    hangs = Nvml(DeviceGetCount=goes_on.wait)
    assert nvml.Driver(hangs).gpus() == ()
    assert nvml.Driver(Nvml()).gpus() == ()
    assert nvml.Driver(Nvml()).read("GPU-aaa1") == {}
    (said,) = capsys.readouterr().err.splitlines()
    assert "driver has not answered within 0.01 s" in said
    goes_on.set()


def test_without_nvidia_ml_py(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.Driver().gpus() == ()


@pytest.mark.parametrize(
    ("variables", "index", "expected"),
    [
        ({}, 1, 1),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, 0, 1),
        ({"CUDA_VISIBLE_DEVICES": " 1"}, 0, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bbb"}, 0, 1),
        ({"CUDA_VISIBLE_DEVICES": "MIG-bbb"}, 0, None),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1, None),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, 0, None),
    ],
)
def test_numbering(environ, variables, index, expected):
    environ.setattr(nvml, "gpus", lambda: GPUS)
    gpu = nvml.gpu(index, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **variables})
    assert (gpu.index if gpu else None) == expected


def test_numbers_of_another_order_are_said(environ):
    said = listing._numbering({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert "FASTEST_FIRST, so CUDA's numbers may differ from nvidia-smi's" in said


def test_a_machine_that_does_not_tell_its_cpu(environ):
    def unreadable(path):
        raise PermissionError

    environ.setattr(listing.Path, "read_text", unreadable)
    environ.setattr(listing.platform, "processor", lambda: "")
    environ.setattr(listing.platform, "machine", lambda: "riscv64")
    assert listing._cpu_model() == "riscv64"


def test_table_of_gpus(machine, environ):
    machine(2)
    environ.setattr(nvml, "gpus", lambda: GPUS)
    environ.setattr(
        tf.config.experimental,
        "get_device_details",
        lambda gpu: {"device_name": "NVIDIA H200", "compute_capability": (9, 0)},
    )
    environ.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    result = devices.configure(gpu_memory_limit_mb=4096)
    lines = devices.table(result, per_tower_batch=[33, 32]).splitlines()
    assert max(map(len, lines)) <= 100
    header, first, second, *rest = lines
    for key, value in {
        "device": "/device:GPU:0",
        "model": "NVIDIA H200 (cc 9.0)",
        "may use": "at most 4096 MB",
    }.items():
        assert header.index(key) == first.index(value) == second.index(value[:6])
    assert header.split()[2] == "smi"
    assert first.split()[:3] == ["0", "/device:GPU:0", "1"]
    assert second.split()[:3] == ["1", "/device:GPU:1", "0"]
    assert "81920 MB" in first
    assert "40960 MB" in second
    assert first.endswith(" 33")
    assert second.endswith(" 32")
    assert rest[0] == "Each step takes 65 examples: the sum of the local batches."
    assert rest[1] == (
        "Variables live on /device:GPU:0, the first tower's GPU, as towers are on GPUs."
    )
    assert "from 0 among CUDA_VISIBLE_DEVICES=1,0" in " ".join(" ".join(rest).split())


def test_table_fits_whatever_the_model(environ):
    environ.setattr(listing, "_cpu_model", lambda: "Prozessor\N{REGISTERED SIGN} " * 20)
    made = devices.Devices(
        ("/device:CPU:0",) * 12,
        "/device:CPU:0",
        local_parameter_device="gpu",
        note="word " * 50,
    )
    text = devices.table(made, per_tower_batch=[100_000] * 12)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 100
    assert (
        "\nVariables live on /device:CPU:0, the first tower, as was asked for.\n"
        in text
    )
    assert "\nNote: word word" in text
    assert text.count("100000") == 12


def test_table_fits_the_terminal_or_the_width_that_is_asked_for(environ):
    environ.setattr(listing, "_cpu_model", lambda: "Processor of some maker")
    environ.setattr(words, "line_width", lambda: 80)
    made = devices.Devices(("/device:CPU:0",), "/device:CPU:0", note="word " * 50)
    of_terminal, whole = devices.table(made, [9]), devices.table(made, [9], width=100)
    assert max(map(len, of_terminal.splitlines())) <= 80
    assert "maker" in whole and "maker" not in of_terminal


def test_table_of_all_hosts():
    made = devices.Devices(towers=("/device:CPU:0", "/device:CPU:1"), home="/CPU:0")
    first = devices.rows(made, [8, 7])
    # It has a GPU, of which more is known.
    second = [{**first[0], "smi": "3", "local batch": "17"}]
    hosts = {"host 0 (a, pid 1)": first, "host 1 (b, pid 2)": second}
    head, *lines = devices.table(made, [8, 7], hosts).splitlines()
    assert head.split()[:2] == ["tower", "host"] and "smi" in head
    assert [line.split()[:2] for line in lines[:3]] == [
        *(["0", "0"], ["1", "0"], ["2", "1"])
    ]
    assert lines[3] == "2 hosts: host 0 (a, pid 1), host 1 (b, pid 2)."
    assert lines[4].startswith("Each step takes 32 examples")


def test_table_wants_a_local_batch_for_each_tower():
    made = devices.Devices(("/device:CPU:0", "/device:CPU:1"), "/device:CPU:0")
    with pytest.raises(ValueError, match="has 1 size for 2 towers"):
        devices.table(made, per_tower_batch=[3])


# NCCL.


@pytest.mark.parametrize(
    ("wish", "fits"),
    [
        ({}, True),
        ({"num_gpus": 2}, True),
        ({"gpu_indices": [5, 1, 3]}, True),
        # Other hosts may have others.
        ({"num_gpus": 1}, True),
        ({"num_gpus": 2, "gpu_split": 2, "gpu_memory_limit_mb": 1024}, False),
        ({"num_gpus": 1, "gpu_split": 8, "gpu_memory_limit_mb": 1024}, False),
    ],
)
def test_nccl_needs_a_whole_gpu_for_each_tower(machine, logical, wish, fits):
    machine(8)
    towers = devices.configure(**wish).towers
    logical(*towers)
    assert devices.nccl_fits(towers) is fits


def test_nccl_does_not_fit_towers_of_two_kinds(machine, logical):
    machine(8)
    towers = devices.configure(2).towers
    logical(*towers)
    assert not devices.nccl_fits([towers[0], "/device:CPU:0"])


# Threads.


def _threads():
    """The threads that an operation may take; 0 is TensorFlow's word for all cores."""
    return tf.config.threading.get_intra_op_parallelism_threads()


def _inter_op_threads():
    return tf.config.threading.get_inter_op_parallelism_threads()


@pytest.mark.parametrize(
    ("towers", "cores", "expected"),
    [(2, 8, 4), (3, 8, 2), (4, 2, 1), (1, 8, 0)],
)
def test_towers_divide_the_cores(machine, monkeypatch, towers, cores, expected):
    machine(0)
    have_cpus(monkeypatch, cores)
    assert "Threads" not in devices.configure(towers).note
    assert (_threads(), _inter_op_threads()) == (expected, 0)


@pytest.mark.parametrize(
    ("towers", "quota", "threads"),
    [(1, 3.5, (4, 4)), (2, 3.5, (2, 4)), (4, 2, (1, 2)), (2, 0.5, (1, 1))],
)
def test_threads_follow_a_quota(machine, monkeypatch, towers, quota, threads):
    machine(0)
    have_cpus(monkeypatch, 6, quota)
    for _ in range(2):  # what is there already is ours
        note = devices.configure(towers).note
        said = f"Threads: {threads[1]}, as the container may use {quota:g} of 6 CPUs."
        assert note.endswith(said)
        assert (_threads(), _inter_op_threads()) == threads


def test_a_quota_counts_beside_gpus(machine, monkeypatch):
    machine(2)
    have_cpus(monkeypatch, 8, 2)
    assert devices.configure().note == (
        "Threads: 2, as the container may use 2 of 8 CPUs."
    )
    assert (_threads(), _inter_op_threads()) == (2, 2)


def test_threads_that_the_user_chose_stay_under_a_quota(machine, monkeypatch):
    machine(0)
    have_cpus(monkeypatch, 8, 2)
    tf.config.threading.set_inter_op_parallelism_threads(5)
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "6")
    note = devices.configure(2).note
    assert note.endswith(
        "Threads of the input: 2, as the container may use 2 of 8 CPUs."
    )
    assert (_threads(), _inter_op_threads()) == (0, 5)


def test_a_quota_of_a_tensorflow_that_has_begun(machine, initialised, monkeypatch):
    initialised(machine(0))
    have_cpus(monkeypatch, 8, 2)
    assert "Threads of the input: 2" in devices.configure(1).note


@pytest.mark.parametrize(
    ("towers", "addresses", "expected"),
    [
        (1, ("10.0.0.1:1", "10.0.0.2:1"), 0),
        (1, ("10.0.0.2:2", "10.0.0.1:1", "10.0.0.2:1"), 4),
        (2, ("127.0.0.1:1", "127.0.0.1:2"), 2),
    ],
)
def test_hosts_on_a_machine_divide_its_cores(
    machine, monkeypatch, towers, addresses, expected
):
    machine(0)
    joined = Membership(0, addresses, addresses)
    monkeypatch.setattr(group, "join_as_started", lambda hosts: joined)
    monkeypatch.setattr(group, "world", lambda: None)
    devices.configure(towers, hosts="auto")
    assert _threads() == expected


def test_gpus_leave_all_cores_to_the_pipeline(machine):
    machine(4)
    devices.configure()
    assert _threads() == 0


def test_the_users_threads_stay(machine):
    machine(0)
    tf.config.threading.set_intra_op_parallelism_threads(3)
    devices.configure(2)
    assert _threads() == 3


def test_the_users_variable_stays(machine, environ):
    machine(0)
    environ.setenv("TF_NUM_INTRAOP_THREADS", "3")
    devices.configure(2)
    assert _threads() == 0


def test_threads_in_a_process_of_its_own():
    done = run_python(
        """
        import os
        os.sched_getaffinity = lambda pid: range(6)
        import tensorflow as tf
        from towers import devices
        devices.configure(2)
        print(len(tf.config.list_logical_devices("CPU")))
        print(tf.config.threading.get_intra_op_parallelism_threads())
        """
    )
    assert done.stdout.split() == ["2", "3"], done.stderr
