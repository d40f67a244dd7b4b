"""Files of tf.Examples with an image, or a row of numbers, and a label."""

import concurrent.futures
import math
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from towers.input_pipeline.local_store.store import LocalStore
from towers.input_pipeline.sources import label_counts, label_notes
from towers.input_pipeline.sources.files.bad_records import read_labels
from towers.input_pipeline.sources.files.file_source import FileSource
from towers.input_pipeline.sources.files.record import Record
from towers.input_pipeline.sources.label_counts import LabelCounts
from towers.machine import limits
from towers.program.progress import EARLY_S, over

LABELS_AT_ONCE = 1024
# With more classes than this, some may have no record.
_MANY = 1000

# The field in which `convert` writes rows of numbers.
ROW = "features"


class ExampleFiles(FileSource):
    """Files of tf.Examples, in any format.

    If the field holds floats, "images" are rows: float32 [F], as long as the first
    record's row.

    Args:
        pattern: see ``FileSource``.
        image_column: field of the JPEG or PNG bytes, or of raw pixels, whose shape is
            in image/height, image/width and image/channels; None for image/encoded, or,
            if there is none, for a row in ``features``.
        label_column: field of the int64 label; None for image/class/label.
        num_classes: see ``FileSource``.
        skip_bad: see ``FileSource``.
        local_store: see ``FileSource``.
        findings: a file, without its suffix, for the results of reading all labels,
            which later runs use. None: each run reads them.

    Raises:
        ValueError: there is no file.
    """

    def __init__(
        self,
        pattern: str,
        image_column: str | None = None,
        label_column: str | None = None,
        num_classes: int | None = None,
        skip_bad: bool = False,
        local_store: LocalStore | None = None,
        findings: str | None = None,
    ):
        super().__init__(pattern, num_classes, skip_bad, 0, local_store)
        self._findings = findings and f"{findings}.json"
        # The number of records of each file, where known.
        self._counts: dict[str, int] = {}
        self.image_shape = (None, None, 3)
        self._may_be_row = image_column is None
        image_column = image_column or "image/encoded"
        label_column = label_column or "image/class/label"
        self._label_field = {label_column: tf.io.FixedLenFeature([], tf.int64)}
        self._fields = {image_column: tf.io.FixedLenFeature([], tf.string)}
        self._fields |= self._label_field
        self._image_column, self._label_column = image_column, label_column
        self.reads = image_column, label_column
        self.image_fields, self.label_field = (image_column,), label_column

    def _parse_examples(self, serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns images and labels [B] of tf.Examples [B]."""
        fields = tf.io.parse_example(serialized, self._fields)
        images, labels = fields[self._image_column], fields[self._label_column]
        if not self.encoded and images.dtype == tf.string:
            pixels = tf.io.decode_raw(images, tf.uint8)
            images = tf.reshape(pixels, [tf.size(labels), *self.image_shape])
        return images, labels

    def _parse_labels(self, serialized: tf.Tensor) -> tf.Tensor:
        """Returns labels [B] of tf.Examples [B]."""
        return tf.io.parse_example(serialized, self._label_field)[self._label_column]

    def _check_example(self, where: str, serialized: bytes) -> None:
        """Finds wrong key names now rather than in the first training step."""
        kinds = _kinds(serialized)
        if self._may_be_row and self._image_column not in kinds and ROW in kinds:
            self._image_column = ROW
        if kinds.get(self._image_column) == "float" and self._label_column in kinds:
            self._take_rows(serialized)
            return
        wanted = {self._image_column: "bytes", self._label_column: "int64"}
        if wanted.keys() <= kinds.keys() and wanted.items() != (
            {name: kinds[name] for name in wanted}.items()
        ):
            wrong = next(name for name in wanted if kinds[name] != wanted[name])
            what = {
                self._image_column: "the bytes of a JPEG or PNG, or floats of a row",
                self._label_column: "a whole number from 0, as int64",
            }[wrong]
            raise ValueError(
                f"{where} has the field {wrong!r} of {kinds[wrong]}: expected {what}, "
                "so write that there, or name another field by --image_column and "
                "--label_column (in Python, image_column and label_column)"
            )
        if not wanted.items() <= kinds.items():
            raise ValueError(
                f"{where} has the fields {_listed(kinds)} but {_listed(wanted)} are "
                "expected: name them by --image_column and --label_column (in Python, "
                "image_column and label_column)"
            )
        # Images may be raw pixels, all of one size.
        fields = tf.train.Example.FromString(serialized).features.feature
        shape = [
            value
            for name in ("image/height", "image/width", "image/channels")
            for value in fields[name].int64_list.value
        ]
        image = fields[self._image_column].bytes_list.value
        if len(shape) == 3 and [len(part) for part in image] == [math.prod(shape)]:
            self.encoded = False
            self.image_shape = tuple(shape)

    def _count_classes(self) -> None:
        """Sets ``num_classes``, unless known, and the splits' sizes from the labels."""
        if self.num_classes < math.inf:
            return
        path = None if self._skip_bad else self._findings
        counts, are_known = label_counts.kept(
            path, self._files, self.reads, self._read_labels
        )
        if are_known:
            self._note(f"The labels of {self.name} are known from an earlier run.")
        self.num_classes = _num_classes(self.name, self.label_field, counts)
        for split, of_split in counts.items():
            self.splits[split] = sum(of_split.records)
            # Bad records have no label here, but still a position in their file.
            if not self._skip_bad:
                sizes = zip(self._files[split], of_split.records, strict=True)
                self._counts |= sizes
        classes = {split: of_split.classes for split, of_split in counts.items()}
        self._note(*label_notes.notes(self.target, classes))

    def _read_labels(self) -> dict[str, LabelCounts]:
        """Reads all labels, of several files at once."""
        what = (
            f"Reading the labels of {self.name} to count its classes, as "
            "--num_classes is not given"
        )
        paths = self._all_files()

        def read(path):
            return read_labels(self, path, None, self._skip_bad)

        # Python that reads records may wait for TensorFlow's threads, and these for it.
        threads = limits.cpu_count() if self.in_graph else 1
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            labels = pool.map(read, paths)
            labels = [*over(labels, what, len(paths), "files", EARLY_S)]
        of_path = dict(zip(paths, labels, strict=True))
        return {
            split: label_counts.of_labels([of_path[path] for path in some])
            for split, some in self._files.items()
        }

    def _take_rows(self, serialized: bytes) -> None:
        """Reads rows of numbers from now on, as long as in this example."""
        fields = tf.train.Example.FromString(serialized).features.feature
        count = len(fields[self._image_column].float_list.value)
        row = tf.io.FixedLenFeature([count], tf.float32)
        self._fields = {self._image_column: row} | self._label_field
        self.encoded, self.image_shape = False, (count,)
        self.reads = self._image_column, self._label_column
        if len(self.image_fields) != count:  # the converter knows their names
            self.image_fields = [f"{self._image_column}[{k}]" for k in range(count)]


def _num_classes(name: str, field: str, counts: Mapping[str, LabelCounts]) -> int:
    """Returns the largest label plus one.

    Raises:
        ValueError: it is too large for a number of classes.
    """
    largest = int(
        np.concatenate([some.classes for some in counts.values()]).max(initial=-1)
    )
    records = sum(sum(some.records) for some in counts.values())
    if largest + 1 > max(_MANY, records):
        raise ValueError(
            f"{name} has labels up to {largest:,} in {field!r}, which is more than it "
            "has records: expected numbers of classes, so learn numbers by "
            "--task=regression (in Python, target='numbers'), name another field or "
            "column, or give the number of classes by --num_classes (in Python, "
            "num_classes)"
        )
    return largest + 1


def check_kind(record: Record) -> Record:
    """Marks a record as bad if its serialized bytes are no tf.Example.

    TensorFlow's own message would contain the bytes, and Python fails to read it.
    """
    try:
        _kinds(record.raw)
    except Exception as error:  # protobuf's DecodeError, without depending on it
        return record.with_fault(f"not a tf.Example: {error}")
    return record


def _kinds(serialized: bytes) -> dict[str, str]:
    """Maps the name of each field of a tf.Example to bytes, int64 or float."""
    fields = tf.train.Example.FromString(serialized).features.feature
    return {
        key: (fields[key].WhichOneof("kind") or "empty").removesuffix("_list")
        for key in sorted(fields)
    }


def _listed(fields: dict[str, str]) -> str:
    return ", ".join(f"{key} ({kind})" for key, kind in fields.items()) or "none"
