"""Whether the host has what training needs: disks, memory, files, cores."""

import errno
import os
import resource
import shutil
import tempfile
from pathlib import Path

from towers.doctor.finding import Finding, note, ok, wrong
from towers.machine import limits
from towers.program import words

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


def memory(gpus_mb: float = 0, root: Path = Path("/")) -> Finding:
    """Checks the memory that is free, in the machine and its container.

    Args:
        gpus_mb: The memory of all GPUs.
        root: The folder of /proc and /sys.
    """
    found = limits.memory(root)
    free_mb, total_mb = found.free // _MB, found.total // _MB
    text = f"{free_mb:,} of {total_mb:,} MB free"
    figures = {"free_mb": free_mb, "total_mb": total_mb}
    if free_mb < 2048:
        advice = (
            f"{text}; TensorFlow alone takes 500, so expected 2,048: end other programs"
        )
        fails = free_mb < 512
        return wrong(advice, **figures) if fails else note(advice, **figures)
    if total_mb < 2 * gpus_mb:
        return note(
            f"{text}; as a rule of thumb, a host has twice the memory of its GPUs, "
            f"which is {2 * gpus_mb:,.0f} MB here: with less, expect less room for "
            "caches and checkpoints",
            **figures,
            gpus_mb=gpus_mb,
        )
    return ok(text, **figures)


def cores(root: Path = Path("/")) -> Finding:
    """Checks how many of the CPU's cores this process may use."""
    found = limits.processors(root)
    there, allowed = found.there, found.allowed
    figures = {"there": there, "allowed": allowed, "quota": found.seconds}
    if found.limited:
        threads = words.count(found.count, "thread")
        return note(
            f"a control group gives this process the time of {found.quota:g} of "
            f"{allowed} cores, so TensorFlow and the input get {threads} each; "
            "TF_NUM_INTRAOP_THREADS and TF_NUM_INTEROP_THREADS change TensorFlow's",
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
