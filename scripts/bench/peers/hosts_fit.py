"""Two contenders: towers on several hosts, of one tower each, in Keras's `fit`.

TensorFlow's collectives connect the hosts, or MPI, whose mpirun has started them.
"""

import sys

from .. import works
from ..worker import Clock, Job, tensorflow_memory_mb
from .hosts import divide_threads, start_followers
from .keras_fit import fit


def run(job: Job, clock: Clock) -> None:
    """Trains until the clock stops it."""
    addresses = [] if job.parsed.kind.by_mpi else start_followers(_follow, job)
    clock.memory_mb = tensorflow_memory_mb
    clock.start()
    model, data = _build(job, 0, addresses)
    fit(model, data, clock)


def follow(job: Job) -> None:
    """Trains as one of MPI's other processes."""
    _follow(job, 0, [])


def _follow(job, rank, addresses):
    model, data = _build(job, rank, addresses)
    model.fit(data, steps_per_epoch=sys.maxsize, verbose=0)


def _build(job, rank, addresses):

    from towers import devices, multi_gpu_model
    from towers.cluster import process_group
    from towers.hosts.group import Membership

    divide_threads(job)
    placed = devices.configure(1, hosts="auto" if job.parsed.kind.by_mpi else None)
    if addresses:
        names = tuple(f"host {k}" for k in range(job.towers))
        process_group.join(Membership(rank, tuple(addresses), names))
    data = works.dataset(job.work, job.towers)
    contender = job.parsed
    model = multi_gpu_model(
        works.build(job.work),
        placed.towers,
        variable_update=contender.way or "parameter_server",
    )
    model.compile(
        works.optimizer(job.work),
        works.loss(),
        metrics=["accuracy"],
        steps_per_execution=contender.steps_per_call,
        jit_compile=True if contender.xla else "auto",
    )
    return model, data
