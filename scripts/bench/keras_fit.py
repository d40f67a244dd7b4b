"""Contenders that are Keras's `fit` on TensorFlow: towers, one device, replicas."""

import sys

from . import works
from .worker import Clock, Job, tensorflow_memory_mb


def run(job: Job, clock: Clock) -> None:
    """Trains until the clock stops it."""
    import tensorflow as tf

    from towers import devices

    contender = job.parsed
    placed = devices.configure(job.towers)
    data = tf.data.Dataset.from_tensors(works.batch(job.work, job.towers)).repeat()
    data = data.prefetch(tf.data.AUTOTUNE)
    clock.memory_mb = tensorflow_memory_mb
    clock.start()
    if contender.name == "mirrored":
        scope = tf.distribute.MirroredStrategy(placed.towers).scope()
    else:
        one_device = contender.name == "one_device"
        scope = tf.device(placed.towers[0] if one_device else placed.home)
    with scope:
        model = works.build(job.work)
        if contender.name == "towers":
            model = _on_towers(model, placed.towers, contender.way)
        model.compile(
            works.optimizer(job.work),
            works.loss(),
            metrics=["accuracy"],
            steps_per_execution=contender.steps_per_call,
            jit_compile=_jit_compile(contender),
        )
    fit(model, data, clock)


def fit(model, data, clock: Clock) -> None:
    """Has Keras train until the clock stops it."""
    import keras

    class Turns(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            clock.call_ended()

    model.fit(data, steps_per_epoch=sys.maxsize, verbose=0, callbacks=[Turns()])


def _on_towers(model, devices, builder):
    from towers import multi_gpu_model

    if builder is not None:
        return multi_gpu_model(model, devices, builder=builder)
    # What `--variable_update` says by default; until there is such a builder, the one
    # that there is.
    try:
        return multi_gpu_model(model, devices, builder="auto")
    except ValueError:
        return multi_gpu_model(model, devices, builder="parameter_server")


def _jit_compile(contender):
    if contender.xla:
        return True
    return False if contender.way else "auto"
