"""Runs contenders in processes of their own, and lets them read in turn."""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence

from ..bench import race as bench_race
from ..bench.race import Failed
from .contenders import CONTENDERS
from .worker import Job


class Runner(bench_race.Runner):
    """A contender's process, from its start to its end."""

    def __init__(self, job: Job, verbose: bool):
        """Starts it, and waits until it has read its first batches.

        Raises:
            Failed: If it does not get there.
        """
        works = CONTENDERS[job.contender].works
        if works and job.work not in works:
            raise Failed(f"it reads only {', '.join(works)}")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "scripts.input_bench",
                json.dumps(dataclasses.asdict(job)),
            ],
            cwd=bench_race.ROOT,
            # Pipelines run on the CPU, also where there is a GPU.
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
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


def race(
    jobs: Sequence[Job],
    rounds: int,
    failed: Callable[[Job, str], None],
    verbose: bool = False,
) -> list[dict]:
    """Times contenders on the same work.

    They start one after the other, and all wait while one reads. Who fails is left out,
    and the others go on.

    Args:
        jobs: A job for each contender; the first one is what ratios refer to.
        rounds: How many times each reads.
        failed: Is told of each contender that cannot go on, and why.
        verbose: Whether the contenders' standard error is shown.

    Returns:
        What `summary` makes of each contender that got to the end.
    """
    runners = {}
    answers = {job: [] for job in jobs}

    def leave_out(job, error):
        if job in runners:
            runners.pop(job).close()
        failed(job, str(error))

    try:
        for job in jobs:
            try:
                runners[job] = Runner(job, verbose)
            except Failed as error:
                leave_out(job, error)
        for _ in range(rounds):
            for job in list(runners):
                try:
                    answers[job].append(runners[job].go())
                except Failed as error:
                    leave_out(job, error)
    finally:
        for runner in runners.values():
            runner.close()
    return [
        summary(job, runner.start, answers[job], answers[jobs[0]])
        for job, runner in runners.items()
    ]


def summary(
    job: Job, start: dict, rounds: Sequence[dict], reference: Sequence[dict]
) -> dict:
    """Sums up what a contender measured.

    Args:
        job: The contender's job.
        start: Its answer at its start.
        rounds: Its answer of each round.
        reference: Those of the contender to compare with, which may have failed.

    Returns:
        Medians over rounds; `ratio` is that of the reference's speed over its own, or
        None if the reference has not run as many.
    """
    speeds = [_speed(each) for each in rounds]
    ratio = None
    if len(reference) == len(rounds):
        pairs = zip(reference, speeds, strict=True)
        ratio = statistics.median(_speed(theirs) / speed for theirs, speed in pairs)
    return {
        "work": job.work,
        "contender": job.contender,
        "examples_per_sec": statistics.median(speeds),
        "ratio": ratio,
        "first_batch_s": start["first_batch_s"],
        "peak_mb": max(each["peak_mb"] for each in rounds),
        "cpu_ms": statistics.median(
            1000 * each["cpu_s"] / each["examples"] for each in rounds
        ),
        "rounds": list(rounds),
        "warmup": job.warmup,
        "examples": job.examples,
    }


def _speed(answer):
    return answer["examples"] / answer["seconds"]
