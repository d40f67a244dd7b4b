"""Chooses the features of a TFDS data set to read, and to learn."""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from towers.input_pipeline.sources.targets import Target, TargetKind

_IMAGE, _LABEL = "image", "label"
# Names of masks in data sets, if the supervised keys name something else.
_MASKS = ("segmentation_mask", "segmentation_label", "mask", "label")


@dataclasses.dataclass(frozen=True)
class Features:
    """The features that are read.

    Attributes:
        x: the name of the feature that is an example.
        y: the name of the feature that is the target.
        target: the target.
        image_shape: the shape of an image, or of a row of numbers.
        names: the names of numbers that are separate features of a row; else empty.
    """

    x: str
    y: str
    target: Target
    image_shape: tuple[int | None, ...]
    names: tuple[str, ...] = ()

    # For the interface of `columns.Columns`.
    classes = types.MappingProxyType({})
    texts = ()
    notes = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the features of an example."""
        return self.names or (self.x,)

    @property
    def encoded(self) -> bool:
        """Tells whether examples are images."""
        return len(self.image_shape) == 3

    def decoders(self) -> tfds.decode.PartialDecoding:
        """Returns decoders for only these features; images and masks stay bytes."""
        images = [self.x] * self.encoded + [self.y] * (self.target.kind == "mask")
        x = {name: True for name in self.names} if self.names else True
        return tfds.decode.PartialDecoding(
            {self.x: x, self.y: True},
            decoders={name: tfds.decode.SkipDecoding() for name in images},
        )

    def parse(
        self, records: dict[str, Any], ids: Mapping[str, Any]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns examples and targets of a batch of records; none of it has ids."""
        del ids
        x, y = records[self.x], records[self.y]
        if self.names:
            x = tf.stack([tf.cast(x[name], tf.float64) for name in self.names], axis=1)
        elif not self.encoded:
            x = tf.cast(x, tf.float64)
        return x, as_target(self.target, y)


def choose(
    builder: tfds.core.DatasetBuilder,
    name: str,
    asked: TargetKind | None,
    num_classes: int | None,
) -> Features | None:
    """Decides what is read: image and label, or else the set's supervised keys.

    Args:
        builder: the builder of the set.
        name: the name of the source, for messages.
        asked: the requested kind of target; None for the obvious one.
        num_classes: number of classes of a mask's pixels, if the set does not tell.

    Returns:
        The features; None if the set has no such features.

    Raises:
        ValueError: the number of classes is not known, or differs.
    """
    features_of, keys = by_name(builder), builder.info.supervised_keys
    usual = [(_IMAGE, _LABEL)]
    pair = isinstance(keys, tuple) and len(keys) == 2
    if pair and all(isinstance(key, str) and key in features_of for key in keys):
        usual.append(keys)
    inputs = dict.fromkeys(x for x, _ in usual)
    masks = [(x, y) for x in inputs for y in _MASKS] if asked in (None, "mask") else []
    for x, y in (*usual, *masks):
        if x not in features_of or y not in features_of:
            continue
        shape, names = _example(features_of[x])
        target = target_of(features_of[y], y, asked, num_classes)
        if shape is None or target is None:
            continue
        if target.kind == "mask" and not target.size:
            raise ValueError(
                f"{name} has masks in {y!r}, and does not say how many classes they "
                "have: give their number by --num_classes (in Python, num_classes)"
            )
        if num_classes not in (None, target.num_classes):
            raise ValueError(
                f"num_classes is {num_classes}, but {name} has {target.num_classes}: "
                "expected as many, so leave it out"
            )
        return Features(x, y, target, shape, names)
    return None


def by_name(builder: tfds.core.DatasetBuilder) -> dict[str, Any]:
    """Returns the features of a set by their names; empty if they have no names."""
    features = builder.info.features
    return dict(features) if isinstance(features, tfds.features.FeaturesDict) else {}


def no_such(
    builder: tfds.core.DatasetBuilder, name: str, asked: TargetKind | None
) -> ValueError:
    """Makes an error for a set without features that can be read."""
    features_of, keys = by_name(builder), builder.info.supervised_keys
    kinds = ", ".join(
        f"{key} ({type(features_of[key]).__name__})" for key in features_of
    )
    wanted = {
        None: "label (ClassLabel), or supervised keys of images or numbers and of a "
        "class, a mask or numbers (whole ones only with --task=regression)",
        "class": "label (ClassLabel)",
        "numbers": "supervised keys of which the second is of numbers",
        "mask": "segmentation_mask (Image of one channel)",
    }.get(asked, f"{asked}, which no set of TFDS gives here")
    return ValueError(
        f"{name} is not a set of labelled images: expected the features image (Image "
        f"of uint8) and {wanted}; found {kinds or 'none'}"
        f"{f', and supervised keys {keys}' if keys else ''}; choose another set, or, "
        "for columns of numbers, texts and classes, the target with --label_column (in "
        "Python, label_column)"
    )


def _example(feature: Any) -> tuple[tuple[int | None, ...] | None, tuple[str, ...]]:
    """Returns an example's shape, None if there is none, and its numbers' names."""
    if isinstance(feature, tfds.features.Image):
        height, width, channels = feature.shape
        is_bytes = feature.np_dtype == np.uint8
        return ((height, width, channels or 3) if is_bytes else None), ()
    if isinstance(feature, tfds.features.FeaturesDict):
        numbers = [key for key, number in feature.items() if _is_number(number, ())]
        whole = len(numbers) == len(feature)
        return ((len(numbers),) if whole else None), tuple(numbers)
    shape = getattr(feature, "shape", None)
    if _is_number(feature, shape) and len(shape) == 1 and None not in shape:
        return tuple(shape), ()
    return None, ()


def _is_number(feature: Any, shape: Sequence[int | None] | None) -> bool:
    return (
        isinstance(feature, tfds.features.Tensor)
        and not isinstance(feature, tfds.features.ClassLabel)
        and feature.shape == shape
        and np.dtype(feature.np_dtype).kind in "fiub"
    )


def _is_bool(feature: Any) -> bool:
    return np.dtype(feature.np_dtype).kind == "b"


def as_target(target: Target, y: tf.Tensor) -> tf.Tensor:
    """Returns the targets of a batch from the values of its records."""
    if target.kind == "numbers":
        return tf.reshape(tf.cast(y, tf.float64), [-1, target.size])
    return tf.cast(y, tf.int64) if target.kind == "class" else y


def target_of(
    feature: Any,
    name: str,
    asked: TargetKind | None,
    num_classes: int | None = None,
) -> Target | None:
    """Returns the target of a feature; None if it is not of the requested kind."""
    if isinstance(feature, tfds.features.ClassLabel):
        if asked not in (None, "class") or not feature.num_classes:
            return None
        return Target("class", feature.num_classes, tuple(feature.names))
    if isinstance(feature, tfds.features.Image):
        one = feature.shape[-1] == 1 and feature.np_dtype == np.uint8
        if asked not in (None, "mask") or not one:
            return None
        if isinstance(feature, tfds.features.LabeledImage):
            return Target("mask", feature.num_classes, tuple(feature.names))
        return Target("mask", num_classes or 0)
    shape = getattr(feature, "shape", None)
    numbers = _is_number(feature, shape) and None not in shape and len(shape) < 2
    if numbers and shape == () and asked != "numbers" and _is_bool(feature):
        return Target("class", 2, ("False", "True")) if asked != "mask" else None
    if not numbers or asked not in (None, "numbers"):
        return None
    whole = np.dtype(feature.np_dtype).kind != "f"
    if whole and asked is None:
        return None  # its meaning is not clear
    return Target("numbers", int(np.prod(shape)), (name,) if shape == () else None)
