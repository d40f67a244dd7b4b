"""``synthetic:HxWxC:CLASSES[:COUNT]``: random images that can be learnt; no files."""

import math

import tensorflow as tf

from towers.input_pipeline.images import draws
from towers.input_pipeline.sources.base import IndexedSource
from towers.input_pipeline.specs import read_synthetic

_DEFAULT_COUNT = 1024
_TEST_FRACTION = 4  # training images for each test image


def open_synthetic(rest: str, seed: int) -> "SyntheticSource":
    """Parses a spec after ``synthetic:``.

    Raises:
        ValueError: it is not HxWxC:CLASSES or HxWxC:CLASSES:COUNT of positive numbers.
    """
    *shape, classes, count = read_synthetic(rest)
    return SyntheticSource(tuple(shape), classes, count or _DEFAULT_COUNT, seed)


class SyntheticSource(IndexedSource):
    """Random images: each class is a random pattern, each image adds noise to it.

    An image depends only on the seed and its index, so every run, thread and machine
    sees the same ones.

    Args:
        image_shape: (H, W, C).
        num_classes: number of patterns.
        count: number of training images; a quarter as many are held out.
        seed: the seed of patterns and noise.
    """

    encoded = False

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        count: int = _DEFAULT_COUNT,
        seed: int = 0,
    ):
        self.name = f"synthetic:{'x'.join(map(str, image_shape))}:{num_classes}:{count}"
        self.image_shape = image_shape
        self.num_classes = num_classes
        sizes = {"train": count, "test": count // _TEST_FRACTION}
        self.splits = {split: size for split, size in sizes.items() if size}
        self._seed = seed

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Draws images, and returns their labels; see ``Source.parse``."""
        labels = records % self.num_classes
        # The patterns have the first streams, one for each class.
        images = self._uniform(labels) + self._uniform(self.num_classes + records)
        return tf.cast(images * 128.0, tf.uint8), labels

    def _uniform(self, streams: tf.Tensor) -> tf.Tensor:
        """Returns [B, H, W, C] in [0, 1)."""
        seed = tf.constant(self._seed, tf.int64)
        values = draws.uniform(seed, streams, math.prod(self.image_shape))
        return tf.reshape(values, [-1, *self.image_shape])
