"""Reads all pixels of a source, and keeps them on disk."""

import math
import os

import numpy as np

from towers.input_pipeline import checked_files
from towers.input_pipeline.cache.space import at_once, pixel_type
from towers.input_pipeline.images import decode
from towers.input_pipeline.pipeline import Pipeline
from towers.input_pipeline.sources.base import Source, fingerprint
from towers.program import words
from towers.program.progress import Progress

# The ends of the names of pixel files, and of label files.
_ENDS = (".npy", "-labels.npy")


def in_order(source: Source) -> list[str]:
    """Returns the splits, training first, as ``IndexedSource`` counts."""
    return sorted(source.splits, key=["train", "test"].index)


def map_pixels(
    source: Source, shape: tuple[int, ...], folder: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns images and labels of the cache's files, and writes missing files."""
    base = os.path.join(folder, f"decoded-{fingerprint(source)}")
    if shape[1:] != tuple(source.image_shape):
        base += f"-{'x'.join(map(str, shape[1:]))}-{decode.VERSION}"
    good = checked_files.are_good(base, _ENDS)
    if not good or np.load(f"{base}.npy", mmap_mode="r").shape != shape:
        labels = _labels(source, shape)
        with checked_files.written(base, _ENDS) as new:
            images = _new_file(f"{new}.npy", pixel_type(shape[1:]), shape)
            _fill(source, images, labels)
            images.flush()
            np.save(f"{new}-labels.npy", labels)
    return np.load(f"{base}.npy", mmap_mode="r"), np.load(f"{base}-labels.npy")


def _labels(source: Source, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an array for the targets of all examples, whose images have a shape."""
    target = source.target
    if target.kind == "mask":
        return np.empty(shape[:3], np.uint8)
    return np.empty((shape[0], *target.row_shape), target.dtype)


def _new_file(path: str, dtype: type, shape: tuple[int, ...]) -> np.memmap:
    """Returns a mapped file with reserved disk space: a full disk would crash later."""
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


def _fill(source: Source, images: np.ndarray, labels: np.ndarray) -> None:
    """Reads all splits as pixels."""
    row = 0
    with Progress(f"Decoding {source.name}", len(images), "images") as progress:
        for split in in_order(source):
            data = Pipeline(
                source,
                split,
                batch_size=at_once(images.shape[1:]),
                image_shape=images.shape[1:],
                training=False,
                exact=True,
            ).dataset()
            for some, of_them, *_ in data.as_numpy_iterator():
                images[row : row + len(some)] = some
                labels[row : row + len(some)] = of_them
                row += len(some)
                progress.add(len(some))
