"""Which GPUs are filled by processes that take no part in sharing."""

from collections.abc import Collection, Sequence

import psutil

from towers.machine.nvml import Driver, Use
from towers.processes import described


class Others:
    """Finds by NVIDIA's driver what others do on GPUs.

    Where it does not tell, or tells of processes by numbers that are not this
    container's, nothing counts as filled.
    """

    def __init__(
        self, driver: Driver | None = None, memory: float = 0.1, compute: float = 0.5
    ):
        """Takes from when on a GPU is filled.

        Args:
            driver: What to ask.
            memory: The part of its memory that others may take.
            compute: The part of the time in which others may compute.
        """
        self._driver = driver or Driver()
        self._memory, self._compute = memory, compute

    def filled(self, places: Sequence[str], pids: Collection[int]) -> set[str]:
        """Finds the places on GPUs that processes fill which are no runs.

        Args:
            places: Such as "GPU-5b8c.../0"; one on no GPU is never filled.
            pids: The processes of runs. Those that they have started are theirs.

        Returns:
            Some of the places.
        """
        gpus = {place: place.partition("/")[0] for place in places}
        asked = {gpu for gpu in gpus.values() if gpu.startswith("GPU-")}
        uses = {gpu: use for gpu in asked if (use := self._driver.use(gpu)) is not None}
        seen = {
            pid for use in uses.values() for pid in (*use.memory_of, *use.compute_of)
        }
        own = {pid for pid in seen if _is_of(pid, pids)}
        # Otherwise what runs use would seem to be somebody else's.
        if not own and not described.numbers_all():
            return set()
        return {
            p for p, gpu in gpus.items() if gpu in uses and self._fill(uses[gpu], own)
        }

    def _fill(self, use: Use, own: Collection[int]) -> bool:
        """Tells whether processes other than `own` fill a GPU."""
        # What is left may be of processes that are not seen here, as a container's.
        memory = use.memory - sum(use.memory_of.get(pid, 0) for pid in own)
        compute = sum(part for pid, part in use.compute_of.items() if pid not in own)
        return memory > self._memory or compute > self._compute


def _is_of(pid: int, pids: Collection[int]) -> bool:
    """Tells whether a process is one of some, or one of these has started it."""
    if pid in pids:
        return True
    try:
        return any(parent.pid in pids for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False  # gone, or somebody else's
