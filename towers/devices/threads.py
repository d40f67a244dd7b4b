"""How many threads TensorFlow computes with.

Logical CPUs divide the cores. Otherwise each operation of each tower spreads over all,
and towers wait for one another.
"""

import os

import tensorflow as tf

from towers.machine import limits


def set_up(parts: int = 1) -> str:
    """Has TensorFlow make no more threads than this process may use CPUs.

    TensorFlow makes one for each CPU that the process may run on, also where a
    container's quota gives it less: the kernel then stops all of them at once, until
    the next tenth of a second. Threads that the user has chosen stay.

    Args:
        parts: Number of towers on the CPUs of this machine. Each gets its part of them.
            Otherwise each operation of each tower would spread over all cores, and
            towers that run side by side would wait for one another there: a step of a
            small network then takes half as long again (BENCHMARKS.md).

    Returns:
        A sentence if a quota has made a difference, else nothing.
    """
    cpus, threading = limits.processors(), tf.config.threading
    inter_op = cpus.count if cpus.limited else 0
    intra_op = max(1, cpus.count // parts) if parts > 1 else inter_op
    # 0 is TensorFlow's word for all CPUs that the process may run on.
    ours = [
        wanted and before in (0, wanted) and variable not in os.environ
        for wanted, before, variable in (
            (
                intra_op,
                threading.get_intra_op_parallelism_threads(),
                "TF_NUM_INTRAOP_THREADS",
            ),
            (
                inter_op,
                threading.get_inter_op_parallelism_threads(),
                "TF_NUM_INTEROP_THREADS",
            ),
        )
    ]
    try:
        if ours[0]:
            threading.set_intra_op_parallelism_threads(intra_op)
        if ours[1]:
            threading.set_inter_op_parallelism_threads(inter_op)
    except RuntimeError:
        ours = []  # once TensorFlow is initialised, its threads stay
    return cpus.note("Threads" if any(ours) else "Threads of the input")


def inter_op() -> int:
    """Returns how many operations TensorFlow runs at once on the CPUs."""
    found = tf.config.threading.get_inter_op_parallelism_threads()
    asked = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    if found == 0 and asked.isdecimal():
        found = int(asked)
    return found or limits.processors().count
