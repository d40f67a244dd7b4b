"""Arrays in memory, for users of the Python interface."""

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from towers.input_pipeline.choices import IGNORED
from towers.input_pipeline.sources import memory
from towers.input_pipeline.sources.base import IndexedSource, Source
from towers.input_pipeline.sources.targets import Target, TargetKind
from towers.program.python_calls import until_exit


class RowSource(IndexedSource):
    """Consecutive examples in memory, or in a mapped file.

    Args:
        name: the name in messages.
        images: [N, ...]: uint8 images, or float32 rows of numbers; a ``np.memmap``
            stays on disk, another array is copied. Or a dict of columns, arrays
            [N, ...].
        labels: as the target requires; masks may be uint8.
        splits: number of examples for each split; training comes first.
        target: the target of a model.
        image_shape: the shape of one image; None in it where images differ.
        origin: the source from which the examples were read, or None.
        note: see ``Source``.
    """

    def __init__(
        self,
        name: str,
        images: np.ndarray | Mapping[str, np.ndarray],
        labels: np.ndarray,
        splits: dict[str, int],
        target: Target,
        image_shape: tuple[int | None, ...],
        origin: Source | None = None,
        note: str = "",
    ):
        self.name = name
        self._take_target(target)
        self.image_shape = image_shape
        self.splits = splits
        self.note = note
        self.encoded = False
        self.in_graph = not isinstance(images, np.memmap)
        self._images, self._labels, self._origin = images, labels, origin

    @property
    def origin(self) -> Source:
        """The source that the examples were read from; see ``Source.origin``."""
        return self._origin or self

    @property
    def memory_bytes(self) -> int:
        """The bytes of the examples."""
        return sum(part.nbytes for part in tf.nest.flatten(self._images))

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes examples and labels from the arrays; see ``Source.parse``."""
        images, labels = self._tensors
        if images is None:
            rows = tf.numpy_function(
                until_exit(self._read), [records], self._images.dtype
            )
            rows = tf.ensure_shape(rows, [None, *self.image_shape])
        else:
            rows = tf.nest.map_structure(lambda part: tf.gather(part, records), images)
        return rows, tf.gather(labels, records)

    def _read(self, records: np.ndarray) -> np.ndarray:
        return np.asarray(self._images[records])

    @functools.cached_property
    def _tensors(self) -> tuple[tf.Tensor | None, tf.Tensor]:
        # Outside the graph that is being traced: a constant in a graph is limited to 2
        # GiB. On the CPU, where tf.data runs.
        with tf.init_scope(), tf.device("/CPU:0"):
            images = None
            if not isinstance(self._images, np.memmap):
                images = tf.nest.map_structure(memory.as_tensor, self._images)
            return images, memory.as_tensor(self._labels)


class ArraySource(RowSource):
    """A source of NumPy arrays: x, and the targets y.

    Args:
        x: uint8 images [N, H, W, C], or rows of numbers, float32 [N, F]. A
            ``np.memmap`` without test examples stays on disk, except for the examples
            that are used.
        y: integer labels [N] of classes; numbers, floats [N] or [N, K]; several labels,
            0 or 1 [N, K]; or masks, integers [N, H, W], where 255 is a pixel to ignore.
        x_test: examples for evaluation, in the form of ``x``. None: no test split.
        y_test: targets of these, in the form of ``y``.
        target: kind of ``y``: "class", "numbers", "labels" or "mask". None: inferred
            from its type and shape.
        num_classes: number of classes. None: the largest label plus one.
        class_names: one name for each class, number or label.
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
        target: TargetKind | None = None,
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        name: str = "arrays",
    ):
        kind = target or _kind_of(np.asarray(y))
        pairs = {"train": (x, y)}
        if x_test is not None or y_test is not None:
            pairs["test"] = (x_test, y_test)
        pairs = {
            split: _checked(images, labels, split, kind)
            for split, (images, labels) in pairs.items()
        }
        shapes = {images.shape[1:] for images, _ in pairs.values()}
        if len(shapes) > 1:
            raise ValueError(
                f"images for training and test have different shapes, {shapes}: "
                "expected one"
            )
        images, labels = (_joined(parts) for parts in zip(*pairs.values(), strict=True))
        checked_target = target_of(kind, labels, num_classes, class_names)
        splits = {split: len(part) for split, (_, part) in pairs.items()}
        super().__init__(name, images, labels, splits, checked_target, shapes.pop())


# The forms of y for each kind of target: types, dimensions, and a description.
_FORMS = {
    "class": ("iu", (1,), "integers of shape ({n},), one for each image"),
    "numbers": ("fiu", (1, 2), "numbers of shape ({n},) or ({n}, K)"),
    "labels": ("fiub", (2,), "0 or 1, of shape ({n}, K)"),
    "mask": ("iu", (3,), "integers of shape ({n}, H, W), one for each pixel"),
}


def _kind_of(y: np.ndarray) -> TargetKind:
    """Infers the kind of target from type and shape."""
    if y.dtype.kind == "f":
        return "numbers"
    if y.ndim == 2:
        if y.dtype.kind != "b":
            raise ValueError(
                f"y is {y.dtype} {y.shape}, which may be numbers or labels of which "
                'several hold: expected target="numbers" or target="labels"'
            )
        return "labels"
    return "mask" if y.ndim == 3 else "class"


def target_of(
    kind: TargetKind,
    y: np.ndarray,
    num_classes: int | None,
    names: Sequence[str] | None,
) -> Target:
    """Returns the target of all examples, after checking their values."""
    names = tuple(names) if names is not None else None
    if kind in ("numbers", "labels"):
        target = Target(kind, y.shape[1], names)
        if num_classes is not None or len(names or range(target.size)) != target.size:
            raise ValueError(
                f"y has {target.size} {kind}, but num_classes is {num_classes} and "
                f"class_names {names}: expected None, and None or as many names"
            )
        if not target.is_good(y).all():
            raise ValueError(
                f"y has other values: expected each to be {target.expected}"
            )
        return target
    classes = y[y != IGNORED] if kind == "mask" else y
    if num_classes is None:
        num_classes = len(names or ()) or int(classes.max(initial=-1)) + 1
    if classes.size and not (0 <= classes.min() and classes.max() < num_classes):
        raise ValueError(
            f"labels go from {classes.min()} to {classes.max()}: "
            f"expected 0 to {num_classes - 1}"
        )
    return Target(kind, num_classes, names)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _checked(
    images: np.ndarray, labels: np.ndarray, split: str, kind: TargetKind
) -> tuple[np.ndarray, np.ndarray]:
    """Returns images, and targets in the types that are kept."""
    images, labels = np.asanyarray(images), np.asarray(labels)
    if (images.ndim, images.dtype) not in ((4, np.uint8), (2, np.float32)):
        raise ValueError(
            f"{split} images are {images.dtype} {images.shape}: expected uint8 of 0 "
            "to 255 and shape [N, H, W, C], or rows of numbers, float32 [N, F]"
        )
    if kind not in _FORMS:
        raise ValueError(
            f"target is {kind!r}: expected one of {', '.join(_FORMS)}, or None"
        )
    types, dimensions, expected = _FORMS[kind]
    fits = labels.ndim in dimensions and labels.dtype.kind in types
    if not fits or labels.shape[:1] != images.shape[:1]:
        raise ValueError(
            f"{split} labels are {labels.dtype} {labels.shape}: expected "
            f"{expected.format(n=len(images))}"
        )
    if kind == "class":
        return images, labels.astype(np.int64)
    if kind != "mask":
        return images, labels.reshape([len(labels), -1]).astype(np.float32)
    if labels.shape[1:] != images.shape[1:3] or images.ndim != 4:
        raise ValueError(
            f"{split} masks are {labels.shape} and images {images.shape}: expected "
            "masks as large as images [N, H, W, C]"
        )
    if labels.size and not (0 <= labels.min() and labels.max() <= IGNORED):
        raise ValueError(
            f"{split} masks go from {labels.min()} to {labels.max()}: expected classes "
            f"from 0 to 254, and {IGNORED} for pixels to ignore"
        )
    return images, labels.astype(np.uint8)
