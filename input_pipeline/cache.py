"""Reads a source once and keeps it, as pixels or as it is encoded, where it fits.

Pixels are kept in memory or on the disk, encoded images in memory.
"""

import contextlib
import math
import os
import tempfile

import numpy as np
import tensorflow as tf
from absl import logging

from towers.input_pipeline.choices import CACHES, RECIPES
from towers.input_pipeline.images import decode
from towers.input_pipeline.images.recipes import takes_whole
from towers.input_pipeline.pipeline import Pipeline
from towers.input_pipeline.records.checks import check_image_shape
from towers.input_pipeline.sources.arrays import RowSource
from towers.input_pipeline.sources.base import (
    IndexedSource,
    Source,
    fingerprint,
    size_and_time,
)
from towers.program import words

# Of the memory that is free, and of the disk.
_SHARE = 0.25
# Where nothing may hang on the machine.
_FIXED_MB = 1024
# In bytes; what TensorFlow expects of a tensor's first element.
_ALIGNMENT = 64
_BATCH = 256
_PART_MB = 8
_SAMPLE = 256
_CALLED = {"pixels": "pixels", "encoded": "encoded images"}


def cached(
    source: Source,
    cache: str = "auto",
    folder: str | None = None,
    deterministic: bool = False,
    image_shape: tuple[int, ...] | None = None,
) -> Source:
    """Keeps the examples of a source in memory or on disk, if they fit.

    Later epochs take the examples by number: in a full shuffle, from any position,
    without reading or parsing files. Images of one size are kept as pixels and are not
    decoded again. Other images are kept as encoded files, unless `image_shape` gives
    all of them one size. This costs one pass over the data, or two if the examples must
    be counted.

    Args:
        source: a prepared source.
        cache: "memory" or "disk". "auto" uses the memory if a quarter of the free
            memory is enough. Otherwise it uses the disk, by the same measure, if there
            is a folder. "none" returns the source itself. On disk, only pixels are
            kept.
        folder: folder for the files of "disk", which later runs use as well.
        deterministic: whether the data alone decide, because their order depends on
            where they are kept. "auto" then keeps up to 1 GB in memory, and nothing on
            disk.
        image_shape: (H, W, C) to which every image is resized before anything random is
            done to it; see ``recipes.takes_whole``. Images that differ in size, or that
            take more bytes than this, are then kept as pixels of this size. If these do
            not fit into memory, images that differ in size are kept as encoded files.
            None: there is no such size.

    Returns:
        A source of the same examples, or the source itself. A line in the log says
        which, and why.

    Raises:
        ValueError: the request is impossible, or the disk is full.
        tf.errors.OpError: a record is bad; see ``find_bad_record``.
    """
    if cache not in CACHES:
        raise ValueError(f"cache is {cache!r}, expected one of {', '.join(CACHES)}")
    if image_shape is not None:
        check_image_shape(source, image_shape)
    folder = folder and os.path.expanduser(folder)
    if cache == "disk" and folder is None:
        raise ValueError("cache is 'disk', but there is no folder: name one")
    if folder is not None and os.path.isfile(folder):
        raise ValueError(f"folder is {folder}, which is a file: name a folder")
    if cache == "none" or (isinstance(source, IndexedSource) and not source.encoded):
        return source
    shape = _pixels_shape(source, image_shape)
    if cache == "disk" and shape is None:
        whole = ", ".join(repr(name) for name in RECIPES if takes_whole(name))
        raise ValueError(
            f"cache is 'disk', but {source.name} has images of different sizes, or of "
            "a size that is not known: expected 'memory' or 'none', or a recipe that "
            f"begins by resizing all of them to one size ({whole})"
        )
    files, pixels, splits = _encoded_bytes(source), None, dict(source.splits)
    memory, disk = _room(folder, deterministic)
    if shape is not None:
        # To count is to read all of it.
        if None in splits.values() and (
            cache != "auto" or _estimate(source, files, shape) <= max(memory, disk)
        ):
            splits = {split: _count(source, split, shape) for split in splits}
        if None not in splits.values():
            pixels = sum(splits.values()) * _image_bytes(shape)
    # Encoded images are read in parts, which are then joined.
    encoded = 2 * files if None in source.image_shape else None
    what, where = _decide(cache, pixels, encoded, memory, disk)
    kept_as = "numbers" if len(source.image_shape) == 1 else _CALLED[what]
    place = {"memory": "kept in memory", "disk": f"kept in {folder}"}
    size = words.size(pixels if what == "pixels" else files)
    note = f"{size} of {kept_as} {place.get(where, 'not kept')}"
    logging.info("%s: %s", source.name, note)
    if where is None:
        return source
    if what == "encoded":
        images, labels, splits = _read_encoded(source)
    elif where == "memory":
        images, labels = _read_pixels(source, (sum(splits.values()), *shape))
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
    cache: str, pixels: int | None, encoded: int | None, memory: float, disk: float
) -> tuple[str, str | None]:
    """What to keep, and where.

    Args:
        cache: "auto", "memory" or "disk".
        pixels: Bytes that all pixels take; None where they cannot be kept.
        encoded: Bytes that encoded images take; None where pixels are kept instead.
        memory: Bytes that may be taken there.
        disk: The same.

    Returns:
        "pixels" or "encoded"; and "memory", "disk", or None where they are not kept.
    """
    if cache == "disk":
        return "pixels", "disk"
    sizes = {"pixels": pixels, "encoded": encoded}
    sizes = {what: size for what, size in sizes.items() if size is not None}
    for what, size in sizes.items():
        if size <= memory:
            return what, "memory"
    if cache == "memory":
        return min(sizes, key=sizes.get), "memory"
    if pixels is not None and pixels <= disk:
        return "pixels", "disk"
    return ("encoded" if pixels is None else "pixels"), None


def _room(folder: str | None, deterministic: bool) -> tuple[float, float]:
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


def _estimate(source: Source, files: int, shape: tuple[int, ...]) -> float:
    """Bytes that examples take, by the size of their first records in their files."""
    split = next(split for split, count in source.splits.items() if count is None)
    for _, records in source.batches(split, _BATCH).take(1):
        if isinstance(records, tf.Tensor) and records.dtype == tf.string:
            size = float(
                tf.reduce_mean(tf.cast(tf.strings.length(records), tf.float64))
            )
            return files / max(size, 1.0) * _image_bytes(shape)
    return files


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


def _read_pixels(
    source: Source, shape: tuple[int, ...]
) -> tuple[tf.Tensor, np.ndarray]:
    """All pixels in a tensor, and the labels."""
    images, labels = _aligned(shape), np.empty(shape[0], np.int64)
    _fill(source, images, labels)
    # The tensor is where the array is.
    return tf.experimental.dlpack.from_dlpack(images.__dlpack__()), labels


def _mapped(
    source: Source, shape: tuple[int, ...], folder: str
) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of the cache's files, which are written if there are none."""
    base = os.path.join(folder, f"decoded-{fingerprint(source)}")
    if shape[1:] != tuple(source.image_shape):
        base += f"-{'x'.join(map(str, shape[1:]))}-{decode.VERSION}"
    kept = _open(base, shape)
    if kept is None:
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
        kept = _open(base, shape)
    return kept


def _open(base: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray] | None:
    """What the files hold; None if they are missing, or not what was written."""
    try:
        images = np.load(f"{base}.npy", mmap_mode="r")
        labels = np.load(f"{base}-labels.npy")
    except (OSError, ValueError, EOFError):
        return None
    whole = images.shape == shape and labels.shape == shape[:1]
    return (images, labels) if whole and images.dtype == _dtype(shape[1:]) else None


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
