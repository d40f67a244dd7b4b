"""Pools of processes, which Keras's `PyDataset` starts with multiprocessing."""

from multiprocessing import util


def end_pools() -> None:
    """Ends pools of processes, as Python does when it exits."""
    # Python uses this priority for what it ends before other processes.
    util._run_finalizers(0)
