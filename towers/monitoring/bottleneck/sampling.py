"""Samples how busy devices are, several times a second.

One look in an interval says little of a device that computes in bursts: it finds it at
work, or idle. The driver itself looks about six times a second.
"""

import collections
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from towers.machine import limits

PERIOD_S = 0.2
# For the picture.
_RECENT = 100
# Between two reports; of a longer time the latest.
_MOST = 100_000

_PERCENTILES = {"min": 0, "p10": 10, "median": 50}


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
