"""Runs contenders in processes of their own, and lets them train in turn."""

import contextlib
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence

from .worker import Job
from .works import WORKS

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Failed(Exception):
    """Says in a line why a contender cannot go on."""


class Runner:
    """A contender's process, from its start to its end."""

    def __init__(self, job: Job, verbose: bool):
        """Starts it, and waits until it is warm.

        Raises:
            Failed: If it does not get there.
        """
        kind = job.parsed.kind
        if kind.works and job.work not in kind.works:
            raise Failed(f"it trains only {', '.join(kind.works)}")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "scripts.bench",
                json.dumps(dataclasses.asdict(job)),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if verbose else subprocess.DEVNULL,
            text=True,
        )
        try:
            self.start = self._answer()
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
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise Failed(f"it ended with exit code {code}; --verbosity=1 shows why")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer


def race(
    jobs: Sequence[Job],
    rounds: int,
    fresh_starts: int,
    failed: Callable[[Job, str], None],
    verbose: bool = False,
) -> list[dict]:
    """Times contenders on the same work.

    They start one after the other, and all wait while one trains. Who fails is left
    out, and the others go on.

    Args:
        jobs: A job for each contender; the first one's time is what ratios refer to.
        rounds: How many times each trains.
        fresh_starts: How many times each is started; the last process races.
        failed: Is told of each contender that cannot go on, and why.
        verbose: Whether the contenders' standard error is shown.

    Returns:
        What `summary` makes of each contender that got to the end.
    """
    starts = {job: [] for job in jobs}
    times = {job: [] for job in jobs}
    runners = {}

    def leave_out(job, error):
        del starts[job]
        if job in runners:
            runners.pop(job).close()
        failed(job, str(error))

    try:
        for _ in range(fresh_starts):
            for job in list(starts):
                if job in runners:
                    runners.pop(job).close()
                try:
                    runners[job] = Runner(job, verbose)
                    starts[job].append(runners[job].start)
                except Failed as error:
                    leave_out(job, error)
        for _ in range(rounds):
            for job in list(starts):
                try:
                    times[job].append(runners[job].go()["step_ms"])
                except Failed as error:
                    leave_out(job, error)
    finally:
        for runner in runners.values():
            runner.close()
    return [summary(job, starts[job], times[job], times[jobs[0]]) for job in starts]


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
    ratio = None
    if len(reference_ms) == len(rounds_ms):
        pairs = zip(rounds_ms, reference_ms, strict=True)
        ratio = statistics.median(ms / reference for ms, reference in pairs)
    examples = WORKS[job.work].examples * job.towers

    def middle(name):
        values = [start[name] for start in starts]
        return None if None in values else statistics.median(values)

    return {
        "work": job.work,
        "towers": job.towers,
        "contender": job.contender,
        "step_ms": step_ms,
        "images_per_sec": examples / step_ms * 1000,
        "ratio": ratio,
        "first_step_s": middle("first_step_s"),
        "host_mb": middle("host_mb"),
        "device_mb": middle("device_mb"),
        "rounds_ms": list(rounds_ms),
        "starts": list(starts),
        "warmup": job.warmup,
        "steps": job.steps,
    }
