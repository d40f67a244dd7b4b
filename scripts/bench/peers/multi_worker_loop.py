"""A contender: `MultiWorkerMirroredStrategy` in a loop written by hand, no metrics."""

import json
import os

from ..worker import Clock, Job, tensorflow_memory_mb
from .hosts import divide_threads, start_followers


def run(job: Job, clock: Clock) -> None:
    """Trains until the clock stops it."""
    addresses = start_followers(_follow, job)
    clock.memory_mb = tensorflow_memory_mb
    clock.start()
    for _ in _steps(job, 0, addresses):
        clock.call_ended()


def _follow(job, rank, addresses):
    for _ in _steps(job, rank, addresses):
        pass


def _steps(job, rank, addresses):
    """Trains; yields after each step."""
    import tensorflow as tf

    from .loops import mirrored_steps

    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": addresses}, "task": task}
    )
    divide_threads(job)
    return mirrored_steps(job, tf.distribute.MultiWorkerMirroredStrategy())
