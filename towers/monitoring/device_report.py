"""Measures memory and load of each tower's GPU, and of this process."""

import collections
import contextlib
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import psutil
import tensorflow as tf

from towers.devices.configuration import Devices
from towers.keras_adapter.runtime import device_memory_limits
from towers.machine import limits, nvml
from towers.machine.nvml import Driver
from towers.model import fit_call
from towers.model.fit_call import FitCall
from towers.program import words
from towers.program.voice import say

_MB = 2**20
_CPU = "device/cpu:0"
PERIOD_S = 0.2
# For the picture.
_RECENT = 100
# Between two reports; of a longer time the latest.
_MOST = 100_000

_PERCENTILES = {"min": 0, "p10": 10, "median": 50}


@fit_call.changes_no_variable
class DeviceReport(keras.callbacks.Callback):
    """Measures the devices, whenever `measured` is called.

    TensorFlow reports how much memory this process has allocated on a GPU. NVIDIA's
    driver reports the use by all processes. If the driver does not answer, its values
    are left out, and one line on stderr says so.

    The load of devices changes from moment to moment. A thread samples it several times
    a second, from the end of the first step on, as that step builds the graphs.
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
            cpu_clock: Returns the CPU seconds of all threads.
        """
        super().__init__()
        # Without a GPU, no driver is needed.
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
        """Begins to count CPU time, and reports values that cannot be measured."""
        self._read()
        self._load.begin()

    def on_train_batch_end(self, batch, logs=None):
        """Begins to sample the load of the devices."""
        # Other towers have other timers.
        builder = getattr(self.model, "builder", None)
        self._timers = getattr(builder, "timers", None)
        if not self._sampler.started:
            self._sampled_load.begin()
            self._sampler.start()

    def on_train_end(self, logs=None):
        """Ends the sampling thread."""
        self._sampler.stop()

    @contextlib.contextmanager
    def around_fit(self, call: FitCall) -> Iterator[None]:
        """A context that ends sampling, whatever ends `fit`."""
        try:
            yield
        finally:
            self._sampler.stop()
            self._timers = None

    def measured(self) -> dict[str, float]:
        """Measures the devices, for TensorBoard.

        Returns:
            Values by tag. For each tower's GPU, for this process:
            `device/gpu:0/memory_mb`, `peak_memory_mb` and `limit_mb`. For all processes
            on the GPU: `used_mb`, `utilization` (0 to 1), `temperature_c` and
            `power_w`. For this process on the host: `device/cpu:0/rss_mb`,
            `peak_rss_mb`, and `utilization` of the available CPUs since the last call
            (0 to 1). For the host: the `load` of the last minute. From the samples
            since the last call, for each GPU and this process: `utilization_min`,
            `utilization_p10` (the 10th percentile) and `utilization_median`; a GPU's
            `utilization` is then their mean.
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
        """Returns the load of devices in all samples of the run.

        Returns:
            `min`, `p10` and `median`, 0 to 1, for devices such as "gpu:0" and "cpu:0".
        """
        by_tag = self._sampler.of_all()
        return {tag.removeprefix("device/"): summary for tag, summary in by_tag.items()}

    def timeline(self) -> dict[str, np.ndarray]:
        """Returns the recent load of devices, beside steps; see `Sampler.rows`."""
        rows = self._sampler.rows()
        return {name.removeprefix("device/"): row for name, row in rows.items()}

    def text(self) -> str:
        """Returns a table of the devices.

        Returns:
            Lines without a final newline: one for each GPU, and one for this process.
            Memory and load are current. A GPU's temperature, and its memory used by all
            processes, are maxima. The load of a GPU is a mean, followed by the median,
            the 10th percentile and the minimum of all samples. All other values are
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
            values = self._driver.read(smi and smi.uuid)
            if "utilization" in values:
                busy[_tag(tower)] = values["utilization"]
        if (load := self._sampled_load.since()) is not None:
            busy[_CPU] = load
        self._sampled_load.begin()
        totals = self._timers and self._timers.totals()
        if totals is None:
            return Sample(self._clock(), busy)
        return Sample(self._clock(), busy, totals.steps, totals.input_s)

    def _sampled(self, values):
        summaries = self._sampler.since_last_call()
        for tag, summary in summaries.items():
            mean = summary.pop("mean")
            if tag != _CPU and f"{tag}/utilization" in values:
                values[f"{tag}/utilization"] = mean
        return _by_tag(summaries)

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
        head: The heading.
        names: The values to show: the first of these that a device has.
        which: The value "now", the "most", the "mean", or the value of all "samples".
        form: The format.
    """

    head: str
    names: tuple[str, ...]
    which: str
    form: str

    def cell(self, values: Mapping[str, float], tag: str) -> str:
        """Returns a device's cell; empty if there is no value."""
        tags = [f"{tag}/{name}" for name in self.names if f"{tag}/{name}" in values]
        return self.form.format(values[tags[0]]) if tags else ""


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
    """Aligns a table, without the columns that have only a heading.

    Columns for which a line has no room are a table below, with the same names.
    """
    names, *columns = [c for c in zip(*rows, strict=True) if any(c[1:])]
    names = _padded(names, str.ljust)
    tables, room = [], 0
    for column in columns:
        column = _padded(column, str.rjust)
        room -= len(column[0]) + 2
        if room < 0:
            tables.append([names])
            # Whoever prints the table may indent it by two columns.
            room = words.line_width() - len(names[0]) - len(column[0]) - 4
        tables[-1].append(column)
    return "\n".join(
        "  ".join(row).rstrip() for table in tables for row in zip(*table, strict=True)
    )


def _padded(column, pad):
    width = max(map(len, column))
    return [pad(cell, width) for cell in column]


def _by_tag(summaries: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Flattens summaries of devices by the tags of TensorBoard."""
    return {
        f"{tag}/utilization_{name}": value
        for tag, summary in summaries.items()
        for name, value in summary.items()
    }


def _tag(tower: str) -> str:
    """Returns the tag of a GPU: "device/gpu:0" for "/device:GPU:0"."""
    return f"device/{_short(tower).lower()}"


def _short(tower: str) -> str:
    return tower.removeprefix("/device:")


def _allocated(tower: str) -> dict[str, float]:
    """Returns TensorFlow's current and peak allocation."""
    info = tf.config.experimental.get_memory_info(_short(tower))
    return {
        "memory_mb": info["current"] / _MB,
        "peak_memory_mb": info["peak"] / _MB,
    }


@functools.cache
def _limits_mb() -> dict[str, float]:
    """Returns the most that TensorFlow may allocate on each device; cached."""
    return {name: size / _MB for name, size in device_memory_limits().items()}


def _peak_rss_mb() -> float:
    """Returns the peak memory of this process; 0 if Linux does not report it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.M)
    return int(peak[1]) / 1024 if peak else 0.0


# Samples how busy devices are, several times a second.
#
# One look in an interval says little of a device that computes in bursts: it finds it
# at work, or idle. The driver itself looks about six times a second.


class Sample(NamedTuple):
    """What was found at one moment.

    Attributes:
        time_s: When.
        busy: Part of the time since the last sample in which each device computed, 0 to
            1, by its name. For a GPU, the driver chooses the time.
        steps: Steps of training that have ended, if that is known.
        input_s: Seconds that they have waited for input.
    """

    time_s: float
    busy: Mapping[str, float]
    steps: int | None = None
    input_s: float = 0.0


class Sampler:
    """Takes samples in a thread of its own, which ends with `stop`.

    Attributes:
        recent: The last samples.
        fault: Why there are no more samples, if something went wrong.
    """

    def __init__(self, take: Callable[[], Sample], period_s: float | None = None):
        """Initializes the sampler; it takes no sample yet.

        Args:
            take: Takes a sample. It may wait: only the thread waits with it.
            period_s: Seconds between two samples; by default a fifth.
        """
        self._take = take
        self._period_s = PERIOD_S if period_s is None else period_s
        self.recent: collections.deque[Sample] = collections.deque(maxlen=_RECENT)
        self.fault: Exception | None = None
        self._lately: dict[str, collections.deque[float]] = {}
        self._percents: dict[str, collections.Counter[int]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    @property
    def started(self) -> bool:
        """Whether it was started, and not stopped since."""
        return self._thread is not None

    def start(self) -> None:
        """Starts the thread."""
        # Of its own: a thread that a driver holds up may outlive the run.
        self._stopped = stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(stopped,), name="utilization", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; without waiting for a driver that hangs."""
        thread, self._thread = self._thread, None
        self._stopped.set()
        if thread is not None:
            thread.join(timeout=1.0)

    def sample(self) -> None:
        """Takes a sample."""
        self._note(self._take())

    def _run(self, stopped):
        while not stopped.wait(self._period_s):
            try:
                found = self._take()
            except Exception as error:  # whatever it is, training goes on
                self.fault = error
                return
            if not stopped.is_set():
                self._note(found)

    def _note(self, found):
        with self._lock:
            self.recent.append(found)
            for name, busy in found.busy.items():
                lately = self._lately.setdefault(name, collections.deque(maxlen=_MOST))
                lately.append(busy)
                percents = self._percents.setdefault(name, collections.Counter())
                percents[round(100 * busy)] += 1

    def since_last_call(self) -> dict[str, dict[str, float]]:
        """Sums up the samples since the last call, by device.

        Returns:
            `min`, `p10`, `median` and `mean` of each device of which there are some.
        """
        with self._lock:
            lately, self._lately = self._lately, {}
        return {
            name: {**_percentiles(values), "mean": float(np.mean(values))}
            for name, values in lately.items()
        }

    def of_all(self) -> dict[str, dict[str, float]]:
        """Sums up all samples, to a hundredth: `min`, `p10` and `median`, by device."""
        with self._lock:
            percents = {
                name: [*each.elements()] for name, each in self._percents.items()
            }
        return {
            name: {key: each / 100 for key, each in _percentiles(values).items()}
            for name, values in percents.items()
        }

    def rows(self) -> dict[str, np.ndarray]:
        """Returns what the last samples found, each from 0 to 1, to be drawn.

        They are how busy each device was, then how many steps have ended, relative to
        the most, and the part of the time in which these waited for input.
        """
        with self._lock:
            found = [*self.recent]
        if len(found) < 2:
            return {}
        names = {name: None for each in found for name in each.busy}
        rows = {
            name: np.array([each.busy.get(name, np.nan) for each in found[1:]])
            for name in names
        }
        known = [each for each in found if each.steps is not None]
        if len(known) == len(found):
            ended = np.maximum(np.diff([each.steps for each in found]), 0)
            rows[f"steps, at most {ended.max()}"] = ended / max(ended.max(), 1)
            rows["waiting for input"] = _waiting(found)
        return rows


class CpuLoad:
    """How much of the CPUs that it may use this process has taken."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ):
        """Begins to count.

        Args:
            clock: Returns seconds.
            cpu_clock: Returns the seconds that all threads have computed.
        """
        self._clock, self._cpu_clock = clock, cpu_clock
        self._cpus = limits.processors().seconds
        self.begin()

    def begin(self) -> None:
        """Begins anew."""
        self._begun = self._clock(), self._cpu_clock()

    def since(self) -> float | None:
        """Returns the part that it has taken since it began, 0 to 1; `None` at once."""
        begun_s, cpu_begun_s = self._begun
        elapsed_s = self._clock() - begun_s
        if elapsed_s <= 0:
            return None
        return min(1.0, (self._cpu_clock() - cpu_begun_s) / (elapsed_s * self._cpus))


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    found = np.percentile(values, [*_PERCENTILES.values()])
    return dict(zip(_PERCENTILES, map(float, found), strict=True))


def _waiting(samples: Sequence[Sample]) -> np.ndarray:
    """The part of the time between samples that was spent waiting for input.

    A step tells it as it ends. It is spread over the time since the end of the one
    before.
    """
    found: Any = np.zeros(len(samples))
    begin = 0
    for k, each in enumerate(samples):
        before = samples[begin]
        if each.steps > before.steps:
            waited_s = each.input_s - before.input_s
            found[begin + 1 : k + 1] = waited_s / (each.time_s - before.time_s)
        if each.steps != before.steps:  # with other towers, it counts anew
            begin = k
    return np.clip(found[1:], 0, 1)
