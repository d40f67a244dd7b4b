"""Reads a source once and keeps it, as pixels or as it is encoded, where it fits."""

import contextlib
import math
import os
import tempfile

import numpy as np
import tensorflow as tf
from absl import logging

from towers.input_pipeline import words
from towers.input_pipeline.choices import CACHES
from towers.input_pipeline.pipeline import Pipeline
from towers.input_pipeline.sources.arrays import RowSource
from towers.input_pipeline.sources.base import (
    IndexedSource,
    Source,
    fingerprint,
    size_and_time,
)

# Of the memory that is free, and of the disk.
_SHARE = 0.25
# Where nothing may hang on the machine.
_FIXED_MB = 1024
# In bytes; what TensorFlow expects of a tensor's first element.
_ALIGNMENT = 64
_BATCH = 256
_PART_MB = 8
_SAMPLE = 256


def cached(
    source: Source,
    cache: str = "auto",
    folder: str | None = None,
    deterministic: bool = False,
    image_shape: tuple[int, ...] | None = None,
) -> Source:
    """Returns a source that has its examples at hand, if they fit.

    Epochs then take them by number: in a full shuffle, from any place, without reading
    files or parsing. Images of one size are kept as pixels, and are not decoded again;
    others as they are encoded, unless `image_shape` says that all get one size. What it
    takes is one pass over the data, now.

    Args:
        source: prepared.
        cache: "memory" or "disk" says where; "auto" takes the memory where a quarter of
            what is free is enough, else the disk by the same measure if there is a
            folder for it; "none" returns the source itself. The disk takes pixels only.
        folder: where the disk's files are kept, also for later runs; needed by "disk".
        deterministic: whether "auto" is to decide by the data alone, whose order
            depends on it: whether they fit in 1 GB of memory.
        image_shape: (H, W, C) that every image is resized to before anything random is
            done to it; see ``recipes.takes_whole``. Images that are larger, or differ
            in size, are then kept as pixels of this size. If those do not fit, images
            that differ in size are kept as they are encoded. None if there is no such
            size.

    Returns:
        A source of the same examples, or the source itself. A line in the log says
        which, and why.

    Raises:
        ValueError: asked for what is not possible, or the disk is full.
        tf.errors.OpError: a record is bad; see ``find_bad_record``.
    """
    if cache not in CACHES:
        raise ValueError(f"cache is {cache!r}, expected one of {', '.join(CACHES)}")
    folder = folder and os.path.expanduser(folder)
    if cache == "disk" and folder is None:
        raise ValueError("cache is 'disk', but there is no folder: name one")
    if cache == "none" or (isinstance(source, IndexedSource) and not source.encoded):
        return source
    shape = _pixels_shape(source, image_shape)
    if cache == "disk" and shape is None:
        raise ValueError(
            f"cache is 'disk', but {source.name} has images of different sizes: "
            "expected 'memory' or 'none', images of one size, or a recipe that begins "
            "by resizing them to one ('none', 'cifar')"
        )
    room = _Room(folder, deterministic)
    encoded, pixels, splits = _encoded_bytes(source), None, dict(source.splits)
    if shape is not None:
        # Counted only where that is not more to read than can be kept.
        if None in splits.values() and (cache != "auto" or room.for_any(encoded)):
            splits = {split: _count(source, split, shape) for split in splits}
        if None not in splits.values():
            pixels = sum(splits.values()) * _image_bytes(shape)
    as_encoded = None if None not in source.image_shape else encoded
    what, where = _decide(cache, pixels, as_encoded, room)
    size = pixels if what == "pixels" and pixels is not None else encoded
    kept_as = {"encoded": "encoded images"}.get(what, "pixels")
    kept_as = "numbers" if len(source.image_shape) == 1 else kept_as
    place = {"memory": "kept in memory", "disk": f"kept in {folder}"}
    note = f"{words.size(size)} of {kept_as} {place.get(where, 'not kept')}"
    logging.info("%s: %s", source.name, note)
    if where is None:
        return source
    if what == "encoded":
        images, labels, splits = _read_encoded(source)
    elif where == "memory":
        count = sum(splits.values())
        images, labels = _aligned((count, *shape)), np.empty(count, np.int64)
        _fill(source, images, labels)
        # The tensor is where the array is.
        images = tf.experimental.dlpack.from_dlpack(images.__dlpack__())
    else:
        images, labels = _mapped(source, (sum(splits.values()), *shape), folder)
    kept = RowSource(
        source.name,
        images,
        labels,
        splits,
        source.num_classes,
        source.class_names,
        tuple(source.image_shape) if what == "encoded" else shape,
        source.origin,
        note,
    )
    kept.notes = source.notes
    return kept


def _pixels_shape(
    source: Source, wanted: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """The shape in which all examples can be kept decoded, the smaller of two."""
    own = tuple(source.image_shape)
    if wanted is None or len(own) == 1:
        return None if None in own else own
    if None in own or _image_bytes(wanted) < _image_bytes(own):
        return tuple(wanted)
    return own


def _decide(
    cache: str, pixels: int | None, encoded: int | None, room: "_Room"
) -> tuple[str, str | None]:
    """What to keep, and where.

    Args:
        cache: "auto", "memory" or "disk".
        pixels: Bytes of all pixels; None where they cannot be kept.
        encoded: Bytes of all files, of images that differ in size; otherwise None.
        room: What there is.

    Returns:
        "pixels" or "encoded"; and "memory", "disk" or None.
    """
    if cache == "disk":
        return "pixels", "disk"
    asked = cache == "memory"  # So that what does not fit is not refused.
    if pixels is not None and (room.in_memory(pixels) or (asked and encoded is None)):
        return "pixels", "memory"
    # Encoded images are read in parts, which are then joined.
    if encoded is not None and (asked or room.in_memory(2 * encoded)):
        return "encoded", "memory"
    if pixels is not None and room.on_disk(pixels):
        return "pixels", "disk"
    return "pixels" if encoded is None else "encoded", None


class _Room:
    """Says what fits, in memory or in a folder.

    Args:
        folder: On the disk, or None.
        deterministic: Whether the machine is to have no influence.
    """

    def __init__(self, folder: str | None, deterministic: bool):
        self._folder, self._deterministic = folder, deterministic

    def in_memory(self, size: int) -> bool:
        """Whether so many bytes fit."""
        if self._deterministic:
            return size <= _FIXED_MB * 2**20
        return size <= _SHARE * free_memory()

    def on_disk(self, size: int) -> bool:
        """Whether so many bytes fit; never where nothing may hang on the machine."""
        if self._folder is None or self._deterministic:
            return False
        os.makedirs(self._folder, exist_ok=True)
        disk = os.statvfs(self._folder)
        return size <= _SHARE * disk.f_bavail * disk.f_frsize

    def for_any(self, size: int) -> bool:
        """Whether so many bytes fit anywhere."""
        return self.in_memory(size) or self.on_disk(size)


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
    return max(free, 0.0)


def _encoded_bytes(source: Source) -> int:
    """Size of all files, by a sample where there are many."""
    total = 0
    # Two splits may have parts of the same files.
    for paths in {tuple(source.files(split)) for split in source.splits}:
        some = paths[:: max(len(paths) // _SAMPLE, 1)]
        sizes = [size_and_time(path)[0] for path in some]
        total += sum(sizes) * len(paths) // max(len(some), 1)
    return total


def _count(source: Source, split: str, shape: tuple[int, ...]) -> int:
    """Records of a split, counted where the source does not know."""
    known = source.splits[split]
    if known is not None:
        return known
    batches = source.batches(split, _at_once(shape))
    sizes = batches.map(lambda numbers, _: len(numbers))
    return int(sum(sizes.as_numpy_iterator()))


def _at_once(shape: tuple[int, ...]) -> int:
    """Images to read at once, so that what is on its way is little."""
    return min(max(_PART_MB * 2**20 // _image_bytes(shape), 1), _BATCH)


def _image_bytes(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * np.dtype(_dtype(shape)).itemsize


def _in_order(source: Source) -> list[str]:
    """The splits, training first, as ``IndexedSource`` counts."""
    return sorted(source.splits, key=["train", "test"].index)


def _read_encoded(source: Source) -> tuple[tf.Tensor, np.ndarray, dict[str, int]]:
    """Encoded images, labels, and how many there are in each split."""
    images, labels, splits = [], [], {}
    with tf.device("/CPU:0"):
        for split in _in_order(source):
            data = (
                source.batches(split, _BATCH)
                .map(lambda _, records: source.parse(records))
                .unbatch()
                .map(
                    lambda image, label: (source.load(image), label),
                    num_parallel_calls=tf.data.AUTOTUNE,
                )
                .batch(_BATCH)
            )
            before = sum(map(len, labels))
            for some, of_them in data:
                images.append(some)
                labels.append(of_them.numpy())
            splits[split] = sum(map(len, labels)) - before
        return tf.concat(images, axis=0), np.concatenate(labels), splits


def _mapped(
    source: Source, shape: tuple[int, ...], folder: str
) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of the cache's files, which are written if there are none."""
    base = os.path.join(folder, f"decoded-{fingerprint(source)}")
    if shape[1:] != tuple(source.image_shape):
        base += f"-{'x'.join(map(str, shape[1:]))}"
    if not (os.path.exists(f"{base}.npy") and os.path.exists(f"{base}-labels.npy")):
        os.makedirs(folder, exist_ok=True)
        labels = np.empty(shape[0], np.int64)
        # Renamed when whole; the images last, since they say that both are there.
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            path = os.path.join(unfinished, "images.npy")
            images = _new_file(path, _dtype(shape[1:]), shape)
            _fill(source, images, labels)
            images.flush()
            np.save(os.path.join(unfinished, "labels.npy"), labels)
            os.replace(os.path.join(unfinished, "labels.npy"), f"{base}-labels.npy")
            os.replace(path, f"{base}.npy")
    return np.load(f"{base}.npy", mmap_mode="r"), np.load(f"{base}-labels.npy")


def _new_file(path: str, dtype: type, shape: tuple[int, ...]) -> np.memmap:
    """A mapped file that has its place on the disk: later, a full one is a crash."""
    try:
        images = np.lib.format.open_memmap(path, "w+", dtype, shape)
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.path.getsize(path))
    except OSError as error:
        size = words.size(math.prod(shape) * np.dtype(dtype).itemsize)
        raise ValueError(
            f"{os.path.dirname(os.path.dirname(path))} cannot take {size} of "
            f"pixels ({error.strerror}): choose another folder, or keep nothing"
        ) from error
    return images


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """An array that can be a tensor without being copied."""
    dtype = _dtype(shape[1:])
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _dtype(shape: tuple[int, ...]) -> type:
    """Rows that are no images are of numbers."""
    return np.uint8 if len(shape) == 3 else np.float32


def _fill(source: Source, images: np.ndarray, labels: np.ndarray) -> None:
    """Reads all splits as pixels."""
    row = 0
    for split in _in_order(source):
        data = Pipeline(
            source,
            split,
            batch_size=_at_once(images.shape[1:]),
            image_shape=images.shape[1:],
            training=False,
        ).dataset()
        for some, of_them in data.as_numpy_iterator():
            images[row : row + len(some)] = some
            labels[row : row + len(some)] = of_them
            row += len(some)
