"""``tfrecord:GLOB``: TFRecord files of tf.Examples with an image and a label."""

import json
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from input_pipeline.sources.base import walk_tfrecord
from input_pipeline.sources.examples import ExampleFiles, check_kind
from input_pipeline.sources.files import LABELS_AT_ONCE, StreamFiles

# What input_pipeline.convert writes beside the files.
INFO = "dataset_info.json"
CONVERTER = "input_pipeline.convert"


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
