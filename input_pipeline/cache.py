"""Decodes a source once and keeps the pixels, where they fit."""

import contextlib
import hashlib
import math
import os
import tempfile

import numpy as np
import tensorflow as tf
from absl import logging

from input_pipeline.pipeline import Pipeline
from input_pipeline.sources.arrays import RowSource
from input_pipeline.sources.base import IndexedSource, Source

CACHES = ("auto", "memory", "disk", "none")

# Of the memory that is free, and of the disk.
_SHARE = 0.25
_BATCH = 256


def keep_decoded(
    source: Source, cache: str = "auto", folder: str | None = None
) -> Source:
    """Returns a source that has its images decoded, if that is possible and worth it.

    Epochs then read pixels by number: in a full shuffle, from any place, and without
    decoding. What it takes is one pass over the data, now. Images have to be of one
    size, and their number known.

    Args:
        source: prepared.
        cache: "memory" or "disk" says where; "auto" takes the memory where the pixels
            fit in a quarter of what is free, else the disk by the same measure if
            there is a folder for it; "none" returns the source itself.
        folder: where the disk's files are kept, also for later runs; needed by "disk".

    Returns:
        A source of the same examples, or the source itself. A line in the log says
        which, and why.

    Raises:
        ValueError: asked for what is not possible.
        tf.errors.OpError: a record is bad; see ``find_bad_record``.
    """
    if cache not in CACHES:
        raise ValueError(f"cache is {cache!r}, expected one of {', '.join(CACHES)}")
    if cache == "disk" and folder is None:
        raise ValueError("cache is 'disk', but there is no folder: name one")
    if cache == "none" or (isinstance(source, IndexedSource) and not source.encoded):
        return source
    if None in (*source.image_shape, *source.splits.values()):
        if cache != "auto":
            raise ValueError(
                f"cache is {cache!r}, but {source.name} has images of different or "
                "unknown size and number: expected 'none', or images of one size"
            )
        return source
    needed = sum(source.splits.values()) * math.prod(source.image_shape)
    if cache == "auto":
        cache = _choose(needed, folder)
    where = "not kept decoded" if cache == "none" else f"kept decoded, cache={cache}"
    logging.info("%s: %.1f MB of pixels, %s", source.name, needed / 2**20, where)
    if cache == "none":
        return source
    if cache == "memory":
        images = np.empty(_shape(source), np.uint8)
        labels = np.empty(len(images), np.int64)
        _fill(source, images, labels)
    else:
        images, labels = _mapped(source, folder)
    return RowSource(
        source.name,
        images,
        labels,
        dict(source.splits),
        source.num_classes,
        source.class_names,
    )


def _choose(needed: int, folder: str | None) -> str:
    if needed <= _SHARE * _free_memory():
        return "memory"
    if folder is None:
        return "none"
    os.makedirs(folder, exist_ok=True)
    disk = os.statvfs(folder)
    return "disk" if needed <= _SHARE * disk.f_bavail * disk.f_frsize else "none"


def _free_memory() -> float:
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
    return max(free, 0.0)


def _mapped(source: Source, folder: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of the cache's files, which are written if there are none."""
    base = os.path.join(folder, f"decoded-{_key(source)}")
    if not os.path.exists(f"{base}.npy"):
        os.makedirs(folder, exist_ok=True)
        labels = np.empty(_shape(source)[0], np.int64)
        # Renamed when whole; the images last, since they say that both are there.
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            path = os.path.join(unfinished, "images.npy")
            images = np.lib.format.open_memmap(path, "w+", np.uint8, _shape(source))
            _fill(source, images, labels)
            images.flush()
            np.save(os.path.join(unfinished, "labels.npy"), labels)
            os.replace(os.path.join(unfinished, "labels.npy"), f"{base}-labels.npy")
            os.replace(path, f"{base}.npy")
    return np.load(f"{base}.npy", mmap_mode="r"), np.load(f"{base}-labels.npy")


def _key(source: Source) -> str:
    """Changes with whatever changes the pixels."""
    files = []
    for split in source.splits:
        for path in source.files(split):
            stat = tf.io.gfile.stat(path)
            files.append((path, stat.length, stat.mtime_nsec))
    facts = (
        source.name,
        tuple(source.image_shape),
        sorted(source.splits.items()),
        files,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _shape(source: Source) -> tuple[int, ...]:
    return (sum(source.splits.values()), *source.image_shape)


def _fill(source: Source, images: np.ndarray, labels: np.ndarray) -> None:
    """Reads all splits, training first."""
    row = 0
    for split in sorted(source.splits, key=["train", "test"].index):
        data = Pipeline(
            source,
            split,
            batch_size=_BATCH,
            image_shape=source.image_shape,
            training=False,
        ).dataset()
        for some, of_them in data.as_numpy_iterator():
            images[row : row + len(some)] = some
            labels[row : row + len(some)] = of_them
            row += len(some)
