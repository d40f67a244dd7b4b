"""Runs contenders in processes of their own, and lets them read in turn."""

import os
import statistics
from collections.abc import Callable, Sequence

from ..bench.race import Failed, Runner, take_turns
from .contenders import CONTENDERS
from .worker import Job


def start(job: Job, verbose: bool = False) -> Runner:
    """Starts a contender, and waits until it has read its first batches.

    Raises:
        Failed: If it does not get there.
    """
    works = CONTENDERS[job.contender].works
    if works and job.work not in works:
        raise Failed(f"it reads only {', '.join(works)}")
    # Pipelines run on the CPU, also where there is a GPU.
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}
    return Runner("scripts.input_bench", job, verbose, environ)


def race(
    jobs: Sequence[Job],
    rounds: int,
    failed: Callable[[Job, str], None],
    verbose: bool = False,
) -> list[dict]:
    """Times contenders on the same work, see `take_turns`; they read.

    Returns:
        What `summary` makes of each contender that got to the end; the first one's
        speed is what ratios refer to.
    """
    times = take_turns(jobs, lambda job: start(job, verbose), rounds, failed)
    reference = times[jobs[0]].rounds if jobs[0] in times else []
    return [
        summary(job, found.starts[0], found.rounds, reference)
        for job, found in times.items()
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
