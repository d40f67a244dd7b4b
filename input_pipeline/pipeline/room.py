"""How many CPUs, and how much memory, a pipeline may take of the machine."""

import tensorflow as tf

from towers.machine import limits

THREADS = limits.cpu_count()


def limit(options: tf.data.Options, threads: int | None, waiting: int = 0) -> None:
    """Has tf.data stay within the container, of whose limits it knows nothing.

    Args:
        options: To be changed.
        threads: Those of the pipeline; `None` if they are TensorFlow's.
        waiting: Threads besides these, which wait and do not compute.
    """
    if threads is not None:
        options.threading.private_threadpool_size = threads + waiting
    options.autotune.cpu_budget = THREADS if threads is None else threads
    memory = limits.memory()
    if memory.limited:
        # By itself, it takes half of the machine's.
        options.autotune.ram_budget = int(limits.SHARE * memory.free)


def shuffle_mb(asked: int) -> int:
    """Returns the memory of the shuffle buffer: less than was asked for, if need be.

    What is free at the moment does not count, as the order depends on it.
    """
    most = limits.share_of_container()
    return asked if asked * 2**20 <= most else int(most / 2**20)


def shuffle_note(asked: int) -> str:
    """Says in a sentence that the shuffle buffer is smaller than asked for, if so."""
    found = shuffle_mb(asked)
    if found == asked:
        return ""
    return (
        f"The shuffle buffer has {found:,} MB instead of {asked:,}, a quarter of what "
        "the container may take."
    )
