"""``csv:GLOB``: rows below a header, some columns of which say what is to be learnt."""

import collections
import contextlib
import csv
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers.input_pipeline.local_store.store import StoredFiles
from towers.input_pipeline.sources.files import stored
from towers.input_pipeline.sources.files.file_source import LABELS_AT_ONCE, StreamFiles
from towers.input_pipeline.sources.files.record import (
    FAULTS,
    BadRecordError,
    Record,
    fault_of,
)
from towers.input_pipeline.sources.tables import categories, columns, table_targets
from towers.input_pipeline.sources.targets import Target, TargetKind

# How TensorFlow says that a field is empty, or holds something else.
_MISSING = "is required but missing"
_NO_NUMBER = "is not a valid number"
_NO_LABEL = "is not a valid int64"


class CSVSource(StreamFiles):
    """CSV files with the same columns in each.

    "Images" are rows: float64 [F], the columns of features. A row is a line that is not
    blank: line breaks in quotes are not understood.

    Args:
        pattern: see ``FileSource``.
        label_column: see ``table_targets.read_names``. Whole numbers from 0 are classes
            as they are; texts are names of classes, which are numbered in sorted order;
            other numbers are numbers.
        feature_columns: see ``columns.find_features``. Columns of text that are named
            are categories: examples are then dicts of columns.
        target: what the labels are; see ``table_targets.choose``.
        class_names: see ``columns.order_classes``.
        num_classes: see ``FileSource``.
        vocabularies: see ``Source``; None for what the training data have.
        **options: see ``FileSource``.

    Raises:
        ValueError: no file, no row, other columns in one file than in another, no such
            column, text for a number, or a negative label.
    """

    kind = "csv"
    encoded = False
    why_whole = "nothing but the text tells where a line ends"

    def __init__(
        self,
        pattern: str,
        *,
        label_column: str | Sequence[str] | None = None,
        feature_columns: Sequence[str] | None = None,
        target: TargetKind | None = None,
        class_names: Sequence[str] | None = None,
        num_classes: int | None = None,
        vocabularies: Mapping[str, Sequence[str]] | None = None,
        **options: Any,
    ):
        super().__init__(pattern, num_classes, **options)
        first, *others = self._all_files()
        names = _header(first)
        for path in others:
            if (found := _header(path)) != names:
                raise ValueError(
                    f"{path} has the columns {', '.join(found)} but {first} has "
                    f"{', '.join(names)}: expected the same in all files"
                )
        labels, note = table_targets.read_names(first, names, label_column)
        self.label_field = ",".join(labels)
        self.notes += (note,) if note else ()
        self.image_fields = columns.find_features(first, names, labels, feature_columns)
        self._columns = names
        self._labels = [names.index(name) for name in labels]
        self._find_class = None
        texts = self._look_at_columns(first, asked=feature_columns is not None)
        self._features = [names.index(name) for name in self.image_fields]
        self.image_shape = (len(self._features),)
        # What is not used may be anything. Nothing stands in for what is missing.
        self._defaults = [tf.constant([""])] * len(names)
        for place in self._features:
            self._defaults[place] = tf.constant([], tf.float64)
        found = {name: texts[name] for name in labels}
        named = label_column is not None
        self._look_at_labels(first, found, target, class_names or num_classes, named)
        self.reads = (self.label_field, *self.image_fields, self._fraction)
        self._check_first(self._check_row)
        if self._find_class is not None:
            self.class_names = columns.order_classes(
                self.name, self.label_field, self._names, num_classes, class_names
            )
            self._find_class = columns.class_finder(self.class_names)
        self._count_classes()
        self._hold_out()
        if self.vocabularies:
            found = vocabularies or self._read_vocabularies()
            categories.check(self.name, self.vocabularies, found)
            self.vocabularies, self.table_sizes = found, categories.table_sizes(found)
            self._ids = categories.finders(found)
            self.reads = (*self.reads, *self.vocabularies.items())

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See ``Source.parse``."""
        fields = tf.io.decode_csv(records, self._defaults)
        rows = [fields[place] for place in self._features]
        of_categories = {
            name: find(fields[self._columns.index(name)])
            for name, find in self._ids.items()
        }
        x = categories.examples(tf.stack(rows, axis=1) if rows else None, of_categories)
        return x, self._targets_of([fields[place] for place in self._labels])

    def _targets_of(self, fields: list[tf.Tensor]) -> tf.Tensor:
        """Targets of what stands in their columns."""
        if self.target.kind != "class":
            return tf.stack(fields, axis=1)
        if self._find_class is None:
            return _whole_or_none(fields[0])
        return self._find_class(tf.strings.strip(fields[0]))

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
                if self._has(split, number):
                    yield record.with_raw(raw)
                number += 1

    def explain(self, fault: str) -> str:
        """See ``Source.explain``."""
        fault = fault.replace("is not a valid double", _NO_NUMBER)
        fault = re.sub(r" in record \d+!?", "", fault)
        fault = re.sub(r"(: .{60}).+", r"\1...", fault)  # a field may be of any length
        fault = re.sub(r"^Field (\d+)", lambda at: self._columns[int(at[1])], fault)
        labels = self.target.names if self.target.row_shape else [self.label_field]
        if fault.startswith((*labels,)) and (_MISSING in fault or _NO_NUMBER in fault):
            named = self._find_class and "the name of a class"
            fault += f", expected {named or self.target.expected}"
        elif _MISSING in fault or _NO_NUMBER in fault:
            fault += f", expected a number: {columns.FILL}"
        if _NO_LABEL in fault:
            fault += (
                ", expected a whole number, as in the first rows; where labels are "
                "names of classes, none is a number; --task=regression (in Python, "
                "target='numbers') learns numbers"
            )
        return fault

    def labels(self, path: str, limit: int | None = None) -> tf.data.Dataset:
        """See ``Source.labels``."""

        def parse(lines):
            places = sorted(self._labels)
            defaults = [self._defaults[place] for place in places]
            fields = tf.io.decode_csv(lines, defaults, select_cols=places)
            return self._targets_of([fields[places.index(k)] for k in self._labels])

        lines = self._read(path).take(-1 if limit is None else limit)
        return lines.batch(LABELS_AT_ONCE).map(parse, tf.data.AUTOTUNE)

    def _read(self, path: str | tf.Tensor) -> tf.data.Dataset:
        return _rows(path, self._stored)

    def _look_at_columns(self, path: str, asked: bool) -> dict[str, list[str]]:
        """Looks at the first rows for what holds of whole columns.

        Args:
            path: of the first file, for the message.
            asked: whether the columns of features were named.

        Returns:
            What stands in each column there, where there is anything.

        Raises:
            ValueError: one has no number.
        """
        rows = self._first_rows()
        texts = {
            name: [text for row in rows if (text := row[place].strip())]
            for place, name in enumerate(self._columns)
        }
        wrong = {}
        for name in self.image_fields if rows else ():
            # A number in bytes that are no text is said of its row.
            if not any(_is_number(text) or "\ufffd" in text for text in texts[name]):
                found = texts[name]
                example = f"such as {found[0][:60]!r}" if found else columns.EMPTY
                wrong[name] = example
        right = [name for name in self.image_fields if name not in wrong]
        # The label may be one, unless the user has named the columns.
        looked_at = wrong if asked else texts
        pictures = [name for name in looked_at if columns.name_pictures(texts[name])]
        # Of text that is named; what is empty is neither.
        chosen = [name for name in wrong if asked and texts[name]]
        if wrong and right and not asked:
            self.notes = (*self.notes, columns.left_out_note(wrong, right, pictures))
        elif len(wrong) > len(chosen):
            raise columns.not_numbers(path, wrong, right, asked, pictures)
        self.image_fields = right
        self.vocabularies = dict.fromkeys(chosen, ())
        # Until these are known, which takes all files.
        self._ids = categories.finders(self.vocabularies)
        for name in self.image_fields:
            numbers = [float(text) for text in texts[name] if _is_number(text)]
            others = [other for other in self.image_fields if other != name]
            if len(numbers) == len(rows) and others:
                note = columns.index_note(name, numbers, others)
                self.notes = (*self.notes, note) if note else self.notes
        return texts

    def _look_at_labels(
        self,
        path: str,
        texts: dict[str, list[str]],
        asked: TargetKind | None,
        of_classes: Any,
        named: bool,
    ) -> None:
        """Decides what the targets are, by the values of their columns.

        The first rows tell what is text, or has fractions; all rows tell the rest.
        """
        found = [table_targets.Column.of(*item) for item in texts.items()]
        read, rows = None, 0
        if len(found) == 1 and asked in (None, "class"):
            if found[0].form != "numbers":
                read, rows = self._read_label_texts()
            if read and found[0].form != "text":
                found = [table_targets.Column.of(self.label_field, read, rows)]
        kind, note = table_targets.choose(path, found, asked, of_classes)
        self.notes = (*self.notes, note) if note else self.notes
        dtype = tf.int64
        if kind != "class":
            self._take_target(Target(kind, len(texts), tuple(texts)))
            dtype = tf.float64
        elif found[0].form == "text":
            self._check_utf8(read)
            note = columns.check_classes(path, self.label_field, read, rows, named)
            self.notes = (*self.notes, note) if note else self.notes
            self._names, self._find_class = read, columns.class_finder(sorted(read))
            dtype = tf.string
        elif found[0].form == "decimals":
            dtype = tf.float64
        for place in self._labels:
            self._defaults[place] = tf.constant([], dtype)

    def _first_rows(self) -> list[list[str]]:
        """The fields of the first rows, without those that have too few or many."""
        records = itertools.chain.from_iterable(map(self.walk, self._all_files()))
        rows = []
        for record in itertools.islice(records, columns.SAMPLE):
            with contextlib.suppress(BadRecordError):
                if not record.fault:
                    rows.append(_fields("", _text(record.raw)))
        return [row for row in rows if len(row) == len(self._columns)]

    def _read_label_texts(self) -> tuple[set[str], int]:
        """Reads what stands in the labels' column, and how many rows have something."""
        found = collections.Counter()
        for path in self._all_files():
            # Nothing that is wrong with a row is for this to say.
            lines = self._read(path).batch(LABELS_AT_ONCE)
            texts = lines.map(self._label_texts, tf.data.AUTOTUNE)
            try:
                of_file = collections.Counter()
                for some in texts.as_numpy_iterator():
                    of_file.update(some.tolist())
            except FAULTS:
                of_file = collections.Counter()
                for record in self.walk(path):
                    with contextlib.suppress(*FAULTS):
                        if not record.fault:
                            of_file.update(self._label_texts(record.raw[None]).numpy())
            found += of_file
        found.pop(b"", None)
        return {text.decode(errors="replace") for text in found}, found.total()

    def _check_utf8(self, names: set[str]) -> None:
        """Checks that names of classes are text."""
        if wrong := [name for name in sorted(names) if "\ufffd" in name]:
            raise ValueError(
                f"{self.name} has the class {wrong[0][:60]!r} in the column "
                f"{self.label_field!r}: expected text in UTF-8"
            )

    def _label_texts(self, lines: tf.Tensor) -> tf.Tensor:
        (texts,) = tf.io.decode_csv(lines, [""], select_cols=self._labels)
        return tf.strings.strip(texts)

    def _read_vocabularies(self) -> dict[str, tuple[str, ...]]:
        """Reads the columns of categories of the training data."""
        names = [*self.vocabularies]
        places = [self._columns.index(name) for name in names]
        ordered = sorted(places)

        def texts(_, lines):
            empty = [""] * len(places)
            fields = tf.io.decode_csv(lines, empty, select_cols=ordered)
            return [tf.strings.strip(fields[ordered.index(each)]) for each in places]

        split = "train" if "train" in self.splits else "test"
        batches = self.records(split).batch(LABELS_AT_ONCE).map(texts)
        # What is wrong with a row is said when it is read.
        batches = batches.ignore_errors().as_numpy_iterator()
        return categories.read_vocabularies(names, batches)

    def _check_row(self, where: str, line: tf.Tensor) -> None:
        row = _fields(where, _text(line))
        whole = self.target.kind == "class" and self._find_class is None
        if len(row) == len(self._columns) and whole:
            text = row[self._labels[0]]
            # A number that is not whole is said as such.
            if not _is_number(text):
                raise ValueError(
                    f"{where} has the label {text[:60]!r} in the column "
                    f"{self.label_field!r}: expected whole numbers from 0, or names of "
                    "classes; name another column by --label_column (in Python, "
                    "label_column), or learn numbers by --task=regression (in Python, "
                    "target='numbers')"
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


def _whole_or_none(labels: tf.Tensor) -> tf.Tensor:
    """Makes int64 of labels that may be floats; -1, which is no class, of fractions."""
    if not labels.dtype.is_floating:
        return labels
    return tf.cast(tf.where(labels == tf.floor(labels), labels, -1), tf.int64)


def _lines(path: str | tf.Tensor) -> tf.data.Dataset:
    """All lines below the header."""
    return tf.data.TextLineDataset(path).skip(1)


def _rows(path: str | tf.Tensor, files: StoredFiles | None) -> tf.data.Dataset:
    """Lines below the header that are not empty, through a store if there is one."""
    lines = _lines(path) if files is None else stored.lines(files, path).skip(1)
    return lines.filter(lambda line: tf.strings.strip(line) != "")


def _text(line: tf.Tensor) -> str:
    return line.numpy().decode(errors="replace")


def _header(path: str) -> list[str]:
    """Names of the columns of one file."""
    with tf.io.gfile.GFile(path) as file:
        try:
            line = file.readline()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: line 1 is not UTF-8: expected a CSV file in UTF-8, so "
                "convert it, such as with iconv -f ISO-8859-1 -t UTF-8, or -f UTF-16"
            ) from error
    # Excel begins its files with a mark.
    names = _fields(f"{path}: line 1", line.removeprefix("\ufeff").rstrip("\r\n"))
    columns.check_different(path, names)
    if len(names) < 2 or any(map(_is_number, names)):
        raise ValueError(
            f"{path} begins with {line[:60]!r}: expected a header, the names of at "
            "least two columns, separated by commas"
        )
    return names


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
