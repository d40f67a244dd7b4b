"""What all contenders share: they train in turn, and say what it took.

A contender is a process of a race. It builds a model and trains for ever, and after
each call of its training function tells a `Clock`, which answers, and holds it up while
it is not its turn.
"""

import dataclasses
import importlib
import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from ..race import answering, write
from .contenders import Contender, parse

Memory = Callable[[], tuple[float, float | None]]


@dataclasses.dataclass(frozen=True)
class Job:
    """What a contender is to do.

    Attributes:
        contender: Who it is, as on the command line.
        work: What it trains, a name in `works.WORKS`.
        towers: How many devices it trains on.
        warmup: Steps before the first round, after the very first step.
        steps: Timed steps of a round.
        checkout: Where the contender's own program lies, for those that have one.
        gpu_memory_limit_mb: Memory of each logical GPU, where GPUs are split.
    """

    contender: str
    work: str
    towers: int
    warmup: int
    steps: int
    checkout: str | None = None
    gpu_memory_limit_mb: int = 4096

    @property
    def parsed(self) -> Contender:
        """The contender."""
        return parse(self.contender)


class Clock:
    """Measures calls of a training function, and holds them up between turns.

    Attributes:
        memory_mb: Returns the most host memory and the most device memory in use, in
            MB; None for the latter where the host is the device. A contender may
            replace it before the first turn, and so `on_turn`.
        on_turn: Is told before each turn how many calls it has, and 0 at the end; for
            contenders of several processes.
    """

    def __init__(self, job: Job, answers: TextIO):
        """Makes a clock that writes to `answers`."""
        self.memory_mb: Memory = lambda: (host_mb(), None)
        self.on_turn: Callable[[int], None] = lambda calls: None
        self._steps_per_call = job.parsed.steps_per_call
        self._warmup = math.ceil(job.warmup / self._steps_per_call)
        self._timed = math.ceil(job.steps / self._steps_per_call)
        self._answers = answers
        self._turns = self._take_turns()

    def start(self) -> None:
        """Is called just before the model is built."""
        self._next_turn()

    def call_ended(self) -> None:
        """Is called at the end of each call; returns when the next one may begin.

        Raises:
            SystemExit: When nothing more is wanted.
        """
        now = time.perf_counter()
        self._seconds.append(now - self._before)
        self._before = now
        if len(self._seconds) == self._calls:
            self._next_turn()

    def _next_turn(self):
        self._calls = next(self._turns, 0)
        self.on_turn(self._calls)
        if not self._calls:
            sys.exit()
        self._seconds = []
        self._before = time.perf_counter()

    def _take_turns(self) -> Iterator[int]:
        """Yields how many calls a turn has; goes on when they are over."""
        yield 1 + self._warmup
        # The first call began when there was no model yet.
        self._answer(first_step_s=self._seconds[0])
        for _ in sys.stdin:
            yield self._timed
            call_s = statistics.median(self._seconds)
            self._answer(step_ms=1000 * call_s / self._steps_per_call)

    def _answer(self, **measured):
        host, device = self.memory_mb()
        write(self._answers, measured | {"host_mb": host, "device_mb": device})


def main() -> None:
    """Is a contender: trains until nothing more is wanted.

    The contender's module has a function `run`, which takes a job and a clock.
    """
    job = Job(**json.loads(sys.argv[1]))
    with answering(jax=job.parsed.name == "jax") as answers:
        name = f".peers.{job.parsed.kind.module}"
        module = importlib.import_module(name, __package__)
        if int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")):
            return module.follow(job)
        module.run(job, Clock(job, answers))


def host_mb() -> float:
    """Returns the most host memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def tensorflow_memory_mb() -> tuple[float, float | None]:
    """Returns the most memory of the host, and of a GPU that TensorFlow uses, in MB."""
    import tensorflow as tf

    # Not the logical ones: to list them makes devices, which those that run sessions
    # have already.
    if not tf.config.list_physical_devices("GPU"):
        return host_mb(), None
    gpus = tf.config.list_logical_devices("GPU")
    info = tf.config.experimental.get_memory_info
    # It wants no more of the name than the device.
    peaks = [info(gpu.name.rpartition("/device:")[2])["peak"] for gpu in gpus]
    return host_mb(), max(peaks) / 2**20


def configure(job: Job) -> Any:
    """Sets up the devices of a job.

    Contenders on one device have a whole GPU. Others have a GPU for each tower, or
    split the GPUs that there are.

    Returns:
        What `towers.devices.configure` does.
    """
    import tensorflow as tf

    from towers import devices

    options = dict(job.parsed.options)
    home, threads = options.get("device"), options.get("inter_op")
    if threads is not None:
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    gpus = len(tf.config.list_physical_devices("GPU"))
    if gpus and job.parsed.name in ("one_device", "micro_batches"):
        return devices.configure(1)
    if not gpus or job.towers <= gpus:
        return devices.configure(job.towers, local_parameter_device=home)
    return devices.configure(
        gpus,
        gpu_split=-(-job.towers // gpus),
        gpu_memory_limit_mb=job.gpu_memory_limit_mb,
        local_parameter_device=home,
    )


def leave_threads() -> None:
    """Leaves a peer TensorFlow's own number of threads, which is one for each core.

    Setting up logical CPUs as Towers does would divide them among the towers.
    """
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(os.cpu_count())
