"""A contender: `MultiWorkerMirroredStrategy` in a loop written by hand, no metrics."""

import json
import os

from .. import works
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
    """Yields after each step."""
    import tensorflow as tf

    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": addresses}, "task": task}
    )
    divide_threads(job)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    share = tf.data.Dataset.from_tensors(works.batch(job.work, 1)).repeat()
    data = strategy.distribute_datasets_from_function(
        lambda _: share.prefetch(tf.data.AUTOTUNE)
    )
    examples = works.WORKS[job.work].examples * job.towers
    with strategy.scope():
        model = works.build(job.work)
        optimizer = works.optimizer(job.work)
        optimizer.build(model.trainable_variables)
        loss = works.loss(reduction="sum")

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True)) / examples
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(value, [v.value for v in variables]), variables)
        return value

    @tf.function
    def step(x, y):
        return strategy.reduce("sum", strategy.run(replica_step, (x, y)), axis=None)

    for x, y in data:
        # As `fit` does, it waits for the loss.
        step(x, y).numpy()
        yield
