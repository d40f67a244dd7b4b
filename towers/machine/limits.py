"""How many CPUs, and how much memory, this process may use.

`os.cpu_count()` and /proc/meminfo tell of the whole machine, whatever a container may
use of it. TensorFlow follows the affinity of its process, but no quota.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
    return Processors(there, allowed, min(cpu_quotas(root), default=None))


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
    for limit, used in memory_limits(root):
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


# Reads control groups (cgroups, of either version), which limit containers.
#
# Groups are nested, and the limits of all that are around a process count.


class MemoryLimit(NamedTuple):
    """A limit of memory, in bytes.

    Attributes:
        limit: The most that a group may take.
        used: What it takes now, without what the kernel drops where room is needed.
    """

    limit: int
    used: int


def cpu_quotas(root: Path = Path("/")) -> Iterator[float]:
    """Yields the CPU seconds that each group may take in a second."""
    for folder in _groups(root, "cpu"):
        for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            # One that cannot be read is as good as absent.
            with contextlib.suppress(OSError, ValueError):
                text = " ".join((folder / name).read_text() for name in names)
                quota, period = text.split()
                if quota not in ("max", "-1"):
                    yield int(quota) / int(period)


def memory_limits(root: Path = Path("/")) -> Iterator[MemoryLimit]:
    """Yields the limits of memory. Version 1 calls a very large number no limit."""
    for folder in _groups(root, "memory"):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):
                text = (folder / limit).read_text().strip()
                if text != "max":
                    taken = int((folder / used).read_text()) - _reclaimable(folder)
                    yield MemoryLimit(int(text), taken)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = top / path.lstrip("/")
        # In a container, the path may be the host's.
        yield from (each for each in (folder, *folder.parents) if each.is_dir())


def _reclaimable(folder: Path) -> int:
    """Bytes of files in memory that nothing has asked for lately."""
    lines = (folder / "memory.stat").read_text().splitlines()
    facts = dict(line.split() for line in lines)
    return int(facts.get("total_inactive_file", facts.get("inactive_file", 0)))
