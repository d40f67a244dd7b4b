"""Limits the CPUs and the memory that a pipeline may take of the machine."""

import tensorflow as tf

from towers.machine import limits

THREADS = limits.cpu_count()


def limit(options: tf.data.Options, threads: int | None, waiting: int = 0) -> None:
    """Keeps tf.data within the container, whose limits it does not know.

    Args:
        options: The options to change.
        threads: The number of the pipeline's threads; `None` if they are TensorFlow's.
        waiting: The number of further threads, which wait and do not compute.
    """
    if threads is not None:
        options.threading.private_threadpool_size = threads + waiting
    options.autotune.cpu_budget = THREADS if threads is None else threads
    memory = limits.memory()
    if memory.limited:
        # By default, it takes half of the machine's memory.
        options.autotune.ram_budget = int(limits.SHARE * memory.free)


def shuffle_mb(asked: int) -> int:
    """Returns the memory of the shuffle buffer: less than requested, if need be.

    The free memory does not count, as the order depends on the buffer.
    """
    most = limits.share_of_container()
    return asked if asked * 2**20 <= most else int(most / 2**20)


def shuffle_note(asked: int) -> str:
    """Returns a sentence if the shuffle buffer is smaller than requested, else ""."""
    given = shuffle_mb(asked)
    if given == asked:
        return ""
    return (
        f"The shuffle buffer has {given:,} MB instead of {asked:,}, a quarter of what "
        "the container may take."
    )
