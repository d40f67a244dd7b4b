"""Asks Ray Train for the hosts of a run, and watches over them."""

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence

# Ray reads this as it is imported: hosts stay in the launcher's folder.
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")

import ray
import ray.train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from towers.launch.arguments import LaunchOptions
from towers.launch.generation import Events, Outcome, StartedHosts
from towers.launch.on_ray import cluster, desk, worker
from towers.launch.supervisor import SIGNALS, may_go_on, pause, say
from towers.processes import signals
from towers.program import words
from towers.program.ending import ANOTHER_FAILED

# Where Ray Train notes the checkpoints of a run, in the run's folder. No constant of
# Ray's public modules has the name; tests/towers/launch/test_ray.py reads the file.
_NOTES = "checkpoint_manager_snapshot.json"
# What hosts get for each signal: Ray's processes, and so they, block SIGINT.
_SIGNALS = {**SIGNALS, signal.SIGINT: signal.SIGTERM}


def run(options: LaunchOptions) -> int:
    """Has Ray start the hosts, and returns the exit code once all have ended.

    Raises:
        ValueError: Ray has no place for them, or ended them for a reason of its own.
    """
    cluster.connect(options.most * options.num_cpus)
    try:
        return RayDriver(options).run()
    except ray.exceptions.RayError as error:
        raise ValueError(f"Ray ended the run: {cluster.first_line(error)}.") from error


class RayHost:
    """A host on one of Ray's workers, as a `StartedHosts` knows hosts.

    Attributes:
        generation: The number of its generation.
        rank: Its number among the hosts.
        pid: The number of its process, on its node.
        code: Its exit code, negative for a signal; `None` while it runs.
        how: How it has ended, in words.
        log: Its file; Ray keeps what it writes.
        is_lost: Whether Ray has ended it, or found that it has gone.
        is_stopped: Whether it stands still, which Ray does not tell.
    """

    log = None
    is_stopped = False

    def __init__(self, generation: int, rank: int, tell):
        self.generation, self.rank, self.pid = generation, rank, 0
        self.code: int | None = None
        self.how, self.is_lost = "", False
        self._tell = tell

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        if self.code is None:
            self._tell("signal", self.generation, self.rank, int(number))

    def all_is_shown(self, seconds: float) -> None:
        """Does nothing: Ray shows what it writes."""


class _Nothing:
    """Hosts on Ray's workers look after what they have started themselves."""

    def end(self, seconds: float) -> None:
        pass

    def signal(self, number: int) -> None:
        pass


class RayDriver:
    """A run on Ray: its generations, until Ray has ended it."""

    def __init__(self, options: LaunchOptions):
        """Takes over what is asked for."""
        self._options = options
        here = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self._desk = desk.Desk.options(scheduling_strategy=here).remote()
        # Of signals, hosts that have ended, generations that begin, and what Ray says.
        self._events: Events = queue.SimpleQueue()
        self._hosts: list[RayHost] = []
        # Whether Ray has ended the last ones, none of which was to blame.
        self._is_cut = False
        # The number of failures. Ray also starts hosts again if it has room for more.
        self._failures = 0
        self._resources = cluster.resources(options)

    def run(self) -> int:
        """Returns the exit code."""
        trainer = self._trainer()
        for target, *args in ((self._listen,), (desk.fit, trainer.fit, self._desk)):
            threading.Thread(target=target, args=args, daemon=True).start()
        signals.listen(_SIGNALS, lambda number: self._events.put(_SIGNALS[number]))
        outcome = Outcome()
        while True:
            event = self._next()
            if isinstance(event, str):
                return self._end(outcome, event)
            if isinstance(event, int) and event != signal.SIGUSR1:
                return 128 + event  # Ray ends what is there
            if isinstance(event, list):
                outcome = self._generation(event)

    def _next(self):
        """Waits for the next generation, the end, or a signal."""
        try:
            return self._events.get(timeout=self._options.join_seconds)
        except queue.Empty:
            raise ValueError(
                f"Ray found no place for {words.count(self._options.least, 'host')} "
                f"with {cluster.in_words(self._resources)} each within "
                f"{self._options.join_seconds:g} s; its cluster has "
                f"{cluster.in_words(ray.cluster_resources())}: expected fewer hosts, a "
                "smaller --num_cpus or --num_gpus, or more nodes."
            ) from None

    def _generation(self, hosts: Sequence[RayHost]) -> Outcome:
        """Watches over hosts until all have ended, and lets Ray go on."""
        options = self._options
        if options.least < options.most:
            say(f"Ray has started {words.count(len(hosts), 'host')}.")
        generation = StartedHosts(hosts, self._events, _Nothing(), options.fail_seconds)
        outcome = generation.run()
        lost = any(host.is_lost for host in hosts)
        self._is_cut = lost and outcome.rank is None
        if self._is_cut:
            say("Ray has ended all hosts.")
        elif outcome.said and outcome.stopped is None:
            say(outcome.said)
        if not self._is_cut:
            self._failures += 1
        if lost:
            return outcome  # Ray knows
        number, error = hosts[0].generation, outcome.said or None
        if not may_go_on(outcome):
            error = None
        elif self._failures <= options.max_restarts:
            event = pause(self._events, self._failures, options.max_restarts)
            if isinstance(event, int):
                error, outcome = None, Outcome(128 + event, stopped=event)
            elif event is not None:
                self._events.put(event)  # Ray has lost a worker meanwhile, and knows
                return outcome
        self._tell("over", number, error)
        return outcome

    def _end(self, outcome: Outcome, why: str) -> int:
        if why and (self._is_cut or not outcome.code):
            raise ValueError(f"Ray ended the run: {why}.")
        return outcome.code

    def _tell(self, *message):
        ray.get(self._desk.tell.remote(*message))

    def _listen(self):
        """Makes events of the messages that are for the launcher."""
        does = {"began": self._began, "ended": self._ended, "lost": self._lost}
        for name, *values in desk.messages(self._desk):
            if name in does:
                does[name](*values)
        (why,) = values  # of "done", the last one
        self._lose_all()
        self._events.put(why)

    def _began(self, generation, rank, count, pid):
        if not self._hosts or self._hosts[0].generation != generation:
            self._lose_all()
            self._hosts = [RayHost(generation, k, self._tell) for k in range(count)]
            self._events.put([*self._hosts])
        self._hosts[rank].pid = pid

    def _ended(self, generation, rank, code, how):
        if generation == self._hosts[0].generation:
            self._put(self._hosts[rank], code, how)

    def _lost(self, rank, why):
        if rank < len(self._hosts) and self._hosts[rank].code is None:
            self._hosts[rank].is_lost = True
            self._put(self._hosts[rank], 1, f"Ray lost its worker ({why})")

    def _lose_all(self):
        """Takes for ended what Ray has ended since it lost a worker."""
        for host in self._hosts:
            if host.code is None:
                host.is_lost = True
                self._put(host, ANOTHER_FAILED, "ended by Ray")

    def _put(self, host, code, how):
        if host.code is None:
            host.code, host.how = code, how
            self._events.put(host)

    def _trainer(self):
        options = self._options
        folder = os.getcwd()
        if ray.get_runtime_context().runtime_env.get("working_dir"):
            folder = None  # Ray has copied it, and workers begin there
        environ = {"TOWERS_JOIN_SECONDS": f"{options.join_seconds:g}"}
        if options.interface is not None:
            environ["TOWERS_INTERFACE"] = options.interface
        model_dir = options.log_dir and os.path.abspath(options.log_dir)
        # With a range, Ray counts anew from time to time what it has places for.
        is_range = options.least < options.most
        count = (options.least, options.most) if is_range else options.most
        work = worker.HostWork(
            *(self._desk, options.command, sys.executable),
            *(folder, environ, model_dir),
        )
        return DataParallelTrainer(
            lambda: worker.run(work),
            scaling_config=ray.train.ScalingConfig(
                num_workers=count,
                use_gpu="GPU" in self._resources,
                resources_per_worker=self._resources,
                placement_strategy=options.placement_strategy,
            ),
            run_config=ray.train.RunConfig(
                **_storage(model_dir),
                failure_config=ray.train.FailureConfig(options.max_restarts),
                callbacks=[_Losses(self._desk)],
            ),
        )


class _Losses(ray.train.UserCallback):
    """Tells, from Ray's controller, which workers it has lost."""

    def __init__(self, of_run):
        self._desk = of_run

    def after_exception(self, run_context, worker_exceptions):
        """Tells it."""
        for rank, error in worker_exceptions.items():
            self._desk.tell.remote("lost", rank, cluster.first_line(error))


def _storage(model_dir):
    """Where Ray has its notes: what it is told of a run lies where the run is."""
    if model_dir is None:
        return {}
    # Checkpoints that it remembers of an earlier run may have gone.
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(model_dir, _NOTES))
    folder, name = os.path.split(model_dir)
    return {"storage_path": folder, "name": name}
