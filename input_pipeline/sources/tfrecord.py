"""``tfrecord:GLOB``: files of tf.Examples with an encoded image and a label."""

import glob
import math
import os
import re
from collections.abc import Iterator

import tensorflow as tf

from input_pipeline.sources.base import (
    HELD_OUT,
    BadRecordError,
    Source,
    decode_image,
    held_out,
    shuffle_all,
    walk_tfrecord,
)

_CYCLE_LENGTH = 16
_LABELS_AT_ONCE = 1024


class TFRecordSource(Source):
    """TFRecord files.

    A file whose name, below the part of the glob that has no wildcard, holds one of
    the words validation, valid, val or test is held out; all others are for training.

    Args:
        pattern: glob of the files.
        image_key: field of the JPEG or PNG bytes.
        label_key: field of the int64 label.
        num_classes: None reads all labels and takes the largest plus one.

    Raises:
        ValueError: no file, no record, another format, or a negative label.
    """

    labels_need_checking = True

    def __init__(
        self,
        pattern: str,
        image_key: str = "image/encoded",
        label_key: str = "image/class/label",
        num_classes: int | None = None,
    ):
        if num_classes is not None and num_classes < 1:
            raise ValueError(f"num_classes is {num_classes}, expected at least 1")
        self.name = f"tfrecord:{pattern}"
        self.image_shape = (None, None, 3)
        self._label_field = {label_key: tf.io.FixedLenFeature([], tf.int64)}
        self._fields = {image_key: tf.io.FixedLenFeature([], tf.string)}
        self._fields |= self._label_field
        self._image_key, self._label_key = image_key, label_key
        self._files = _group_by_split(pattern)
        self.splits = dict.fromkeys(self._files)
        self._check_first_record()
        # Until the labels are read, any is allowed.
        self.num_classes = num_classes or math.inf
        if num_classes is None:
            self._count_classes()

    def files(self, split: str) -> list[str]:
        """Paths of one split's files, sorted."""
        return self._files[split]

    def records(
        self, split: str, shuffle_seed: int | tf.Tensor | None = None
    ) -> tf.data.Dataset:
        """Serialized tf.Examples."""
        paths = self.files(split)
        dataset = tf.data.Dataset.from_tensor_slices(paths)
        dataset = shuffle_all(dataset, len(paths), shuffle_seed)
        return dataset.interleave(
            tf.data.TFRecordDataset,
            cycle_length=min(len(paths), _CYCLE_LENGTH),
            num_parallel_calls=tf.data.AUTOTUNE,
        )

    def decode(self, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """(uint8 image [H, W, 3], int64 label [])."""
        fields = tf.io.parse_single_example(record, self._fields)
        image = decode_image(fields[self._image_key], self.image_shape)
        return image, fields[self._label_key]

    def walk(self, path: str) -> Iterator[tuple[str, tf.Tensor]]:
        """See ``Source.walk``."""
        return walk_tfrecord(path)

    def labels(self, path: str, limit: int | None = None) -> tf.data.Dataset:
        """See ``Source.labels``."""
        return (
            tf.data.TFRecordDataset(path)
            .take(-1 if limit is None else limit)
            .batch(_LABELS_AT_ONCE)
            .map(
                lambda records: tf.io.parse_example(records, self._label_field)[
                    self._label_key
                ],
                num_parallel_calls=tf.data.AUTOTUNE,
            )
        )

    def _check_first_record(self) -> None:
        """Finds wrong key names now rather than in the first training step."""
        for path in (path for paths in self._files.values() for path in paths):
            for where, record in self.walk(path):
                found = _field_kinds(where, record.numpy())
                wanted = {self._image_key: "bytes", self._label_key: "int64"}
                if wanted.items() <= found.items():
                    return
                raise ValueError(
                    f"{where} has the fields {_listed(found)} but {_listed(wanted)} "
                    "are expected: pass the names as image_key and label_key"
                )
        raise ValueError(f"{self.name} holds no record: expected at least one")

    def _count_classes(self) -> None:
        """Sets ``num_classes`` and the splits' sizes from the labels."""
        # Imported here, since the checks import the sources.
        from input_pipeline.checks import read_labels

        largest = -1
        for split, paths in self._files.items():
            labels = [read_labels(self, path) for path in paths]
            largest = max(largest, *(found.max(initial=-1) for found in labels))
            self.splits[split] = sum(map(len, labels))
        self.num_classes = int(largest) + 1


def _group_by_split(pattern: str) -> dict[str, list[str]]:
    """Sorts the files of a glob into "train" and "test"."""
    pattern = os.path.expanduser(pattern)
    paths = sorted(
        path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)
    )
    if not paths:
        raise ValueError(
            f"no file matches {pattern!r}: expected TFRecord files, such as "
            "'tfrecord:/data/train-*'; check the path, and quote the pattern"
        )
    fixed = os.path.dirname(re.split(r"[*?\[]", pattern)[0])
    groups: dict[str, list[str]] = {}
    for path in paths:
        words = re.split(r"[^a-z]+", os.path.relpath(path, fixed or ".").lower())
        # The last word is the closest to the file's own name.
        known = [word for word in words if word == "train" or word in HELD_OUT]
        groups.setdefault((known or ["train"])[-1], []).append(path)
    test = held_out(groups)
    found = {"train": groups.get("train"), "test": groups.get(test)}
    return {split: paths for split, paths in found.items() if paths}


def _field_kinds(where: str, serialized: bytes) -> dict[str, str]:
    """Maps the name of each field of a tf.Example to bytes, int64 or float."""
    try:
        fields = tf.train.Example.FromString(serialized).features.feature
    except Exception as error:  # protobuf's DecodeError, without depending on it
        raise BadRecordError(f"{where} is not a tf.Example: {error}") from error
    return {
        key: (fields[key].WhichOneof("kind") or "empty").removesuffix("_list")
        for key in sorted(fields)
    }


def _listed(fields: dict[str, str]) -> str:
    return ", ".join(f"{key} ({kind})" for key, kind in fields.items()) or "none"
