"""Runs contenders in processes of their own, and lets them train in turn."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, Generic, TypeVar

from . import mpirun
from .worker import Job
from .works import WORKS

T = TypeVar("T")
ROOT = pathlib.Path(__file__).resolve().parents[2]


class Failed(Exception):
    """Says in a line why a contender cannot go on."""


class Runner:
    """A contender's process, from its start to its end."""

    def __init__(
        self,
        package: str,
        job: Any,
        verbose: bool,
        environ: Mapping[str, str] = os.environ,
        limit_s: float | None = None,
        launcher: Sequence[str] = (),
    ):
        """Starts it, and waits until it is warm.

        Args:
            package: Is run as a program.
            job: What it is to do, a dataclass.
            verbose: Whether its standard error is shown.
            environ: Its environment.
            limit_s: Most seconds until it is warm. None: any.
            launcher: The command that starts its processes, if it has several.

        Raises:
            Failed: If it does not get there.
        """
        self._patience_s = 20
        self._process = subprocess.Popen(
            [
                *launcher,
                *(sys.executable, "-m", package, json.dumps(dataclasses.asdict(job))),
            ],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if verbose else subprocess.DEVNULL,
            text=True,
        )
        try:
            self.start = self._answer(limit_s)
        except BaseException:
            self.close()
            raise

    def go(self) -> dict:
        """Lets it train for a round, and returns what it measured.

        Raises:
            Failed: If it does not get to the end.
        """
        with contextlib.suppress(BrokenPipeError):  # It has ended, as its answer says.
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=self._patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self, limit_s=None):
        # It writes one line at a time, so none waits in the buffer of the file.
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            self._patience_s = 0
            raise Failed(f"it was not warm after {limit_s} s")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise Failed(f"it ended with exit code {code}; --verbosity=1 shows why")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer


@dataclasses.dataclass
class Times:
    """What a contender measured.

    Attributes:
        starts: Its answer at each start.
        rounds: Its answer of each round.
    """

    starts: list[dict] = dataclasses.field(default_factory=list)
    rounds: list[dict] = dataclasses.field(default_factory=list)


def take_turns(
    jobs: Sequence[T],
    start: Callable[[T], Runner],
    rounds: int,
    failed: Callable[[T, str], None],
    fresh_starts: int = 1,
    together: Callable[[T], bool] = lambda job: False,
    end_s: float = math.inf,
) -> dict[T, Times]:
    """Times contenders on the same work.

    All wait while one has its turn. Who fails is left out, and the others go on.

    Args:
        jobs: A job for each contender.
        start: Starts one.
        rounds: How many turns each has.
        failed: Is told of each contender that cannot go on, and why.
        fresh_starts: How many times each is started; the last process races.
        together: Tells of a job whether it may start beside others, after those that
            start one after the other.
        end_s: When no further round begins, on the clock of `time.monotonic`.

    Returns:
        What each contender measured that got to the end.
    """
    racers = _Racers(jobs, start, failed)
    try:
        for _ in range(fresh_starts):
            racers.start_all(together)
        for number in range(rounds):
            if number and time.monotonic() > end_s:
                break
            racers.take_turns()
    finally:
        racers.end_all()
    return racers.times


class _Racers(Generic[T]):
    """The contenders that are still there."""

    def __init__(
        self,
        jobs: Sequence[T],
        start: Callable[[T], Runner],
        failed: Callable[[T, str], None],
    ):
        self.times = {job: Times() for job in jobs}
        self._start, self._failed, self._runners = start, failed, {}

    def start_all(self, together: Callable[[T], bool]) -> None:
        """Starts each anew, and last those that may start together."""
        several = [job for job in self.times if together(job)]
        for job in [job for job in self.times if job not in several]:
            self._attempt(job, functools.partial(self._start_anew, job))
        with futures.ThreadPoolExecutor(len(several) or 1) as pool:
            started = [(job, pool.submit(self._start_anew, job)) for job in several]
        for job, each in started:
            self._attempt(job, each.result)

    def take_turns(self) -> None:
        """Lets each train for a round."""
        for job in list(self.times):
            self._attempt(job, functools.partial(self._take_turn, job))

    def end_all(self) -> None:
        """Ends all."""
        for job in list(self._runners):
            self._end(job)

    def _start_anew(self, job):
        self._end(job)
        self._runners[job] = self._start(job)
        self.times[job].starts.append(self._runners[job].start)

    def _take_turn(self, job):
        self.times[job].rounds.append(self._runners[job].go())

    def _attempt(self, job, turn):
        try:
            turn()
        except Failed as error:
            del self.times[job]
            self._end(job)
            self._failed(job, str(error))

    def _end(self, job):
        if job in self._runners:
            self._runners.pop(job).close()


def race(
    jobs: Sequence[Job],
    rounds: int,
    fresh_starts: int,
    failed: Callable[[Job, str], None],
    verbose: bool = False,
    together: bool = False,
    limit_s: float | None = None,
    end_s: float = math.inf,
) -> list[dict]:
    """Times contenders on the same work, see `take_turns`; they train.

    Each has to be warm after `limit_s` seconds. XLA tries kernels while it compiles, so
    contenders that may compile never start beside others.

    Returns:
        What `summary` makes of each contender that got to the end; the first one's time
        is what ratios refer to.
    """

    def start(job):
        kind = job.parsed.kind
        if kind.works and job.work not in kind.works:
            raise Failed(f"it trains only {', '.join(kind.works)}")
        if WORKS[job.work].own_step:
            if kind.module != "keras_fit":
                raise Failed("it trains no model with a step of its own")
            if job.parsed.xla or job.parsed.steps_per_call > 1:
                raise Failed("the model compiles itself; leave +xla and @N out")
        if kind.by_mpi:
            launcher = mpirun.MPIRUN, "-n", str(job.towers)
            environ = os.environ | mpirun.ALLOWED
            return Runner("scripts.bench", job, verbose, environ, limit_s, launcher)
        return Runner("scripts.bench", job, verbose, limit_s=limit_s)

    def beside(job):
        return together and not job.parsed.may_compile

    times = take_turns(jobs, start, rounds, failed, fresh_starts, beside, end_s)
    steps_ms = {job: [each["step_ms"] for each in times[job].rounds] for job in times}
    reference_ms = steps_ms.get(jobs[0], [])
    return [
        summary(job, times[job].starts, steps_ms[job], reference_ms) for job in times
    ]


def ratio(times: Sequence[float], others: Sequence[float]) -> float | None:
    """Returns the median over rounds of times over others', of the same rounds.

    It is None if the others have not run as many.
    """
    if len(times) != len(others):
        return None
    pairs = zip(times, others, strict=True)
    return statistics.median(own / other for own, other in pairs)


def summary(
    job: Job,
    starts: Sequence[dict],
    rounds_ms: Sequence[float],
    reference_ms: Sequence[float],
) -> dict:
    """Sums up what a contender measured.

    Args:
        job: The contender's job.
        starts: Its answer at each start.
        rounds_ms: Its time of a step in each round.
        reference_ms: That of the contender to compare with, which may have failed.

    Returns:
        Medians; `ratio` is its time over the reference's, the median over rounds, or
        None if the reference has not run as many.
    """
    step_ms = statistics.median(rounds_ms)
    examples = WORKS[job.work].examples * job.towers

    def middle(name):
        values = [start[name] for start in starts]
        return None if None in values else statistics.median(values)

    return {
        "work": job.work,
        "towers": job.towers,
        "contender": job.contender,
        "step_ms": step_ms,
        "examples_per_sec": examples / step_ms * 1000,
        "ratio": ratio(rounds_ms, reference_ms),
        "first_step_s": middle("first_step_s"),
        "host_mb": middle("host_mb"),
        "device_mb": middle("device_mb"),
        "rounds_ms": list(rounds_ms),
        "starts": list(starts),
        "warmup": job.warmup,
        "steps": job.steps,
    }
