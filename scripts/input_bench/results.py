"""Starts contenders that read, and sums up what they measured."""

import os
import statistics
from collections.abc import Sequence

from ..race import Failed, Runner, ratio
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
    speeds, references = ([*map(_speed, some)] for some in (rounds, reference))
    return {
        "work": job.work,
        "contender": job.contender,
        "examples_per_sec": statistics.median(speeds),
        "ratio": ratio(references, speeds),
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
