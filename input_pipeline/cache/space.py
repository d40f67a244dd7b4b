"""Estimates the size of examples, and the free memory and disk space."""

import math
import os

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.base import Source
from towers.machine import limits
from towers.machine.limits import free_memory

# The fraction of the free disk space that may be used.
_SHARE = 0.25
_BATCH = 256
_PART_MB = 8


def room(folder: str | None, deterministic: bool) -> tuple[float, float]:
    """Returns the bytes that may be used in memory, and in a folder."""
    if deterministic:
        return min(limits.SMALL, limits.share_of_container()), 0.0
    if folder is None:
        return limits.SHARE * free_memory(), 0.0
    there = os.path.abspath(folder)
    while not os.path.isdir(there):
        there = os.path.dirname(there)
    disk = os.statvfs(there)
    return limits.SHARE * free_memory(), _SHARE * disk.f_bavail * disk.f_frsize


def encoded_bytes(source: Source) -> int:
    """Returns the size of all files, from a sample if there are many."""
    # Two splits may have parts of the same files.
    splits = {tuple(source.files(split)): split for split in source.splits}
    return sum(map(source.bytes_of, splits.values()))


def estimate(source: Source, files: int, shape: tuple[int, ...]) -> float:
    """Returns the bytes of examples, estimated from the first records of files."""
    split = next(split for split, count in source.splits.items() if count is None)
    for _, records in source.batches(split, _BATCH).take(1):
        if isinstance(records, tf.Tensor) and records.dtype == tf.string:
            size = float(
                tf.reduce_mean(tf.cast(tf.strings.length(records), tf.float64))
            )
            return files / max(size, 1.0) * image_bytes(shape)
    return files


def at_once(shape: tuple[int, ...]) -> int:
    """Returns how many images to read at once, to limit the memory in flight."""
    return min(max(_PART_MB * 2**20 // image_bytes(shape), 1), _BATCH)


def image_bytes(shape: tuple[int, ...]) -> int:
    """Returns the bytes of a decoded example."""
    return math.prod(shape) * np.dtype(pixel_type(shape)).itemsize


def pixel_type(shape: tuple[int, ...]) -> type:
    """Returns the type of pixels; rows of numbers keep the type of tables."""
    return np.uint8 if len(shape) == 3 else np.float64
