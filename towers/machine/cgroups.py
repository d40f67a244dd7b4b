"""Reads control groups (cgroups, of either version), which limit containers.

Groups are nested, and the limits of all that are around a process count.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


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
