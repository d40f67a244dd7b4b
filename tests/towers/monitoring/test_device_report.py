"""The device report, with made-up GPUs and drivers, and this real process."""

import functools
import operator
import re
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from tests.small import tiny
from towers import devices, multi_gpu_model
from towers.machine import limits
from towers.machine.nvml import Driver, Gpu
from towers.monitoring import device_report as report
from towers.monitoring.device_report import DeviceReport

ON_CPU = devices.Devices(("/device:CPU:0", "/device:CPU:1"), "/device:CPU:0")
# In an order of their own: the first tower is on nvidia-smi's GPU 3.
ON_GPUS = devices.Devices(
    ("/device:GPU:1", "/device:GPU:0"), "/device:CPU:0", physical=(1, 0)
)
CARDS = {
    0: Gpu(2, "GPU-two", 40960),
    1: Gpu(3, "GPU-three", 81920),
}


class Nvml:
    """What nvidia-ml-py gives of two GPUs; refuses what is in `refused`."""

    NVML_TEMPERATURE_GPU, nvmlMemory_v2 = 0, 2

    class NVMLError(Exception):
        pass

    def __init__(self, refused=()):
        self.refused = refused
        self.busy = {"GPU-two": 25, "GPU-three": 80}
        self.begun = False

    def check(self, name):
        if name in self.refused:
            raise self.NVMLError("Not Supported")
        assert self.begun or name == "init"

    def nvmlInit(self):
        self.check("init")
        self.begun = True

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.check("handle")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, gpu, version):
        self.check("memory")
        assert version == self.nvmlMemory_v2
        return types.SimpleNamespace(used={"GPU-two": 2, "GPU-three": 3}[gpu] * 2**30)

    def nvmlDeviceGetUtilizationRates(self, gpu):
        self.check("utilization")
        return types.SimpleNamespace(gpu=self.busy[gpu], memory=1)

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        self.check("temperature")
        return {"GPU-two": 50, "GPU-three": 60}[gpu]

    def nvmlDeviceGetPowerUsage(self, gpu):
        self.check("power")
        return {"GPU-two": 100_500, "GPU-three": 300_000}[gpu]


@pytest.fixture
def cards(monkeypatch):
    """Makes TensorFlow and nvidia-smi tell of two GPUs."""
    infos = {
        "GPU:0": {"current": 10 * 2**20, "peak": 30 * 2**20},
        "GPU:1": {"current": 2**30, "peak": 2 * 2**30},
    }
    limits = {"/device:CPU:0": 256.0, "/device:GPU:0": 4096.0, "/device:GPU:1": 70e3}
    monkeypatch.setattr(
        tf.config.experimental, "get_memory_info", lambda device: infos[device]
    )
    monkeypatch.setattr(report, "_limits_mb", lambda: limits)
    monkeypatch.setattr(report.nvml, "gpu", lambda index: CARDS.get(index))


def of(values, device):
    """The values of one device, by the end of the tag."""
    found = {tag.rpartition("/"): value for tag, value in values.items()}
    return {name: v for (start, _, name), v in found.items() if start == device}


def columns(text):
    """The cells of a table, by heading, of each row; it may be in several parts."""
    # Only headings begin with a space: there is none for the names of rows.
    lines = text.splitlines()
    heads = [k for k, line in enumerate(lines) if line[0] == " "]
    parts = [_cells(lines[a:b]) for a, b in zip(heads, [*heads[1:], None], strict=True)]
    return [functools.reduce(operator.or_, rows) for rows in zip(*parts, strict=True)]


def _cells(lines):
    head, *rows = lines
    # Numbers are aligned to the right: a column ends where its heading does.
    ends = [match.end() for match in re.finditer(r"\S+( \S+)*", head)]
    return [
        {
            head[a:b].strip(): row[a:b].strip()
            for a, b in zip([first, *ends], ends, strict=False)
        }
        | {"": row[:first].strip()}
        for row in rows
        if (first := len(re.match(r".*?(?=  |$)", row)[0]))
    ]


class TestGpus:
    def test_each_tower_has_the_numbers_of_its_gpu(self, cards, capsys):
        values = DeviceReport(ON_GPUS, Driver(Nvml())).measured()
        assert of(values, "device/gpu:0") == {
            "memory_mb": 10,
            "peak_memory_mb": 30,
            "limit_mb": 4096,
            "used_mb": 2048,
            "utilization": 0.25,
            "temperature_c": 50,
            "power_w": 100.5,
        }
        assert of(values, "device/gpu:1") == {
            "memory_mb": 1024,
            "peak_memory_mb": 2048,
            "limit_mb": 70e3,
            "used_mb": 3072,
            "utilization": 0.8,
            "temperature_c": 60,
            "power_w": 300,
        }
        assert capsys.readouterr().err == ""

    def test_the_table_has_nvidia_smis_number_and_the_mean_of_what_was_measured(
        self, cards
    ):
        nvml = Nvml()
        device_report = DeviceReport(ON_GPUS, Driver(nvml))
        for busy in (80, 60, 40):
            nvml.busy["GPU-three"] = busy
            device_report.measured()
        nvml.busy["GPU-three"] = 0  # the run is over
        first, second, process = columns(device_report.text())
        assert first == {
            "": "/device:GPU:1, nvidia-smi's 3",
            "memory": "1,024 MB",
            "peak": "2,048 MB",
            "limit": "70,000 MB",
            "whole GPU": "3,072 MB",
            "busy": "60%",
            "hottest": "60 C",
            "power": "300 W",
            "load": "",
        }
        assert all(len(line) <= 98 for line in device_report.text().splitlines())
        assert second[""] == "/device:GPU:0, nvidia-smi's 2"
        assert second["busy"] == "25%"
        assert process["limit"] == process["power"] == ""
        assert process["load"]

    def test_before_anything_was_measured_the_table_shows_what_is(self, cards):
        first, *_ = columns(DeviceReport(ON_GPUS, Driver(Nvml())).text())
        assert first["busy"] == "80%"

    @pytest.mark.parametrize(
        ("refused", "missing"),
        [
            ("memory", "used_mb"),
            ("utilization", "utilization"),
            ("temperature", "temperature_c"),
            ("power", "power_w"),
        ],
    )
    def test_what_the_driver_refuses_is_left_out_and_said_once(
        self, cards, capsys, refused, missing
    ):
        device_report = DeviceReport(ON_GPUS, Driver(Nvml([refused])))
        device_report.on_train_begin()
        for values in (device_report.measured(), device_report.measured()):
            assert missing not in of(values, "device/gpu:0")
            assert len(of(values, "device/gpu:0")) == 6
        assert capsys.readouterr().err == (
            f"towers: NVIDIA's driver does not tell {missing} (Not Supported); they "
            "are left out.\n"
        )

    @pytest.mark.parametrize(
        ("refused", "why"),
        [
            (
                "init",
                "NVIDIA's driver says Not Supported; start the machine anew",
            ),
            ("handle", "Not Supported"),
        ],
    )
    def test_without_a_driver_what_tensorflow_knows_is_left(
        self, cards, capsys, refused, why
    ):
        device_report = DeviceReport(ON_GPUS, Driver(Nvml([refused])))
        values = device_report.measured()
        kept = {"memory_mb": 10, "peak_memory_mb": 30, "limit_mb": 4096}
        assert of(values, "device/gpu:0") == kept
        assert capsys.readouterr().err == (
            "towers: NVIDIA's driver does not tell used_mb, utilization, "
            f"temperature_c, power_w ({why}); they are left out.\n"
        )
        first, *_ = columns(device_report.text())
        assert first["memory"] == "1,024 MB"
        assert "hottest" not in first

    def test_without_nvidia_ml_py(self, cards, capsys, monkeypatch):
        monkeypatch.setitem(sys.modules, "pynvml", None)
        DeviceReport(ON_GPUS).measured()
        said = capsys.readouterr().err
        assert "(nvidia-ml-py is not installed; pip install nvidia-ml-py)" in said

    def test_a_gpu_that_nvidia_smi_does_not_name(self, cards, capsys, monkeypatch):
        monkeypatch.setattr(report.nvml, "gpu", lambda index: None)  # as with MIG
        device_report = DeviceReport(ON_GPUS, Driver(Nvml()))
        assert "used_mb" not in of(device_report.measured(), "device/gpu:0")
        assert "nvidia-smi's number of the GPU is unknown" in capsys.readouterr().err
        assert "/device:GPU:1, nvidia-smi's ?" in device_report.text()

    def test_a_machine_without_driver(self):
        """The real nvidia-ml-py, where the real driver is absent, or answers."""
        driver = Driver()
        values = driver.read("GPU-no-such-gpu")
        assert values == {}
        assert set(driver.faults) == {
            "used_mb",
            "utilization",
            "temperature_c",
            "power_w",
        }


class TestProcess:
    def test_without_a_gpu_no_driver_is_asked(self, monkeypatch, capsys):
        monkeypatch.setattr(report, "Driver", None)
        values = DeviceReport(ON_CPU).measured()
        assert set(values) == {
            "device/cpu:0/rss_mb",
            "device/cpu:0/peak_rss_mb",
            "device/cpu:0/utilization",
            "device/cpu:0/load",
        }
        assert capsys.readouterr().err == ""

    def test_memory_grows_with_what_is_held_and_the_peak_stays(self):
        device_report = DeviceReport(ON_CPU)

        def memory():
            values = of(device_report.measured(), "device/cpu:0")
            return values["rss_mb"], values["peak_rss_mb"]

        before, _ = memory()
        # More than the process ever had, whatever tests ran before.
        held = np.ones(int(memory()[1] - before + 200) * 2**17)
        held_mb = held.nbytes / 2**20
        with_it, peak = memory()
        assert with_it - before == pytest.approx(held_mb, abs=50)
        del held
        after, still = memory()
        assert with_it - after == pytest.approx(held_mb, abs=50)
        # The kernel counts memory in portions.
        assert min(peak, still) >= with_it - 5

    def test_utilization_is_that_since_the_last_call(self, monkeypatch):
        cpus = limits.Processors(there=8, allowed=8, quota=4)
        monkeypatch.setattr(limits, "processors", lambda: cpus)
        now = types.SimpleNamespace(s=0.0, cpu_s=100.0)
        device_report = DeviceReport(
            ON_CPU, clock=lambda: now.s, cpu_clock=lambda: now.cpu_s
        )

        def passes(seconds, computed):
            now.s += seconds
            now.cpu_s += computed
            return device_report.measured()["device/cpu:0/utilization"]

        device_report.on_train_begin()
        assert passes(10, computed=20) == 0.5
        assert passes(10, computed=40) == 1.0
        assert passes(2, computed=0) == 0.0
        # Clocks differ a little.
        assert passes(1, computed=4.01) == 1.0
        (process,) = columns(device_report.text())
        assert process["busy"] == "62%"
        assert process[""] == "this process, 4 cores"

    def test_the_table_leaves_out_what_only_gpus_have(self):
        device_report = DeviceReport(ON_CPU)
        (process,) = columns(device_report.text())
        assert list(process) == ["memory", "peak", "busy", "load", ""]
        assert re.fullmatch(r"this process, \d+ cores", process[""])
        assert re.fullmatch(r"[\d,]+ MB", process["memory"])

    def test_in_fit(self):
        x, y = np.zeros((16, 4, 4, 1), "float32"), np.zeros(16, "int32")
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        device_report = DeviceReport(ON_CPU)
        parallel = multi_gpu_model(tiny(), gpus=2)
        parallel.fit(data, verbose=0, callbacks=[device_report])
        values = of(device_report.measured(), "device/cpu:0")
        assert 0 < values["utilization"] <= 1


def test_limits_are_tensorflows():
    # TensorFlow's constant for any CPU; here only that devices are told apart.
    assert report._limits_mb() == {f"/device:CPU:{i}": 256.0 for i in range(4)}
