"""Renames the files of a cache once they are whole, and checks them when opened.

Their checksums are in a file beside them: CRC-32 of each block, as in the local store.
Threads compute them as fast as a disk reads.
"""

import concurrent.futures
import contextlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence

from towers.machine import limits
from towers.program import locks, small_file, voice, whole_file, words
from towers.program.progress import over

SUMS = ".sums"
_UNFINISHED = ".unfinished"
_LOCK = "lock"
_BLOCK = 2**24


@contextlib.contextmanager
def written(base: str, ends: Sequence[str]) -> Iterator[str]:
    """Replaces the files of a cache once all of them are written.

    Args:
        base: the beginning of their paths.
        ends: the ends of their paths, such as ".ids".

    Yields:
        The beginning of the paths until then.

    Raises:
        OSError: they cannot be written.
    """
    folder, name = os.path.split(base)
    os.makedirs(folder, exist_ok=True)
    unfinished = tempfile.mkdtemp(_UNFINISHED, f"{name}.", folder)
    try:
        with locks.taken(os.path.join(unfinished, _LOCK)):
            new = os.path.join(unfinished, "new")
            yield new
            sums = {end: _sums(new + end) for end in ends}
            with open(new + SUMS, "w") as file:
                json.dump(sums, file)
            # The checksums come last, as they mark the cache as complete.
            for end in (*ends, SUMS):
                whole_file.rename(new + end, base + end)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def are_good(base: str, ends: Sequence[str]) -> bool:
    """Tells whether the files of a cache are as they were written.

    A line reports faults of existing files. Half-written files of processes that were
    killed are removed from the folder.

    Args:
        base: the beginning of their paths.
        ends: the ends of their paths.
    """
    _remove_abandoned(os.path.dirname(base))
    there = [base + end for end in ends if os.path.exists(base + end)]
    if not there:
        return False
    if fault := _fault(base, ends):
        voice.say(f"{there[0]} cannot be used, as {fault}: the cache is made anew.")
    return not fault


def _fault(base: str, ends: Sequence[str]) -> str:
    try:
        sums = small_file.read_json(base + SUMS, dict)
    except (OSError, ValueError):
        return "its checksums are missing or damaged"
    try:
        for end in ends:
            if sums[end] != _sums(base + end):
                return f"{os.path.basename(base + end)} has another checksum"
    except (OSError, KeyError, TypeError) as error:
        return f"it cannot be checked ({error})"
    return ""


def _sums(path: str) -> list[int]:
    """Returns the size of a file in bytes, and the checksum of each block."""
    size = os.path.getsize(path)
    with (
        open(path, "rb") as file,
        concurrent.futures.ThreadPoolExecutor(limits.cpu_count()) as pool,
    ):
        blocks = range(0, size, _BLOCK)

        def of_block(begin):
            return zlib.crc32(os.pread(file.fileno(), _BLOCK, begin))

        what = f"Computing checksums of {path}, blocks of {words.size(_BLOCK)}"
        sums = pool.map(of_block, blocks)
        return [size, *over(sums, what, len(blocks), "blocks")]


def _remove_abandoned(folder: str) -> None:
    if not os.path.isdir(folder):
        return
    for entry in os.scandir(folder):
        if entry.name.endswith(_UNFINISHED) and _is_abandoned(entry.path):
            shutil.rmtree(entry.path, ignore_errors=True)


def _is_abandoned(unfinished: str) -> bool:
    """Tells whether the process that wrote in a folder has ended."""
    lock = os.path.join(unfinished, _LOCK)
    return os.path.exists(lock) and not locks.is_locked(lock)
