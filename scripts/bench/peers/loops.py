"""Contenders: loops that users write themselves, without metrics.

`tower_loop` has `towers.GradientTowers`, and `loop_by_hand` a tower for each device, in
one `tf.function`. Both divide the threads among the towers.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

import towers

from .. import works
from ..worker import Clock, Job, configure, leave_threads, tensorflow_memory_mb


def run(job: Job, clock: Clock) -> None:
    """Trains until the clock stops it."""
    if job.parsed.name == "mirrored_loop":
        leave_threads()
    placed = configure(job)
    if job.parsed.name == "mirrored_loop":
        steps = mirrored_steps(job, tf.distribute.MirroredStrategy(placed.towers))
    else:
        steps = _tower_steps(job, placed)
    clock.memory_mb = tensorflow_memory_mb
    clock.start()
    for _ in steps:
        clock.call_ended()


def mirrored_steps(job: Job, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Trains under a strategy of as many replicas as the job has towers.

    Yields after each step.
    """
    share = works.dataset(job.work, 1)
    data = strategy.distribute_datasets_from_function(lambda _: share)
    examples = works.WORKS[job.work].examples * job.towers
    with strategy.scope():
        model = works.build(job.work)
        optimizer = _optimizer(job.work)
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


def _tower_steps(job, placed) -> Iterator[None]:
    """Trains in a loop with towers; yields after each step."""
    data = works.dataset(job.work, job.towers)
    way, home, make = job.parsed.way or "parameter_server", placed.home, _by_hand
    if job.parsed.name == "tower_loop":
        make = functools.partial(_gradient_towers, variable_update=way)
        home = placed.towers[0] if way == "replicated" else home
    with tf.device(home):
        model = works.build(job.work)
        optimizer = _optimizer(job.work)
        optimizer.build(model.trainable_variables)
    loss = works.loss()

    def loss_fn(x, y):
        return loss(y, model(x, training=True))

    step = make(loss_fn, model.trainable_variables, optimizer, placed.towers)
    for x, y in data:
        # As `fit` does, it waits for the loss.
        step(x, y).numpy()
        yield


def _optimizer(work):
    """Returns the optimizer, which scales the loss if the model computes in float16."""
    import keras

    optimizer = works.optimizer(work)
    if keras.config.dtype_policy().name == "mixed_float16":
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def _gradient_towers(
    loss_fn, variables, optimizer, towers_, variable_update
) -> Callable:
    """Returns a step by `towers.GradientTowers`."""
    gradient_towers = towers.GradientTowers(
        loss_fn, variables, gpus=towers_, variable_update=variable_update
    )

    @tf.function
    def step(x, y):
        loss, gradients, _ = gradient_towers(x, y)
        gradient_towers.apply(optimizer, gradients)
        return loss

    return step


def _by_hand(loss_fn, variables, optimizer, towers_) -> Callable:
    """Returns a step as TensorFlow's CIFAR-10 tutorial writes it."""
    values = [variable.value for variable in variables]

    @tf.function
    def step(x, y):
        losses, tower_grads = [], []
        parts = tf.split(x, len(towers_)), tf.split(y, len(towers_))
        for device, local_x, local_y in zip(towers_, *parts, strict=True):
            with tf.device(device):
                with tf.GradientTape() as tape:
                    loss = loss_fn(local_x, local_y)
                    scaled = optimizer.scale_loss(loss)
                losses.append(loss)
                tower_grads.append(tape.gradient(scaled, values))
        with tf.device("/cpu:0"):
            optimizer.apply(_average_gradients(tower_grads), variables)
            return tf.reduce_mean(tf.stack(losses))

    return step


def _average_gradients(tower_grads: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Returns the mean of each variable's gradients over the towers."""
    return [
        tf.reduce_mean(tf.stack(grads), axis=0)
        for grads in zip(*tower_grads, strict=True)
    ]
