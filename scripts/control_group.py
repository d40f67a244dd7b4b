"""A control group (cgroup) for a process: the quota that a container would have.

One that reads and writes a disk more slowly is another.

It is made inside the group of this process, so that all limits that are there still
hold. That takes root, and a file system of groups that can be written to.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_TOP = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000


@contextlib.contextmanager
def quota(cpus: float | None, memory_mb: int | None) -> Iterator[list[str]]:
    """Makes a group, and removes it at the end, when its processes have ended.

    Args:
        cpus: CPU seconds that its processes may take in a second; None: as many as now.
        memory_mb: Memory that they may take; None: as much as now.

    Yields:
        What to put before a command that is to run inside.

    Raises:
        OSError: Groups cannot be made here.
    """
    quota_us = cpus and int(cpus * _PERIOD_US)
    limit = memory_mb and memory_mb * 2**20
    with contextlib.ExitStack() as stack:
        if (_TOP / "cgroup.controllers").exists():
            files = {
                "cpu.max": quota_us and f"{quota_us} {_PERIOD_US}",
                "memory.max": limit,
            }
            folders = [stack.enter_context(_folder(_TOP, "", files))]
        else:
            of_cpu = {"cpu.cfs_period_us": _PERIOD_US, "cpu.cfs_quota_us": quota_us}
            of_memory = {"memory.limit_in_bytes": limit}
            folders = [
                stack.enter_context(_folder(_TOP / name, name, files))
                for name, files in (("cpu", of_cpu), ("memory", of_memory))
            ]
        yield _entering(folders)


@contextlib.contextmanager
def disk(mb_per_s: int | None, folder: str) -> Iterator[list[str]]:
    """Makes a group whose processes read and write a disk no faster.

    Args:
        mb_per_s: For reading, and as much for writing; None: as fast as it is.
        folder: Lies on that disk.

    Yields:
        What to put before a command that is to run inside.

    Raises:
        OSError: Groups cannot be made here.
    """
    if mb_per_s is None:
        yield []
        return
    number, rate = os.stat(folder).st_dev, mb_per_s * 2**20
    # Limits are of whole disks.
    part = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    whole = part.parent if (part / "partition").exists() else part
    device = (whole / "dev").read_text().strip()
    if (_TOP / "cgroup.controllers").exists():
        top, name = _TOP, ""
        files = {"io.max": f"{device} rbps={rate} wbps={rate}"}
    else:
        top, name = _TOP / "blkio", "blkio"
        kinds = "read_bps_device", "write_bps_device"
        files = {f"blkio.throttle.{kind}": f"{device} {rate}" for kind in kinds}
    with _folder(top, name, files) as made:
        yield _entering([made])


@contextlib.contextmanager
def _folder(top: Path, controller: str, files: dict[str, object]) -> Iterator[Path]:
    """A group of a controller, inside our own."""
    own = "/"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            own = path
    made = top / own.lstrip("/") / f"towers-{os.getpid()}"
    made.mkdir()
    try:
        for name, value in files.items():
            if value is not None:
                (made / name).write_text(str(value))
        yield made
    finally:
        made.rmdir()


def _entering(folders: Sequence[Path]) -> list[str]:
    writes = [f"echo $$ > {folder}/cgroup.procs" for folder in folders]
    return ["sh", "-c", " && ".join([*writes, 'exec "$@"']), "sh"]
