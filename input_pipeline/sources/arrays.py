"""Arrays in memory, for users of the Python interface."""

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from towers.input_pipeline.images.decode import is_jpeg
from towers.input_pipeline.sources.base import IndexedSource, Source


class RowSource(IndexedSource):
    """Examples that lie one behind the other, in memory or in a mapped file.

    Args:
        name: used in messages.
        images: [N, ...]: uint8 images, or float32 rows of numbers; a ``np.memmap``
            stays on disk, another array is copied. Or encoded images, a string tensor
            [N].
        labels: int64 [N].
        splits: number of examples for each split; training comes first.
        num_classes: labels are in [0, num_classes).
        class_names: one for each class, or None.
        image_shape: of one image; None in it where they differ.
        origin: where the examples were read, or None.
        note: see ``Source``.
    """

    def __init__(
        self,
        name: str,
        images: np.ndarray | tf.Tensor,
        labels: np.ndarray,
        splits: dict[str, int],
        num_classes: int,
        class_names: Sequence[str] | None,
        image_shape: tuple[int | None, ...],
        origin: Source | None = None,
        note: str = "",
    ):
        self.name = name
        self.num_classes = num_classes
        self.class_names = tuple(class_names) if class_names is not None else None
        self.image_shape = image_shape
        self.splits = splits
        self.note = note
        self.encoded = tf.as_dtype(images.dtype) == tf.string
        self.all_jpeg = self.encoded and bool(tf.reduce_all(is_jpeg(images)))
        self.in_graph = not isinstance(images, np.memmap)
        self._images, self._labels, self._origin = images, labels, origin

    @property
    def origin(self) -> Source:
        """See ``Source.origin``."""
        return self._origin or self

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See ``Source.parse``; encoded images stay numbers until `load`."""
        images, labels = self._tensors
        if self.encoded:
            rows = records
        elif images is None:
            rows = tf.numpy_function(self._read, [records], self._images.dtype)
            rows = tf.ensure_shape(rows, [None, *self.image_shape])
        else:
            rows = tf.gather(images, records)
        return rows, tf.gather(labels, records)

    def load(self, image: tf.Tensor) -> tf.Tensor:
        """See ``Source.load``: copied just before it is decoded, which is faster."""
        return tf.gather(self._tensors[0], image)

    def _read(self, records: np.ndarray) -> np.ndarray:
        return np.asarray(self._images[records])

    @functools.cached_property
    def _tensors(self) -> tuple[tf.Tensor | None, tf.Tensor]:
        # Outside the graph that is being traced: a constant in it may not exceed
        # 2 GiB. On the CPU: that is where tf.data runs.
        with tf.init_scope(), tf.device("/CPU:0"):
            on_disk = isinstance(self._images, np.memmap)
            images = None if on_disk else tf.convert_to_tensor(self._images)
            return images, tf.constant(self._labels)


class ArraySource(RowSource):
    """A source of NumPy arrays.

    Args:
        x: uint8 images [N, H, W, C], or rows of numbers, float32 [N, F]. A
            ``np.memmap`` without test examples stays on disk, except for the examples
            that are used.
        y: integer labels [N].
        x_test: examples for evaluation, in the form of ``x``. None: no test split.
        y_test: integer labels [M].
        num_classes: number of classes. None: the largest label plus one.
        class_names: one name for each class.
        name: name of the source in messages.

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
        images, labels = (_joined(parts) for parts in zip(*pairs.values(), strict=True))
        if num_classes is None:
            num_classes = int(labels.max(initial=-1)) + 1
        if labels.size and not (0 <= labels.min() and labels.max() < num_classes):
            raise ValueError(
                f"labels go from {labels.min()} to {labels.max()}: "
                f"expected 0 to {num_classes - 1}"
            )
        splits = {split: len(part) for split, (_, part) in pairs.items()}
        super().__init__(
            name, images, labels, splits, num_classes, class_names, shapes.pop()
        )


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _checked(
    images: np.ndarray, labels: np.ndarray, split: str
) -> tuple[np.ndarray, np.ndarray]:
    """Images, and labels [N] as int64."""
    images, labels = np.asanyarray(images), np.asarray(labels)
    if (images.ndim, images.dtype) not in ((4, np.uint8), (2, np.float32)):
        raise ValueError(
            f"{split} images are {images.dtype} {images.shape}: expected uint8 of 0 "
            "to 255 and shape [N, H, W, C], or rows of numbers, float32 [N, F]"
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise ValueError(
            f"{split} labels are {labels.dtype} {labels.shape}: expected integers of "
            f"shape ({len(images)},), one for each image"
        )
    return images, labels.astype(np.int64)
