"""What examples take in memory or on the disk, and what there is."""

import contextlib
import math
import os

import numpy as np
import tensorflow as tf

from towers.input_pipeline.choices import MEMORY_SHARE
from towers.input_pipeline.sources.base import Source, size_and_time

# Of the memory that is free, and of the disk.
_SHARE = 0.25
# Where nothing may hang on the machine.
_FIXED_MB = 1024
_BATCH = 256
_PART_MB = 8
_SAMPLE = 256


def room(folder: str | None, deterministic: bool) -> tuple[float, float]:
    """Bytes that may be taken in memory, and in a folder."""
    if deterministic:
        return _FIXED_MB * 2**20, 0.0
    if folder is None:
        return _SHARE * free_memory(), 0.0
    there = os.path.abspath(folder)
    while not os.path.isdir(there):
        there = os.path.dirname(there)
    disk = os.statvfs(there)
    return _SHARE * free_memory(), _SHARE * disk.f_bavail * disk.f_frsize


def free_memory() -> float:
    """Bytes that this process can still take; none where nobody can tell."""
    free = 0.0
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/meminfo") as lines:
            facts = dict(line.split(":", 1) for line in lines)
        free = float(facts["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):
        # A container's own limit.
        with open("/sys/fs/cgroup/memory.max") as limit:
            with open("/sys/fs/cgroup/memory.current") as taken:
                free = min(free, float(limit.read()) - float(taken.read()))
    return max(free, 0.0) * _share()


def ram_budget_mb() -> int | None:
    """Memory for batches that are read ahead; `None` to leave it to tf.data.

    As tf.data does, it takes half, where runs share the machine: of this one's part.
    """
    return int(free_memory() / 2 / 2**20) or 1 if _share() < 1 else None


def _share() -> float:
    """The part of the memory that is this process's, where runs share the machine."""
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


def encoded_bytes(source: Source) -> int:
    """Size of all files, by a sample where there are many."""
    total = 0
    # Two splits may have parts of the same files.
    for paths in {tuple(source.files(split)) for split in source.splits}:
        some = paths[:: max(len(paths) // _SAMPLE, 1)]
        sizes = [size_and_time(path)[0] for path in some]
        total += sum(sizes) * len(paths) // max(len(some), 1)
    return total


def estimate(source: Source, files: int, shape: tuple[int, ...]) -> float:
    """Bytes that examples take, by the size of their first records in their files."""
    split = next(split for split, count in source.splits.items() if count is None)
    for _, records in source.batches(split, _BATCH).take(1):
        if isinstance(records, tf.Tensor) and records.dtype == tf.string:
            size = float(
                tf.reduce_mean(tf.cast(tf.strings.length(records), tf.float64))
            )
            return files / max(size, 1.0) * image_bytes(shape)
    return files


def count_records(source: Source, split: str, shape: tuple[int, ...]) -> int:
    """Records of a split, counted where the source does not know."""
    known = source.splits[split]
    if known is not None:
        return known
    batches = source.batches(split, at_once(shape))
    sizes = batches.map(lambda numbers, _: len(numbers))
    return int(sum(sizes.as_numpy_iterator()))


def at_once(shape: tuple[int, ...]) -> int:
    """Images to read at once, so that what is on its way is little."""
    return min(max(_PART_MB * 2**20 // image_bytes(shape), 1), _BATCH)


def image_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of an example that is decoded."""
    return math.prod(shape) * np.dtype(pixel_type(shape)).itemsize


def pixel_type(shape: tuple[int, ...]) -> type:
    """Rows that are no images are of numbers."""
    return np.uint8 if len(shape) == 3 else np.float32
