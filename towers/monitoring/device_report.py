"""Measures memory and load of each tower's GPU and of the host's process."""

import collections
import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import psutil
import tensorflow as tf

from towers.devices.configuration import Devices
from towers.keras_adapter.runtime import device_memory_limits
from towers.loop import listeners
from towers.machine import limits, nvml
from towers.machine.nvml import Driver
from towers.model.fit_call import FitCall
from towers.monitoring.bottleneck.sampling import CpuLoad, Sample, Sampler
from towers.program import words
from towers.program.voice import say

_MB = 2**20
_CPU = "device/cpu:0"


@listeners.changes_no_variable
class DeviceReport(keras.callbacks.Callback):
    """Measures the devices, whenever `measured` is called.

    TensorFlow tells how much memory this process has allocated on a GPU. NVIDIA's
    driver tells what all processes do there. If the driver does not answer, its values
    are left out, and one line on stderr says so.

    How busy devices are changes from moment to moment. A thread samples it several
    times a second from the end of the first step on, as that one builds the graphs.
    Validation and saving count.
    """

    def __init__(
        self,
        devices: Devices,
        driver: Driver | None = None,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ):
        """Initializes the callback. It touches no device yet.

        Args:
            devices: The devices that `towers.configure` returned.
            driver: Reads values of whole GPUs. By default from NVIDIA's driver.
            clock: Returns seconds.
            cpu_clock: Returns the seconds that all threads have computed.
        """
        super().__init__()
        # Without a GPU, there is nothing to ask a driver.
        self._driver = driver or (Driver() if devices.physical else None)
        self._gpus = dict(zip(devices.towers, devices.physical, strict=False))
        self._clock = clock
        self._load, self._sampled_load = (CpuLoad(clock, cpu_clock) for _ in range(2))
        self._sampler = Sampler(self._sample)
        self._timers = None
        self._told = False
        self._sums, self._most = collections.Counter(), {}
        self._counts = collections.Counter()

    def on_train_begin(self, logs=None):
        """Begins to count the CPU's time, and says what cannot be measured."""
        self._read()
        self._load.begin()

    def on_train_batch_end(self, batch, logs=None):
        """Begins to sample how busy the devices are."""
        # Other towers have others.
        builder = getattr(self.model, "builder", None)
        self._timers = getattr(builder, "timers", None)
        if not self._sampler.started:
            self._sampled_load.begin()
            self._sampler.start()

    def on_train_end(self, logs=None):
        """Ends sampling."""
        self._sampler.stop()

    @contextlib.contextmanager
    def around_fit(self, call: FitCall) -> Iterator[None]:
        """Ends sampling, whatever ends `fit`."""
        try:
            yield
        finally:
            self._sampler.stop()
            self._timers = None

    def measured(self) -> dict[str, float]:
        """Measures the devices, for TensorBoard.

        Returns:
            Values by tag. For each tower's GPU, of this process:
            `device/gpu:0/memory_mb`, `peak_memory_mb` and `limit_mb`. Of all processes
            on the GPU: `used_mb`, `utilization` (0 to 1), `temperature_c` and
            `power_w`. For this process on the host: `device/cpu:0/rss_mb`,
            `peak_rss_mb`, and `utilization` of the CPUs that it may use since the last
            call (0 to 1). For the host: the `load` of the last minute. Of the samples
            since the last call, for each GPU and the host's process:
            `utilization_min`, `utilization_p10` (the 10th percentile) and
            `utilization_median`; then a GPU's `utilization` is their mean.
        """
        values = self._read()
        self._load.begin()
        values |= self._sampled(values)
        for tag, value in values.items():
            self._sums[tag] += value
            self._counts[tag] += 1
            self._most[tag] = max(value, self._most.get(tag, value))
        return values

    def utilization(self) -> dict[str, dict[str, float]]:
        """Returns how busy devices were in all samples of the run.

        Returns:
            `min`, `p10` and `median`, 0 to 1, of devices such as "gpu:0" and "cpu:0".
        """
        found = self._sampler.of_all()
        return {tag.removeprefix("device/"): each for tag, each in found.items()}

    def timeline(self) -> dict[str, np.ndarray]:
        """Returns how busy devices were lately, beside steps; see `Sampler.rows`."""
        rows = self._sampler.rows()
        return {name.removeprefix("device/"): row for name, row in rows.items()}

    def text(self) -> str:
        """Returns a table of the devices.

        Returns:
            Lines without a final newline: one for each GPU, and one for this process.
            Memory and load are current. The memory that others use on a GPU and its
            temperature are maxima. Of how busy it was, there are the mean, and of all
            samples the median, the 10th percentile and the least. All other values are
            means.
        """
        now = self._read()
        seen = {
            "now": now,
            "most": now | self._most,
            "mean": now | {tag: self._sums[tag] / n for tag, n in self._counts.items()},
            "samples": _by_tag(self._sampler.of_all()),
        }
        rows = [
            [
                name,
                *(column.cell(seen[column.which], tag) for column in _COLUMNS),
            ]
            for name, tag in [
                *((self._name(tower), _tag(tower)) for tower in self._gpus),
                (f"this process, {words.count(limits.cpu_count(), 'core')}", _CPU),
            ]
        ]
        return _aligned([["", *(column.head for column in _COLUMNS)], *rows])

    def _name(self, tower):
        smi = nvml.gpu(self._gpus[tower])
        return f"{tower}, nvidia-smi's {smi.index if smi else '?'}"

    def _read(self):
        values = {}
        for tower, index in self._gpus.items():
            smi = nvml.gpu(index)
            for name, value in {
                **_allocated(tower),
                "limit_mb": _limits_mb()[tower],
                **self._driver.read(smi and smi.uuid),
            }.items():
                values[f"{_tag(tower)}/{name}"] = value
        for name, value in self._read_process().items():
            values[f"{_CPU}/{name}"] = value
        self._say_faults()
        return values

    def _sample(self):
        busy = {}
        for tower, index in self._gpus.items():
            smi = nvml.gpu(index)
            found = self._driver.read(smi and smi.uuid)
            if "utilization" in found:
                busy[_tag(tower)] = found["utilization"]
        if (load := self._sampled_load.since()) is not None:
            busy[_CPU] = load
        self._sampled_load.begin()
        totals = self._timers and self._timers.totals()
        if totals is None:
            return Sample(self._clock(), busy)
        return Sample(self._clock(), busy, totals.steps, totals.input_s)

    def _sampled(self, values):
        found = self._sampler.since_last_call()
        for tag, each in found.items():
            mean = each.pop("mean")
            if tag != _CPU and f"{tag}/utilization" in values:
                values[f"{tag}/utilization"] = mean
        return _by_tag(found)

    def _read_process(self):
        rss_mb = psutil.Process().memory_info().rss / _MB
        values = {
            "rss_mb": rss_mb,
            "peak_rss_mb": max(rss_mb, _peak_rss_mb()),
            "load": os.getloadavg()[0],
        }
        if (busy := self._load.since()) is not None:
            values["utilization"] = busy
        return values

    def _say_faults(self):
        if fault := self._sampler.fault:
            self._sampler.fault = None
            say(f"How busy devices are is no longer sampled: {fault!r}.")
        if self._told or self._driver is None or not self._driver.faults:
            return
        self._told = True
        by_reason = collections.defaultdict(list)
        for name, reason in self._driver.faults.items():
            by_reason[reason].append(name)
        parts = [f"{', '.join(names)} ({why})" for why, names in by_reason.items()]
        say(f"NVIDIA's driver does not tell {' and '.join(parts)}; they are left out.")


class _Column(NamedTuple):
    """A column of the table.

    Attributes:
        head: Its heading.
        names: What it shows: the one of these that a device has.
        which: The value of "now", the "most", the "mean", or that of all "samples".
        form: How to write it.
    """

    head: str
    names: tuple[str, ...]
    which: str
    form: str

    def cell(self, values: Mapping[str, float], tag: str) -> str:
        """Returns a device's cell; empty if there is no value."""
        found = [f"{tag}/{name}" for name in self.names if f"{tag}/{name}" in values]
        return self.form.format(values[found[0]]) if found else ""


_COLUMNS = (
    _Column("memory", ("memory_mb", "rss_mb"), "now", "{:,.0f} MB"),
    _Column("peak", ("peak_memory_mb", "peak_rss_mb"), "now", "{:,.0f} MB"),
    _Column("limit", ("limit_mb",), "now", "{:,.0f} MB"),
    _Column("whole GPU", ("used_mb",), "most", "{:,.0f} MB"),
    _Column("busy", ("utilization",), "mean", "{:.0%}"),
    _Column("median", ("utilization_median",), "samples", "{:.0%}"),
    _Column("p10", ("utilization_p10",), "samples", "{:.0%}"),
    _Column("min", ("utilization_min",), "samples", "{:.0%}"),
    _Column("hottest", ("temperature_c",), "most", "{:.0f} C"),
    _Column("power", ("power_w",), "mean", "{:.0f} W"),
    _Column("load", ("load",), "now", "{:.1f}"),
)


def _aligned(rows):
    """Aligns a table, without the columns that have nothing below their heading."""
    columns = [c for c in zip(*rows, strict=True) if any(c[1:])]
    widths = [max(map(len, column)) for column in columns]
    first, *others = widths
    return "\n".join(
        "  ".join(
            [row[0].ljust(first)]
            + [cell.rjust(w) for cell, w in zip(row[1:], others, strict=True)]
        ).rstrip()
        for row in zip(*columns, strict=True)
    )


def _by_tag(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """What samples of devices come to, by the tags of TensorBoard."""
    return {
        f"{tag}/utilization_{name}": value
        for tag, each in found.items()
        for name, value in each.items()
    }


def _tag(tower: str) -> str:
    """The tag of a GPU: "device/gpu:0" of "/device:GPU:0"."""
    return f"device/{_short(tower).lower()}"


def _short(tower: str) -> str:
    return tower.removeprefix("/device:")


def _allocated(tower: str) -> dict[str, float]:
    """What TensorFlow has allocated, and the most it had."""
    info = tf.config.experimental.get_memory_info(_short(tower))
    return {
        "memory_mb": info["current"] / _MB,
        "peak_memory_mb": info["peak"] / _MB,
    }


@functools.cache
def _limits_mb() -> dict[str, float]:
    """The most that TensorFlow may allocate, by device; asked once in a process."""
    return {name: size / _MB for name, size in device_memory_limits().items()}


def _peak_rss_mb() -> float:
    """The most memory that this process has had; 0 where Linux does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.M)
    return int(peak[1]) / 1024 if peak else 0.0
