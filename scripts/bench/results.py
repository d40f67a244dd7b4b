"""Starts contenders that train, and sums up what they measured."""

import os
import statistics
from collections.abc import Sequence

from ..race import Failed, Runner, ratio
from . import mpirun
from .worker import Job
from .works import WORKS


def start(job: Job, verbose: bool = False, limit_s: float | None = None) -> Runner:
    """Starts a contender, and waits until it is warm, for at most `limit_s` seconds.

    Raises:
        Failed: If it does not get there.
    """
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


def summary(
    job: Job, starts: Sequence[dict], rounds: Sequence[dict], reference: Sequence[dict]
) -> dict:
    """Sums up what a contender measured.

    Args:
        job: The contender's job.
        starts: Its answer at each start.
        rounds: Its answer of each round.
        reference: Those of the contender to compare with, which may have failed.

    Returns:
        Medians; `ratio` is its time over the reference's, the median over rounds, or
        None if the reference has not run as many.
    """
    rounds_ms, reference_ms = (
        [answer["step_ms"] for answer in answers] for answers in (rounds, reference)
    )
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
        "rounds_ms": rounds_ms,
        "starts": list(starts),
        "warmup": job.warmup,
        "steps": job.steps,
    }
