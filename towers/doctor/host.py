"""Whether the host has what training needs: disks, memory, files, cores."""

import errno
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from towers.doctor.finding import Finding, note, ok, wrong

# A checkpoint of a ResNet-50 with Adam has 300 MB, of a small network one.
_CHECKPOINT_MB = 100
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_MB = 2**20


def model_dir(path: str) -> Finding:
    """Checks that a checkpoint can be written, by writing as much and flushing it."""
    if "://" in path:
        return note(f"{path} is remote, and was not written to", path=path)
    try:
        free_mb = _write(path, _CHECKPOINT_MB)
    except OSError as error:
        room = "make room, or " if error.errno in _NO_ROOM else ""
        return wrong(
            f"{path}: {_CHECKPOINT_MB} MB, as for a checkpoint, cannot be written "
            f"({error.strerror}, {_free_mb(path):,} MB free); {room}choose another "
            "--model_dir",
            path=path,
            free_mb=_free_mb(path),
            error=errno.errorcode.get(error.errno),
        )
    text = f"{path} can be written to, {free_mb:,} MB free"
    return ok(text, path=path, free_mb=free_mb)


def data_dir(path: str) -> Finding:
    """Checks that data sets can be written; what is there already may be read-only."""
    if "://" in path:
        return note(f"{path} is remote, and was not written to", path=path)
    try:
        free_mb = _write(path, 1)
    except OSError as error:
        text = f"{path} cannot be written to ({error.strerror})"
        if not _has_files(path):
            return wrong(
                f"{text}, so no data set can be put there; choose another --data_dir",
                path=path,
                error=errno.errorcode.get(error.errno),
            )
        return note(f"{text}; the data sets in it can be read", path=path)
    text = f"{path} can be written to, {free_mb:,} MB free"
    return ok(text, path=path, free_mb=free_mb)


def shared_memory(gpus: int, folder: str = "/dev/shm") -> Finding:
    """Checks the room for what processes and NCCL, among the GPUs, exchange."""
    if not os.path.isdir(folder):
        return note(f"{folder} is not there, which NCCL needs between several GPUs")
    usage = shutil.disk_usage(folder)
    free_mb, total_mb = usage.free // _MB, usage.total // _MB
    text = f"{folder} has {free_mb:,} of {total_mb:,} MB free"
    figures = {"free_mb": free_mb, "total_mb": total_mb}
    if free_mb >= 1024:
        return ok(text, **figures)
    advice = f"{text}; NCCL between several GPUs expects 1,024 (docker --shm-size=1g)"
    # Docker gives 64.
    fails = gpus > 1 and free_mb <= 64
    return wrong(advice, **figures) if fails else note(advice, **figures)


def open_files() -> Finding:
    """Checks how many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    names = ["unlimited" if n == unlimited else f"{n:,}" for n in (soft, hard)]
    text = f"at most {names[0]} open files (hard limit {names[1]})"
    figures = {"soft": soft, "hard": hard}
    if soft == unlimited or soft >= 1024:
        return ok(text, **figures)
    how = "ulimit -n 4096 before training"
    if hard != unlimited and hard < 4096:
        how = "have the hard limit raised (limits.conf, docker --ulimit nofile=4096)"
    text = f"{text}; expected at least 1,024: {how}"
    return wrong(text, **figures) if soft < 256 else note(text, **figures)


def memory(root: Path = Path("/")) -> Finding:
    """Checks the memory that is free, in the machine and its container."""
    import psutil

    machine = psutil.virtual_memory()
    free_mb, total_mb = machine.available // _MB, machine.total // _MB
    for limit_mb, used_mb in _memory_limits(root):
        if limit_mb < total_mb:
            total_mb, free_mb = limit_mb, min(free_mb, limit_mb - used_mb)
    text = f"{free_mb:,} of {total_mb:,} MB free"
    figures = {"free_mb": free_mb, "total_mb": total_mb}
    if free_mb >= 2048:
        return ok(text, **figures)
    advice = (
        f"{text}; TensorFlow alone takes 500, so expected 2,048: end other programs"
    )
    return wrong(advice, **figures) if free_mb < 512 else note(advice, **figures)


def cores(root: Path = Path("/")) -> Finding:
    """Checks how many of the CPU's cores this process may use."""
    there = os.cpu_count() or 1
    affine = hasattr(os, "sched_getaffinity")
    allowed = len(os.sched_getaffinity(0)) if affine else there
    quota = min([*_core_limits(root), float(allowed)])
    figures = {"there": there, "allowed": allowed, "quota": quota}
    if quota < allowed:
        threads = max(1, round(quota))
        return note(
            f"a control group gives this process the time of {quota:g} of {allowed} "
            "cores, but TensorFlow starts threads for all of them; "
            f"TF_NUM_INTRAOP_THREADS={threads} takes as many as there is time for",
            **figures,
        )
    if allowed < there:
        return note(f"{allowed} of {there} may be used (taskset)", **figures)
    return ok(f"all {there} may be used", **figures)


# Disks.


def _existing(path: str) -> str:
    """The folder, or else the nearest above it that is there."""
    path = os.path.abspath(os.path.expanduser(path))
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _write(path: str, size_mb: int) -> int:
    """Writes a file without a name, and leaves nothing.

    Only writing tells: permissions say nothing of root, nor the free space of a quota.

    Returns:
        What is free there, in MB.

    Raises:
        OSError: If it does not fit, or the folder is read-only.
    """
    folder = _existing(path)
    free_mb = _free_mb(folder)
    piece = os.urandom(_MB)  # which no file system makes smaller
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(size_mb):
            # Of a piece for which there is no room, a part may be written at first.
            rest = memoryview(piece)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    return free_mb


def _free_mb(path: str) -> int:
    return shutil.disk_usage(_existing(path)).free // _MB


def _has_files(path: str) -> bool:
    path = os.path.expanduser(path)
    return os.path.isdir(path) and bool(os.listdir(path))


# Control groups (cgroups, of either version), which containers are limited by.


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those around it."""
    own = root / "proc/self/cgroup"
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = top / path.lstrip("/")
        # In a container, the path may be the host's.
        yield from (each for each in (folder, *folder.parents) if each.is_dir())


def _core_limits(root: Path) -> Iterator[float]:
    for folder in _groups(root, "cpu"):
        for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
            if all((folder / name).exists() for name in names):
                text = " ".join((folder / name).read_text() for name in names)
                quota, period = text.split()
                if quota not in ("max", "-1"):
                    yield int(quota) / int(period)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limits, and what is used of each, in MB."""
    for folder in _groups(root, "memory"):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            if (folder / limit).exists() and (folder / used).exists():
                text = (folder / limit).read_text().strip()
                if text != "max":
                    used_bytes = int((folder / used).read_text()) - _reclaimable(folder)
                    yield int(text) // _MB, used_bytes // _MB


def _reclaimable(folder: Path) -> int:
    """Bytes of files in memory, which are dropped where room is needed."""
    lines = (folder / "memory.stat").read_text().splitlines()
    facts = dict(line.split() for line in lines)
    return int(facts.get("total_inactive_file", facts.get("inactive_file", 0)))
