"""A contender: `MirroredStrategy` in a loop written by hand, without metrics."""

from collections.abc import Iterator

import tensorflow as tf

from towers import devices

from .. import works
from ..worker import Clock, Job, leave_threads, tensorflow_memory_mb


def run(job: Job, clock: Clock) -> None:
    """Trains until the clock stops it."""
    leave_threads()
    placed = devices.configure(job.towers)
    strategy = tf.distribute.MirroredStrategy(placed.towers)
    clock.memory_mb = tensorflow_memory_mb
    clock.start()
    for _ in steps(job, strategy):
        clock.call_ended()


def steps(job: Job, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Trains under a strategy of as many replicas as the job has towers.

    Yields after each step.
    """
    import keras

    share = tf.data.Dataset.from_tensors(works.batch(job.work, 1)).repeat()
    data = strategy.distribute_datasets_from_function(
        lambda _: share.prefetch(tf.data.AUTOTUNE)
    )
    examples = works.WORKS[job.work].examples * job.towers
    with strategy.scope():
        model = works.build(job.work)
        optimizer = works.optimizer(job.work)
        if keras.config.dtype_policy().name == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        optimizer.build(model.trainable_variables)
        loss = works.loss(reduction="sum")

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True)) / examples
            scaled = optimizer.scale_loss(value)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(scaled, [v.value for v in variables]), variables)
        return value

    @tf.function
    def step(x, y):
        return strategy.reduce("sum", strategy.run(replica_step, (x, y)), axis=None)

    for x, y in data:
        # As `fit` does, it waits for the loss.
        step(x, y).numpy()
        yield
