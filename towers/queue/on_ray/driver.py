"""Asks Ray Tune for the runs of a queue: when each starts, where, and whether it stops.

The table, the record and the exit code are the queue's.
"""

import functools
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence

# Ray reads these as it is imported: runs stay in the queue's folder, TensorBoard shows
# them only, a missing metric is told in a sentence of ours, the table is ours, and no
# second cluster starts for a thread that Ray's end surprises.
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")

import ray
from ray import tune
from ray.tune.logger import JsonLoggerCallback
from ray.tune.schedulers import ASHAScheduler

from towers.launch.gpus import VISIBLE
from towers.launch.on_ray import cluster, desk
from towers.machine.limits import cpu_count
from towers.processes.strays import Strays
from towers.queue import entry as states
from towers.queue import search, slots
from towers.queue.entry import Entry
from towers.queue.on_ray import trial
from towers.queue.queue_flags import QueueOptions
from towers.queue.record import Record
from towers.queue.schedule import Queue, Show
from towers.queue.slots import Device, Slots

# Ray keeps no tensor of ours; its default is a part of the machine's memory.
_OBJECTS_BYTES = 2**27
# A cluster that runs already does not have what the user sets here for a run.
_PASSED_ON = "TF_", "OMP_"
# For Ray to tell of the end of runs that have gone. It does not where a SIGTERM to all
# processes of a group, as by systemd, has ended Ray, too.
_TELLS_S = 5.0
_ANSWERS_S = 30.0


def connect(options: QueueOptions) -> Slots:
    """Connects to Ray's cluster, or starts one; returns the devices to use of it.

    Raises:
        ValueError: A GPU of this machine is missing, or held by others.
        ConnectionError: RAY_ADDRESS names a cluster that does not answer.
    """
    # What becomes of runs is told by the queue.
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    if cluster.join():
        has = ray.cluster_resources()
        count = int(has.get("GPU") or has.get("CPU", 1))
        devices = [
            Device(str(k), bool(has.get("GPU")))
            for k in range(min(count, options.devices or count))
        ]
        return Slots(devices, options.runs_per_gpu, int(has.get("CPU", 1)))
    here = slots.of_this_machine(options.devices, options.runs_per_gpu)
    gpus = [device.name for device in here.devices if device.is_gpu]
    if gpus:
        os.environ[VISIBLE] = ",".join(gpus)
    cluster.start(
        num_cpus=max(here.count, cpu_count() if gpus else 1),
        num_gpus=len(gpus),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.CRITICAL,
        object_store_memory=_OBJECTS_BYTES,
    )
    return here


class RayQueue(Queue):
    """Runs that Ray Tune starts, on the nodes of its cluster."""

    def __init__(
        self,
        entries: Sequence[Entry],
        slots: Slots,
        record: Record,
        environ: Mapping[str, str],
        options: QueueOptions,
        strays: Strays,
    ):
        """Takes over what there is to run.

        Args:
            entries: The runs; those that have ended stay as they are.
            slots: The devices, as `connect` returns them.
            record: Where runs are noted that have ended well.
            environ: What to add to the environment of the runs.
            options: What the queue is asked to do.
            strays: What the runs of this machine start.
        """
        super().__init__(entries, record)
        self._slots, self._options, self._strays = slots, options, strays
        passed_on = {k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)}
        self._environ = {**passed_on, **environ}
        self._desk = desk.Desk.remote()
        self._is_done = False

    def _begin(self):
        numbers = [
            number
            for number, entry in enumerate(self.entries)
            if entry.state == states.WAITING
        ]
        self._is_done = not numbers
        if numbers:
            ray.get(self._desk.tell.remote("begin"))
            fit = self._tuner(numbers).fit
            # In the main thread, Ray would take Ctrl-C.
            threading.Thread(target=self._fit, args=(fit,), daemon=True).start()

    def _is_running(self):
        # Once asked to stop, Tune still goes through all that wait.
        is_over = self.stopped and not any(
            entry.state == states.RUNNING for entry in self.entries
        )
        return not (self._is_done or is_over)

    def run(self, show: Show) -> None:
        """Runs all, until the last one has ended.

        Raises:
            ValueError: Ray fails, or no run reports the scheduler's metric.
        """
        try:
            super().run(show)
        except ray.exceptions.RayError as error:
            why = cluster.first_line(error)
            raise ValueError(f"Ray ended the queue: {why}.") from error

    def _signal(self, number):
        ray.get(self._desk.tell.remote("signal", int(number)), timeout=_ANSWERS_S)

    def _hear(self, number):
        is_first = not self.stopped
        super()._hear(number)
        if self.stopped and is_first:
            threading.Thread(target=self._wait_for_end, daemon=True).start()

    def _wait_for_end(self):
        """Goes on without Ray if it does not tell that the runs have ended."""
        nodes = {entry.devices[0] for entry in self.entries if entry.devices}
        if nodes <= {f"node {ray.util.get_node_ip_address()}"}:
            while self._strays.processes():
                time.sleep(1)
            time.sleep(_TELLS_S)
            self.events.put(self._cut_off)

    def _cut_off(self):
        self.is_cut_off = True
        self._done("")

    def _tuner(self, numbers):
        works = {number: self._work(number) for number in numbers}
        takes = {number: self._resources(self.entries[number]) for number in numbers}
        return tune.Tuner(
            tune.with_resources(
                tune.with_parameters(trial.RunTrial, works=works, orders=self._desk),
                lambda config: tune.PlacementGroupFactory([takes[config["run"]]]),
            ),
            param_space={"run": tune.grid_search(numbers)},
            tune_config=tune.TuneConfig(
                max_concurrent_trials=self._slots.count, scheduler=self._scheduler()
            ),
            run_config=tune.RunConfig(
                name="ray",
                storage_path=self._options.queue_dir,
                verbose=0,
                callbacks=[_Events(self._put), JsonLoggerCallback()],
                # Runs have checkpoints of their own.
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        )

    def _scheduler(self):
        epochs = max(entry.run.settings.train_epochs for entry in self.entries)
        if self._options.scheduler is None or epochs < 2:
            return None
        metric, mode = search.metric(self._options.scheduler)
        return ASHAScheduler(
            time_attr="epoch",
            metric=metric,
            mode=mode,
            # A run that has reached its last epoch is still to be evaluated.
            max_t=epochs - 1,
            stop_last_trials=False,
        )

    def _work(self, number):
        run = self.entries[number].run
        devices = self._slots.devices[: run.devices]
        environ = self._slots.environ(devices, self._environ)
        environ.pop(VISIBLE, None)  # Ray says which
        # Ray chooses the GPU: each may be the smallest.
        flags = self._slots.flags(run, self._slots.devices)
        return trial.TrialWork(flags, run.log, environ)

    def _resources(self, entry):
        """What Ray is to reserve for a run, by Ray's names."""
        count, devices = entry.run.devices, self._slots.devices
        if not devices[0].is_gpu:
            return {"CPU": count}
        cpus = max(1, self._slots.cores * count // self._slots.count)
        return {
            "CPU": cpus,
            "GPU": count if count > 1 else 1 / self._options.runs_per_gpu,
        }

    def _fit(self, fit):
        """Has Ray Tune run, in another thread."""
        why = "it does not tell why"
        try:
            fit()
        except Exception as error:
            why = cluster.first_line(error)
        self.events.put(functools.partial(self._done, why))

    def _put(self, number, what, *values):
        """Has the main thread hear of a run."""
        does = {
            "result": self._heard,
            "complete": self._completed,
            "error": self._lost,
        }
        entry = self.entries[number]
        self.events.put(functools.partial(does[what], entry, *values))

    def _heard(self, entry, result):
        if "where" in result:
            entry.state, entry.devices = states.RUNNING, result["where"]
        elif "exit_code" in result:
            self._end(entry, result["exit_code"], result["reason"])
        else:
            entry.hear(result)
            self._check_metric(result.get("metrics"))

    def _check_metric(self, metrics):
        scheduler = self._options.scheduler
        if scheduler is None or metrics is None:
            return
        name, _ = search.metric(scheduler)
        if name not in metrics:
            known = ", ".join(metric for metric in metrics if metric != "epoch")
            raise ValueError(
                f"Received --scheduler={scheduler}, but the runs report {known}; "
                "expected one of these."
            )

    def _completed(self, entry):
        """Takes for pruned what has not ended by itself."""
        if entry.state == states.RUNNING:
            entry.state = states.PRUNED
            self._record.prune(entry.run, self._options.scheduler)

    def _lost(self, entry, why):
        if entry.state in (states.RUNNING, states.WAITING):
            entry.state, entry.reason = states.FAILED, f"Ray lost it ({why})"

    def _done(self, why):
        """Takes for failed what Ray has ended by itself."""
        self._is_done = True
        for entry in self.entries:
            if not self.stopped:
                self._lost(entry, why)
            elif entry.state == states.RUNNING:
                entry.state = states.STOPPED


class _Events(tune.Callback):
    """Passes on what happens to runs, from Ray Tune's thread."""

    def __init__(self, put):
        self._put = put

    def __getstate__(self):
        # Ray notes its settings in a file, out of which nobody needs this.
        return {}

    def on_trial_result(self, iteration, trials, trial, result, **info):
        """Passes it on."""
        self._put(trial.config["run"], "result", result)

    def on_trial_complete(self, iteration, trials, trial, **info):
        """Passes it on: by itself, or by the scheduler's wish."""
        self._put(trial.config["run"], "complete")

    def on_trial_error(self, iteration, trials, trial, **info):
        """Passes it on: its node or worker has failed."""
        self._put(trial.config["run"], "error", f"it says why in {trial.error_file}")
