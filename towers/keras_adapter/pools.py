"""Pools of processes, which Keras's `PyDataset` begins by Python's multiprocessing."""

from multiprocessing import util


def end_pools() -> None:
    """Ends pools of processes, as Python does when it exits."""
    # With the priority of what Python ends before it ends other processes.
    util._run_finalizers(0)
