"""Asks Ray Tune for the runs of a queue, and watches over them."""

import functools
import os
import queue
import threading
from collections.abc import Mapping, Sequence

# Ray reads these as it is imported: runs stay in the queue's folder, and TensorBoard
# shows them only.
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")

import ray
from ray import tune
from ray.tune.logger import JsonLoggerCallback

from towers.launch.gpus import VISIBLE
from towers.launch.on_ray import cluster, desk
from towers.machine.limits import cpu_count
from towers.queue import entry as states
from towers.queue.entry import Entry
from towers.queue.on_ray import trial
from towers.queue.queue_flags import QueueOptions
from towers.queue.record import Record
from towers.queue.schedule import STOPPING, STOPS, Show
from towers.queue.slots import Device, Slots


class RayQueue:
    """Runs that Ray Tune starts; it is used as `schedule.Queue` is.

    Attributes:
        events: Where the numbers of signals are put.
        entries: The runs.
        stopped: The signal that has asked for the end, if there was one.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        options: QueueOptions,
        record: Record,
        environ: Mapping[str, str],
    ):
        """Connects to Ray's cluster, or starts one.

        Args:
            entries: The runs; those that have ended stay as they are.
            options: What the queue is asked to do.
            record: Where runs are noted that have ended well.
            environ: What to add to the environment of the runs.

        Raises:
            ValueError: A run would never have room.
        """
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.entries, self.stopped = entries, None
        self._record, self._environ = record, environ
        cluster.connect(options.devices or cpu_count())
        found = ray.cluster_resources()
        self._has_gpus = bool(found.get("GPU"))
        self._cpus = int(found.get("CPU", 1))
        count = int(found.get("GPU") or self._cpus)
        devices = [
            Device(str(k), self._has_gpus)
            for k in range(min(count, options.devices or count))
        ]
        self.slots = Slots(devices, options.runs_per_gpu, self._cpus)
        self._each = options.runs_per_gpu
        self._folder = options.queue_dir
        self._orders, self._news = desk.Desk.remote(), desk.Desk.remote()

    def run(self, show: Show) -> None:
        """Runs all, until the last one has ended."""
        waiting = [each for each in self.entries if each.state == states.WAITING]
        if not waiting:
            return show(self.entries, "")
        try:
            self._run(show)
        except ray.exceptions.RayError as error:
            why = cluster.first_line(error)
            raise ValueError(f"Ray ended the queue: {why}.") from error

    def _run(self, show):
        ray.get(self._orders.tell.remote("begin"))
        tuner = self._tuner()
        for target, *args in ((self._listen,), (desk.fit, tuner.fit, self._news)):
            threading.Thread(target=target, args=args, daemon=True).start()
        while (event := self._next(show)) is not None:
            if callable(event):
                event()
            elif event in STOPS:
                self.stopped = self.stopped or event
                ray.get(self._orders.tell.remote("stop"))
        show(self.entries, "")

    def _next(self, show):
        show(self.entries, STOPPING if self.stopped else "")
        return self.events.get()

    def _tuner(self):
        numbers = [
            number
            for number, each in enumerate(self.entries)
            if each.state == states.WAITING
        ]
        # What Ray sends to its workers must not hold this object.
        works = {number: self._work(number) for number in numbers}
        takes = {number: self._resources(self.entries[number]) for number in numbers}
        orders, news = self._orders, self._news

        def train(config):
            trial.run(works[config["run"]], orders, news)

        return tune.Tuner(
            tune.with_resources(
                train,
                lambda config: tune.PlacementGroupFactory([takes[config["run"]]]),
            ),
            param_space={"run": tune.grid_search(numbers)},
            tune_config=tune.TuneConfig(max_concurrent_trials=self.slots.count),
            run_config=tune.RunConfig(
                name="ray",
                storage_path=self._folder,
                verbose=0,
                callbacks=[JsonLoggerCallback()],
            ),
        )

    def _work(self, number):
        run = self.entries[number].run
        devices = self.slots.devices[: run.devices]
        environ = self.slots.environ(devices, self._environ)
        environ.pop(VISIBLE, None)  # Ray says which
        flags = self.slots.flags(run, devices)
        return trial.TrialWork(number, flags, run.log, environ)

    def _resources(self, entry):
        """What Ray is to reserve for a run, by Ray's names."""
        count = entry.run.devices
        if not self._has_gpus:
            return {"CPU": count}
        cpus = max(1, self._cpus * count // self.slots.count)
        return {"CPU": cpus, "GPU": count if count > 1 else 1 / self._each}

    def _listen(self):
        """Makes events of what runs tell."""
        does = {
            "began": self._began,
            "told": self._told,
            "ended": self._ended,
            "done": self._done,
        }
        for name, *values in desk.messages(self._news):
            self.events.put(functools.partial(does[name], *values))
        self.events.put(None)

    def _began(self, number, node):
        self.entries[number].state = states.RUNNING
        self.entries[number].devices = [f"node {node}"]

    def _told(self, number, progress):
        self.entries[number].progress = progress

    def _ended(self, number, code, reason):
        self.entries[number].end(code, reason, bool(self.stopped))
        if code == 0:
            self._record.finish(self.entries[number].run)

    def _done(self, why):
        """Takes for failed what Ray has ended by itself."""
        for entry in self.entries:
            if entry.state == states.RUNNING or (
                entry.state == states.WAITING and not self.stopped
            ):
                entry.state = states.FAILED
                entry.reason = f"Ray lost it ({why or 'it does not tell why'})"
