"""What contenders of several processes with TensorFlow share: addresses, followers."""

import multiprocessing
import os
import socket
from collections.abc import Callable

from ..worker import Job


def start_followers(target: Callable[..., None], job: Job) -> list[str]:
    """Starts a process for each host but the first, and returns the addresses of all.

    `target` gets the job, the host's number and the addresses. It trains for ever: it
    waits for the first host in each step, and ends when that does.
    """
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(job.towers)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in opened]
    for each in opened:
        each.close()
    processes = multiprocessing.get_context("spawn")
    for rank in range(1, job.towers):
        processes.Process(
            target=target, args=(job, rank, addresses), daemon=True
        ).start()
    return addresses


def divide_threads(job: Job) -> None:
    """Gives each process its part of the cores."""
    import tensorflow as tf

    cores = max(1, (os.cpu_count() or 1) // job.towers)
    tf.config.threading.set_intra_op_parallelism_threads(cores)
