"""``csv:GLOB``: rows of numbers below a header, one column of which is the label."""

import csv
import re
from collections.abc import Iterator, Sequence

import tensorflow as tf

from towers.input_pipeline.sources.base import FAULTS, BadRecordError, Record, fault_of
from towers.input_pipeline.sources.files import LABELS_AT_ONCE, StreamFiles

_LABELS = ("label", "class", "target")


class CSVSource(StreamFiles):
    """CSV files with the same columns in each.

    "Images" are rows: float32 [F], all columns but the label's, in the files' order. A
    row is a line that is not blank: line breaks in quotes are not understood.

    Args:
        pattern: see ``FileSource``.
        label_key: name of the label's column. Where there is none of this name, it is
            the one named label, class or target, else the last.
        num_classes: None reads all labels and takes the largest plus one.
        skip_bad: see ``FileSource``.

    Raises:
        ValueError: no file, no row, other columns in one file than in another, text for
            a number, or a negative label.
    """

    encoded = False

    def __init__(
        self,
        pattern: str,
        label_key: str,
        num_classes: int | None = None,
        skip_bad: bool = False,
    ):
        super().__init__("csv", pattern, num_classes, skip_bad)
        first, *others = self._all_files()
        columns = _header(first)
        for path in others:
            if (found := _header(path)) != columns:
                raise ValueError(
                    f"{path} has the columns {', '.join(found)} but {first} has "
                    f"{', '.join(columns)}: expected the same in all files"
                )
        self._label = columns.index(find_label(columns, label_key))
        self.reads = (self._label,)
        self._columns = columns
        self.label_field = columns[self._label]
        self.image_fields = [name for name in columns if name != self.label_field]
        self._types = [tf.float32] * len(columns)
        self._types[self._label] = tf.int64
        self.image_shape = (len(columns) - 1,)
        self._check_first(self._check_row)
        self._count_classes()

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See ``Source.parse``."""
        # Nothing stands in for what is missing.
        required = [tf.constant([], kind) for kind in self._types]
        columns = tf.io.decode_csv(records, required)
        labels = columns.pop(self._label)
        return tf.stack(columns, axis=1), labels

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """See ``Source.walk``."""
        number = self._first_number(path)
        lines = iter(_lines(path))
        line = 1
        while True:
            line += 1  # the first is the header
            record = Record(path, f"line {line}", number)
            try:
                raw = next(lines, None)
            except FAULTS as error:
                yield record.with_fault(fault_of(error), count=None)
                return
            if raw is None:
                return
            if raw.numpy().strip():
                yield record.with_raw(raw)
                number += 1

    def explain(self, fault: str) -> str:
        """See ``Source.explain``."""
        fault = re.sub(r" in record \d+!?", "", fault)
        fault = re.sub(r"(: .{60}).+", r"\1...", fault)  # a field may be of any length
        return re.sub(
            r"^Field (\d+)", lambda found: self._columns[int(found[1])], fault
        )

    def labels(self, path: str, limit: int | None = None) -> tf.data.Dataset:
        """See ``Source.labels``."""

        def parse(lines):
            required = [tf.constant([], tf.int64)]
            (labels,) = tf.io.decode_csv(lines, required, select_cols=[self._label])
            return labels

        lines = self._read(path).take(-1 if limit is None else limit)
        return lines.batch(LABELS_AT_ONCE).map(parse, tf.data.AUTOTUNE)

    def _read(self, path: str | tf.Tensor) -> tf.data.Dataset:
        return _lines(path).filter(lambda line: tf.strings.strip(line) != "")

    def _check_row(self, where: str, line: tf.Tensor) -> None:
        row = _fields(where, line.numpy().decode(errors="replace"))
        if len(row) == len(self._types):
            text = row[self._label]
            if not text.strip().removeprefix("-").isdigit():
                raise ValueError(
                    f"{where} has the label {text[:60]!r} in the column "
                    f"{self.label_field!r}: expected whole numbers from 0; number the "
                    "classes, or name another column as label_key"
                )
        try:
            self.decode(line)
        except FAULTS as error:
            fault = self.explain(fault_of(error))
            for name, text in zip(self._columns, row, strict=False):
                if "\ufffd" in text:
                    # TensorFlow's message holds the bytes: Python cannot read it.
                    fault = f"{name} is {text[:60]!r}, expected a number in UTF-8"
                    break
            raise BadRecordError(f"{where}: {fault}") from error


def _lines(path: str | tf.Tensor) -> tf.data.Dataset:
    """All lines below the header."""
    return tf.data.TextLineDataset(path).skip(1)


def find_label(columns: Sequence[str], label_key: str) -> str:
    """The column that holds the labels."""
    if label_key in columns:
        return label_key
    named = (name for name in columns if name.strip().lower() in _LABELS)
    return next(named, columns[-1])


def _header(path: str) -> list[str]:
    """Names of the columns of one file."""
    with tf.io.gfile.GFile(path) as file:
        try:
            line = file.readline()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text: expected a CSV file") from error
    # Excel begins its files with a mark.
    columns = _fields(f"{path}: line 1", line.removeprefix("\ufeff").rstrip("\r\n"))
    if len(columns) < 2 or any(map(_is_number, columns)):
        raise ValueError(
            f"{path} begins with {line[:60]!r}: expected a header, the names of at "
            "least two columns, separated by commas"
        )
    return columns


def _fields(where: str, line: str) -> list[str]:
    """The fields of one line."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error as error:
        raise BadRecordError(f"{where}: {error}") from error


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
