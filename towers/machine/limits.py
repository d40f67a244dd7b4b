"""How many CPUs, and how much memory, this process may use.

`os.cpu_count()` and /proc/meminfo tell of the whole machine, whatever a container may
use of it. TensorFlow follows the affinity of its process, but no quota.
"""

import dataclasses
import math
import os
from pathlib import Path
from typing import NamedTuple

from towers.machine import cgroups

MEMORY_SHARE = "TOWERS_MEMORY_SHARE"
"""Names the part of the memory that is this process's, such as 0.5, in its environment.

Runs that share a machine have it.
"""

# Of memory, what one use of it may take: a cache, or a buffer.
SHARE = 0.25
# Bytes that one use may take where what is free must decide nothing.
SMALL = 2**30
_ROOT = Path("/")


@dataclasses.dataclass(frozen=True)
class Processors:
    """The CPUs of this process.

    Attributes:
        there: All that the machine has.
        allowed: Those that the process may run on: its affinity, as `taskset` sets it.
        quota: CPU seconds in a second that its control groups give it, if they limit
            them.
    """

    there: int
    allowed: int
    quota: float | None = None

    @property
    def limited(self) -> bool:
        """Whether a quota gives less than the CPUs that it may run on."""
        return self.quota is not None and self.quota < self.allowed

    @property
    def seconds(self) -> float:
        """CPU seconds that the process may take in a second."""
        return self.quota if self.limited else float(self.allowed)

    @property
    def count(self) -> int:
        """Threads that can compute at once; a part of a CPU counts as one."""
        return max(1, math.ceil(self.seconds))

    def note(self, what: str = "Threads") -> str:
        """Says in a sentence what a quota has changed; empty without one."""
        if not self.limited:
            return ""
        return (
            f"{what}: {self.count}, as the container may use {self.quota:g} of "
            f"{self.allowed} CPUs."
        )


class Memory(NamedTuple):
    """Memory in bytes, of the machine or of the container.

    Attributes:
        total: What this process may take if nothing else takes any.
        free: What it can take now.
        limited: Whether it is less than the machine's.
    """

    total: int
    free: int
    limited: bool


def processors(root: Path = _ROOT) -> Processors:
    """Tells which CPUs this process may use.

    Args:
        root: The folder of /proc and /sys.
    """
    there = os.cpu_count() or 1
    affine = hasattr(os, "sched_getaffinity")  # not on macOS
    allowed = len(os.sched_getaffinity(0)) if affine else there
    return Processors(there, allowed, min(cgroups.cpu_quotas(root), default=None))


def cpu_count() -> int:
    """Returns how many threads can compute at once, by affinity and quota."""
    return processors().count


def memory(root: Path = _ROOT) -> Memory:
    """Tells how much memory this process may take; see `processors`.

    Raises:
        ValueError: TOWERS_MEMORY_SHARE is no part.
    """
    found, share = _of_container(root), _share()
    return Memory(
        int(found.total * share), int(found.free * share), found.limited or share < 1
    )


def _of_container(root: Path = _ROOT) -> Memory:
    import psutil

    machine = psutil.virtual_memory()
    total, free, limited = machine.total, machine.available, False
    for limit, used in cgroups.memory_limits(root):
        if limit < machine.total:
            limited, total = True, min(total, limit)
            free = min(free, limit - used)
    return Memory(total, max(free, 0), limited)


def _share() -> float:
    text = os.environ.get(MEMORY_SHARE) or "1"
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ValueError(
            f"Received {MEMORY_SHARE}={text}; expected the part of the memory that is "
            "this process's, such as 0.5."
        )
    return share


def share_of_container() -> float:
    """Returns a share of what the container may take; infinity without a limit.

    It is the same however much is free, and whatever else shares the container, for
    what a repeated run has to have again.
    """
    found = _of_container()
    return SHARE * found.total if found.limited else math.inf


def free_memory() -> float:
    """Returns the bytes that this process can still take."""
    return float(memory().free)
