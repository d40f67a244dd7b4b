"""A contender: grain, with two processes that decode with simplejpeg."""

import math

import cv2
import grain
import numpy as np
import simplejpeg

from ..works import AREA, RATIO, WORKS

cv2.setNumThreads(1)  # Processes are what is parallel.


def batches(contender, work, folder):
    """Yields batches for ever."""
    height, width, _ = WORKS[work].shape
    dataset = (
        grain.MapDataset.source(_Folder(folder / "folder"))
        .seed(0)
        .shuffle()
        .repeat()
        .random_map(_Crop(height, width))
        .batch(WORKS[work].batch)
        # Of threads in a process, 1, 2 and 16 (its own choice), one was fastest.
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
        .mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    )
    iterator = iter(dataset)
    try:
        yield from iterator
    finally:
        iterator.close()


class _Folder:
    def __init__(self, folder):
        classes = sorted(path.name for path in folder.iterdir())
        self._files = [
            (path, np.int64(classes.index(path.parent.name)))
            for path in sorted(folder.glob("*/*.jpg"))
        ]

    def __len__(self):
        return len(self._files)

    def __getitem__(self, index):
        path, label = self._files[index]
        return path.read_bytes(), label


class _Crop(grain.transforms.RandomMap):
    def __init__(self, height, width):
        self._height = height
        self._width = width

    def random_map(self, element, rng):
        jpeg, label = element
        image = simplejpeg.decode_jpeg(jpeg, fastdct=True, fastupsample=True)
        top, left, height, width = _box(*image.shape[:2], rng)
        image = image[top : top + height, left : left + width]
        image = cv2.resize(image, (self._width, self._height))
        if rng.random() < 0.5:
            image = image[:, ::-1]
        return image, label


def _box(height, width, rng):
    """Draws a crop as TensorFlow does: its top, left, height and width."""
    ratio = rng.uniform(*RATIO)
    most = min(height, width / ratio)
    drawn = rng.uniform(min(math.sqrt(AREA[0] * height * width / ratio), most), most)
    crop_height = max(1, round(drawn))
    crop_width = min(max(1, round(drawn * ratio)), width)
    top = int(rng.integers(height - crop_height + 1))
    left = int(rng.integers(width - crop_width + 1))
    return top, left, crop_height, crop_width
