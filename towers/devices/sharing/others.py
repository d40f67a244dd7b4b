"""Finds GPUs that are filled by processes outside of sharing."""

from collections.abc import Collection, Sequence

import psutil

from towers.machine.nvml import Driver, Use
from towers.processes import described


class Others:
    """Asks NVIDIA's driver what other processes do on GPUs.

    If the driver does not tell, or gives process numbers from outside this container,
    no place counts as filled.
    """

    def __init__(
        self, driver: Driver | None = None, memory: float = 0.1, compute: float = 0.5
    ):
        """Takes the limits above which a GPU is filled.

        Args:
            driver: The driver to ask.
            memory: The fraction of its memory that others may use.
            compute: The fraction of the time in which others may compute.
        """
        self._driver = driver or Driver()
        self._memory, self._compute = memory, compute

    def filled(self, places: Sequence[str], pids: Collection[int]) -> set[str]:
        """Finds the places on GPUs that are filled by processes other than runs.

        Args:
            places: Places such as "GPU-5b8c.../0"; a place on no GPU is never filled.
            pids: The processes of runs. Their child processes count as theirs.

        Returns:
            The filled places.
        """
        gpus = {place: place.partition("/")[0] for place in places}
        asked = {gpu for gpu in gpus.values() if gpu.startswith("GPU-")}
        uses = {gpu: use for gpu in asked if (use := self._driver.use(gpu)) is not None}
        seen = {
            pid for use in uses.values() for pid in (*use.memory_of, *use.compute_of)
        }
        own = {pid for pid in seen if _is_of(pid, pids)}
        # Otherwise the runs' own use would count as another program's.
        if not own and not described.numbers_all():
            return set()
        return {
            p for p, gpu in gpus.items() if gpu in uses and self._fill(uses[gpu], own)
        }

    def _fill(self, use: Use, own: Collection[int]) -> bool:
        """Tells whether processes other than `own` fill a GPU."""
        # The rest may belong to processes that are not visible here, as a container's.
        memory = use.memory - sum(use.memory_of.get(pid, 0) for pid in own)
        compute = sum(part for pid, part in use.compute_of.items() if pid not in own)
        return memory > self._memory or compute > self._compute


def _is_of(pid: int, pids: Collection[int]) -> bool:
    """Tells whether a process is in `pids`, or was started by one of them."""
    if pid in pids:
        return True
    try:
        return any(parent.pid in pids for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False  # gone, or somebody else's
