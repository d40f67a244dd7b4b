"""Contenders that are Keras's `fit` on TensorFlow: towers, one device, replicas."""

import dataclasses
import sys

from .. import works
from ..worker import Clock, Job, configure, leave_threads, tensorflow_memory_mb


def run(job: Job, clock: Clock) -> None:
    """Trains until the clock stops it."""
    import tensorflow as tf

    contender, own_step = job.parsed, works.WORKS[job.work].own_step
    if contender.name in ("one_device", "mirrored", "micro_batches"):
        leave_threads()
    placed = configure(job)
    data = works.dataset(job.work, job.towers)
    if contender.name == "towers" and works.WORKS[job.work].sent == "numbers":
        data = data.map(lambda numbers, _: (numbers,))  # labels stay, too
    clock.memory_mb = tensorflow_memory_mb
    clock.start()
    if contender.name == "mirrored":
        scope = tf.distribute.MirroredStrategy(placed.towers).scope()
    else:
        one_device = contender.name == "one_device"
        scope = tf.device(placed.towers[0] if one_device else placed.home)
    with scope:
        model = _on_devices(job, placed)
        if not own_step:
            model.compile(
                works.optimizer(job.work),
                works.loss(),
                metrics=["accuracy"],
                steps_per_execution=contender.steps_per_call,
                jit_compile=_jit_compile(contender),
            )
    fit(model, data, clock)


def _on_devices(job, placed):
    """Builds what trains on the contender's devices."""
    from towers import multi_gpu_model
    from towers.model.options import UPDATES

    contender = job.parsed
    if contender.name == "towers":
        model = works.build_network(job.work)
        options = dict(contender.options)
        for name in ("jit_compile", "inter_op"):
            options.pop(name, None)
        # What `--variable_update` says by default.
        way = UPDATES[contender.way or "auto"]
        own = [field.name for field in dataclasses.fields(way)]
        of_way = {name: options.pop(name) for name in own if name in options}
        if contender.shards_state:
            of_way["shard_optimizer_state"] = True
        return multi_gpu_model(
            model,
            placed.towers,
            variable_update=way(**of_way),
            shard_embeddings=contender.tables,
            preprocess=works.preprocess(job.work, job.towers),
            **options,
        )
    model = works.build(job.work, job.towers)
    if contender.name == "pipeline":
        return multi_gpu_model(
            model,
            placed.towers,
            stages=job.towers,
            micro_batches=int(contender.way),
        )
    if contender.name == "micro_batches":
        parts = int(contender.way)
        return multi_gpu_model(model, placed.towers[:1], micro_batches=parts)
    return model


def fit(model, data, clock: Clock) -> None:
    """Has Keras train until the clock stops it."""
    import keras

    class Turns(keras.callbacks.Callback):
        first = True

        def on_train_batch_end(self, batch, logs=None):
            # While ways to update variables race, calls belong to the warm-up.
            if self.first or not getattr(model, "is_choosing", False):
                self.first = False
                clock.call_ended()

    model.fit(data, steps_per_epoch=sys.maxsize, verbose=0, callbacks=[Turns()])


def _jit_compile(contender):
    if contender.xla:
        return True
    usual = False if contender.way else "auto"
    return dict(contender.options).get("jit_compile", usual)
