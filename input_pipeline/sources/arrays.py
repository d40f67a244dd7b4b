"""Arrays in memory, for users of the Python interface."""

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from input_pipeline.sources.base import IndexedSource


class ArraySource(IndexedSource):
    """NumPy arrays as a source.

    Args:
        x: uint8 images [N, H, W, C].
        y: integer labels [N].
        x_test: uint8 images [M, H, W, C], or None for no test split.
        y_test: integer labels [M].
        num_classes: None takes the largest label plus one.
        class_names: one for each class.
        name: used in messages.

    Raises:
        ValueError: shapes, types or labels do not fit.
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        x_test: np.ndarray | None = None,
        y_test: np.ndarray | None = None,
        *,
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        name: str = "arrays",
    ):
        pairs = {"train": (x, y)}
        if x_test is not None or y_test is not None:
            pairs["test"] = (x_test, y_test)
        pairs = {
            split: _checked(images, labels, split)
            for split, (images, labels) in pairs.items()
        }
        shapes = {images.shape[1:] for images, _ in pairs.values()}
        if len(shapes) > 1:
            raise ValueError(
                f"images for training and test have different shapes, {shapes}: "
                "expected one"
            )
        self._images = np.concatenate([images for images, _ in pairs.values()])
        self._labels = np.concatenate([labels for _, labels in pairs.values()])
        if num_classes is None:
            num_classes = int(self._labels.max(initial=-1)) + 1
        if self._labels.size and not (
            0 <= self._labels.min() and self._labels.max() < num_classes
        ):
            raise ValueError(
                f"labels go from {self._labels.min()} to {self._labels.max()}: "
                f"expected 0 to {num_classes - 1}"
            )
        self.name = name
        self.num_classes = num_classes
        self.class_names = tuple(class_names) if class_names is not None else None
        self.image_shape = shapes.pop()
        self.splits = {split: len(labels) for split, (_, labels) in pairs.items()}

    def decode(self, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """(uint8 image [H, W, C], int64 label [])."""
        images, labels = self._tensors
        return images[record], labels[record]

    @functools.cached_property
    def _tensors(self) -> tuple[tf.Tensor, tf.Tensor]:
        # Outside the graph that is being traced: a constant in it may not exceed
        # 2 GiB. On the CPU: that is where tf.data runs.
        with tf.init_scope(), tf.device("/CPU:0"):
            return tf.constant(self._images), tf.constant(self._labels)


def _checked(
    images: np.ndarray, labels: np.ndarray, split: str
) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, H, W, C] and labels [N] as int64."""
    images, labels = np.asarray(images), np.asarray(labels)
    if images.ndim != 4 or images.dtype != np.uint8:
        raise ValueError(
            f"{split} images are {images.dtype} {images.shape}: expected uint8 of 0 "
            "to 255 and shape [N, H, W, C]"
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise ValueError(
            f"{split} labels are {labels.dtype} {labels.shape}: expected integers of "
            f"shape ({len(images)},), one for each image"
        )
    return images, labels.astype(np.int64)
