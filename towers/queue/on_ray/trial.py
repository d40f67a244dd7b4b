"""A run as a trial of Ray Tune, on a node of its cluster: towers.train, in a process.

Ray Tune has ways of its own to save and to print, which are not used.
"""

import dataclasses
import os
import queue
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import tune

from towers.launch.gpus import VISIBLE
from towers.launch.on_ray.watcher import Watcher
from towers.processes.strays import Strays
from towers.queue.process import Process
from towers.queue.record import SAVE_S
from towers.queue.schedule import LAST_WORDS_S


@dataclasses.dataclass(frozen=True)
class TrialWork:
    """A run, as a node gets it.

    Attributes:
        flags: Those of towers.train.
        log: The file of its output.
        environ: What to add to the environment.
    """

    flags: Sequence[str]
    log: str
    environ: Mapping[str, str]


class RunTrial(tune.Trainable):
    """Starts the process of a run, and passes its reports on to Ray Tune.

    A result of Ray Tune is where the run is, a report of it, or how it has ended.
    """

    def setup(self, config, works: Mapping[int, TrialWork], orders: Any) -> None:
        """Starts the process, unless the queue has been asked to stop.

        Args:
            config: "run" is the run's number.
            works: All runs, by number.
            orders: The desk where the queue leaves the number of each signal.
        """
        self._work, self._orders = works[config["run"]], orders
        self._strays = Strays()
        # Where Ray ends this process, nobody else ends the run.
        self._watcher = Watcher(self._strays)
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._process: Process | None = None
        known = ray.get(orders.after.remote(0))
        if ("signal", signal.SIGTERM) in known:
            self._events.put({"done": True})
            return
        try:
            self._process = self._start()
        except OSError as error:
            self._end(1, f"Cannot start it: {error}")
            return
        self._events.put({"where": _where()})
        threading.Thread(target=self._listen, args=(len(known),), daemon=True).start()

    def step(self) -> dict[str, Any]:
        """Waits for the next result."""
        return self._events.get()

    def cleanup(self) -> None:
        """Has a run save that Ray Tune stops, and ends what it has started."""
        if self._process is not None and self._process.code is None:
            self._process.signal(signal.SIGTERM)
            self._strays.end(SAVE_S)
        self._strays.end(LAST_WORDS_S)
        self._watcher.stop()

    def _start(self):
        # Ray limits a worker's threads by it, and this is not the worker's computation.
        own = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        return Process(
            self._work.flags,
            self._work.log,
            {**own, **self._work.environ, **self._strays.mark},
            told=lambda _, report: self._events.put(_result(report)),
            ended=lambda process: self._end(
                process.exit_code, process.reason if process.code else ""
            ),
        )

    def _end(self, code, reason):
        self._events.put({"exit_code": code, "reason": reason, "done": True})

    def _listen(self, seen):
        """Passes on the queue's signals."""
        while self._process.code is None:
            messages = ray.get(self._orders.after.remote(seen))
            seen += len(messages)
            for _, number in messages:
                self._process.signal(number)


def _result(report):
    """A report as a result: a scheduler reads the metrics, and the queue all of it."""
    return {**report.get("metrics", {}), **report}


def _where():
    """Where the run is, in words."""
    gpus = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    return [f"node {ray.util.get_node_ip_address()}", *(f"GPU {k}" for k in gpus)]
