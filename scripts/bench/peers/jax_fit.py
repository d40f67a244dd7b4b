"""A contender: Keras's `fit` on JAX, with `keras.distribution.DataParallel`."""

import itertools
import os

from .. import works
from ..worker import Clock, Job, host_mb
from .keras_fit import fit


def run(job: Job, clock: Clock) -> None:
    """Trains until the clock stops it."""
    os.environ["KERAS_BACKEND"] = "jax"
    # It would take most of a GPU, and leave nothing to the other contenders.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={job.towers} "
        f"{os.environ.get('XLA_FLAGS', '')}"
    )
    import jax
    import keras

    devices = jax.devices()
    if len(devices) < job.towers:
        raise ValueError(f"JAX has {len(devices)} devices, fewer than {job.towers}.")
    devices = devices[: job.towers]
    clock.memory_mb = lambda: (host_mb(), _device_mb(devices))
    batch = works.batch(job.work, job.towers)
    data = (batch for _ in itertools.count())
    clock.start()
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=devices)
    )
    model = works.build(job.work)
    model.compile(works.optimizer(job.work), works.loss(), metrics=["accuracy"])
    fit(model, data, clock)


def _device_mb(devices):
    stats = [device.memory_stats() for device in devices]
    if not all(stats):
        return None  # on CPUs
    return max(each["peak_bytes_in_use"] for each in stats) / 2**20
