"""``tfrecord:GLOB``: files of tf.Examples with an encoded image and a label.

What other kinds of files have in common with it stands here too.
"""

import abc
import json
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from input_pipeline.sources.base import (
    HELD_OUT,
    BadRecordError,
    Source,
    StreamSource,
    held_out,
    shuffle_all,
    walk_tfrecord,
)

# What input_pipeline.convert writes beside the files.
INFO = "dataset_info.json"
CONVERTER = "input_pipeline.convert"

# More records than a file has.
FILE = 2**40
LABELS_AT_ONCE = 1024

_CYCLE_LENGTH = 16
_BLOCK_LENGTH = 16
_SAMPLE = 64


class FileSource(Source):
    """Files that are sorted into splits by their names.

    A file whose name, below the part of the glob that has no wildcard, holds one of
    the words validation, valid, val or test is held out; all others are for training.

    Args:
        kind: what stands before the colon of a spec.
        pattern: glob of the files, or a folder, for all files in it.
        num_classes: None if ``_count_classes`` is to be called.

    Raises:
        ValueError: no file.
    """

    labels_need_checking = True

    def __init__(self, kind: str, pattern: str, num_classes: int | None):
        if num_classes is not None and num_classes < 1:
            raise ValueError(f"num_classes is {num_classes}, expected at least 1")
        self.name = f"{kind}:{pattern}"
        self._files = _group_by_split(kind, pattern)
        self.splits = dict.fromkeys(self._files)
        # Until the labels are read, any is allowed.
        self.num_classes = num_classes or math.inf

    def files(self, split: str) -> list[str]:
        """Paths of one split's files, sorted."""
        return self._files[split]

    def _all_files(self) -> list[str]:
        return [path for paths in self._files.values() for path in paths]

    def _first(self) -> tuple[str, Any]:
        """Where the first record is, and the record."""
        for path in self._all_files():
            for pair in self.walk(path):
                return pair
        raise ValueError(f"{self.name} holds no record: expected at least one")

    def _count_classes(self) -> None:
        """Sets ``num_classes``, unless known, and the splits' sizes from the labels."""
        if self.num_classes < math.inf:
            return
        # Imported here, since the checks import the sources.
        from input_pipeline.checks import read_labels

        largest = -1
        for split, paths in self._files.items():
            labels = [read_labels(self, path) for path in paths]
            largest = max(largest, *(found.max(initial=-1) for found in labels))
            self.splits[split] = sum(map(len, labels))
        self.num_classes = int(largest) + 1


class StreamFiles(FileSource, StreamSource):
    """Files that are read from front to back."""

    @abc.abstractmethod
    def _read(self, path: str | tf.Tensor) -> tf.data.Dataset:
        """The raw records of one file."""

    def records(
        self, split: str, shuffle_seed: tf.Tensor | None = None
    ) -> tf.data.Dataset:
        """See ``StreamSource.records``."""
        paths = self.files(split)
        files = tf.data.Dataset.from_tensor_slices(paths).enumerate()
        files = shuffle_all(files, len(paths), shuffle_seed)

        def read(file, path):
            numbers = tf.data.Dataset.range(file * FILE, (file + 1) * FILE)
            return tf.data.Dataset.zip((numbers, self._read(path)))

        return files.interleave(
            read,
            cycle_length=min(len(paths), _CYCLE_LENGTH),
            # Changing files for each record costs more than reading a small one.
            block_length=_BLOCK_LENGTH,
            num_parallel_calls=tf.data.AUTOTUNE,
        )

    def record_bytes(self, split: str) -> float:
        """See ``StreamSource.record_bytes``."""
        with tf.init_scope():  # the pipeline asks while its graph is built
            first = self._read(tf.constant(self.files(split))[0]).take(_SAMPLE)
            lengths = [len(record) for record in first.as_numpy_iterator()]
        return sum(lengths) / max(len(lengths), 1)


class ExampleFiles(FileSource):
    """Files of tf.Examples, however they are read.

    Args:
        kind: see ``FileSource``.
        pattern: see ``FileSource``.
        image_key: field of the JPEG or PNG bytes, or of pixels as they are, where
            image/height, image/width and image/channels say how many.
        label_key: field of the int64 label.
        num_classes: None reads all labels and takes the largest plus one.

    Raises:
        ValueError: no file.
    """

    def __init__(
        self,
        kind: str,
        pattern: str,
        image_key: str,
        label_key: str,
        num_classes: int | None,
    ):
        super().__init__(kind, pattern, num_classes)
        self.image_shape = (None, None, 3)
        self._label_field = {label_key: tf.io.FixedLenFeature([], tf.int64)}
        self._fields = {image_key: tf.io.FixedLenFeature([], tf.string)}
        self._fields |= self._label_field
        self._image_key, self._label_key = image_key, label_key
        self.reads = image_key, label_key

    def _parse_examples(self, serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Images and labels [B] of tf.Examples [B]."""
        fields = tf.io.parse_example(serialized, self._fields)
        images, labels = fields[self._image_key], fields[self._label_key]
        if not self.encoded:
            pixels = tf.io.decode_raw(images, tf.uint8)
            images = tf.reshape(pixels, [tf.size(labels), *self.image_shape])
        return images, labels

    def _parse_labels(self, serialized: tf.Tensor) -> tf.Tensor:
        """Labels [B] of tf.Examples [B]."""
        return tf.io.parse_example(serialized, self._label_field)[self._label_key]

    def _check_example(self, where: str, serialized: bytes) -> None:
        """Finds wrong key names now rather than in the first training step."""
        found = check_kind(where, serialized)
        wanted = {self._image_key: "bytes", self._label_key: "int64"}
        if not wanted.items() <= found.items():
            raise ValueError(
                f"{where} has the fields {_listed(found)} but {_listed(wanted)} are "
                "expected: pass the names as image_key and label_key"
            )
        # Images may be pixels as they are, all of one size.
        fields = tf.train.Example.FromString(serialized).features.feature
        shape = [
            value
            for name in ("image/height", "image/width", "image/channels")
            for value in fields[name].int64_list.value
        ]
        (image,) = fields[self._image_key].bytes_list.value
        if len(shape) == 3 and len(image) == math.prod(shape):
            self.encoded = False
            self.image_shape = tuple(shape)


class TFRecordSource(ExampleFiles, StreamFiles):
    """TFRecord files.

    Where ``input_pipeline.convert`` has written them, sizes and classes are read from
    the file beside them.

    Args:
        pattern: see ``FileSource``.
        image_key: see ``ExampleFiles``.
        label_key: see ``ExampleFiles``.
        num_classes: None reads all labels and takes the largest plus one.

    Raises:
        ValueError: no file, no record, another format, or a negative label.
    """

    def __init__(
        self,
        pattern: str,
        image_key: str = "image/encoded",
        label_key: str = "image/class/label",
        num_classes: int | None = None,
    ):
        super().__init__("tfrecord", pattern, image_key, label_key, num_classes)
        info = _read_info(self._all_files())
        if info:
            self._take_over(info, num_classes)
        where, record = self._first()
        self._check_example(where, record.numpy())
        self._count_classes()

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See ``Source.parse``."""
        return self._parse_examples(records)

    def walk(self, path: str) -> Iterator[tuple[str, tf.Tensor]]:
        """See ``Source.walk``."""
        for where, record in walk_tfrecord(path):
            check_kind(where, record.numpy())
            yield where, record

    def labels(self, path: str, limit: int | None = None) -> tf.data.Dataset:
        """See ``Source.labels``."""
        records = self._read(path).take(-1 if limit is None else limit)
        return records.batch(LABELS_AT_ONCE).map(
            self._parse_labels, num_parallel_calls=tf.data.AUTOTUNE
        )

    def _read(self, path: str | tf.Tensor) -> tf.data.Dataset:
        return tf.data.TFRecordDataset(path)

    def _take_over(self, info: dict[str, Any], num_classes: int | None) -> None:
        """Believes what the converter has written."""
        self.num_classes = num_classes or info["num_classes"]
        if info["class_names"] and self.num_classes == info["num_classes"]:
            self.class_names = tuple(info["class_names"])
        self.image_shape = tuple(info["image_shape"])
        for split, paths in self._files.items():
            known = [info["files"][os.path.basename(path)] for path in paths]
            self.splits[split] = sum(file["examples"] for file in known)


def _read_info(paths: list[str]) -> dict[str, Any] | None:
    """What the converter has written beside these files, if it has.

    Raises:
        ValueError: a file is not as the converter has written it.
    """
    (folder, *others) = {os.path.dirname(path) for path in paths}
    path = os.path.join(folder, INFO)
    if others or not tf.io.gfile.exists(path):
        return None
    try:
        with tf.io.gfile.GFile(path) as file:
            info = json.load(file)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; convert again") from error
    # TFDS writes a file of this name too.
    if info.get("written_by") != CONVERTER:
        return None
    for path in paths:
        known = info["files"].get(os.path.basename(path))
        if known is None:
            return None
        if (size := tf.io.gfile.stat(path).length) != known["bytes"]:
            raise ValueError(
                f"{path} has {size} bytes, but {INFO} beside it says {known['bytes']}: "
                "copy or convert it again"
            )
    return info


def _group_by_split(kind: str, pattern: str) -> dict[str, list[str]]:
    """Sorts the files of a glob into "train" and "test"."""
    pattern = os.path.expanduser(pattern)
    if tf.io.gfile.isdir(pattern):
        pattern = os.path.join(pattern, "*")
    paths = sorted(
        path
        for path in _glob(pattern)
        if not os.path.basename(path).startswith(".")
        # TFDS and the converter describe their files beside them.
        and not path.endswith(".json")
        and not tf.io.gfile.isdir(path)
    )
    if not paths:
        raise ValueError(
            f"no file matches {pattern!r}: expected files, such as "
            f"'{kind}:/data/train-*'; check the path, and quote the pattern"
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


def _glob(pattern: str) -> set[str]:
    """The paths of a glob on any file system; ``**`` is any depth of folders."""
    head, deep, tail = pattern.partition("**/")
    if not deep:
        return set(tf.io.gfile.glob(pattern))
    return {
        path
        for root in _glob(head.rstrip("/")) or {head or "."}
        for folder, _, _ in tf.io.gfile.walk(root)
        for path in _glob(os.path.join(folder, tail))
    }


def check_kind(where: str, serialized: bytes) -> dict[str, str]:
    """Maps the name of each field of a tf.Example to bytes, int64 or float.

    TensorFlow's own message would hold the bytes, and Python fails to read that.

    Raises:
        BadRecordError: it is not a tf.Example.
    """
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
