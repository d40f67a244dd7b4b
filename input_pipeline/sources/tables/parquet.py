"""``parquet:GLOB``: images as Hugging Face writes them, or columns of numbers."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.base import StreamSource
from towers.input_pipeline.sources.files import in_python
from towers.input_pipeline.sources.files.file_source import FileSource, shuffle_all
from towers.input_pipeline.sources.files.record import FILE, Record
from towers.input_pipeline.sources.tables import (
    categories,
    columns,
    parquet_columns,
    row_groups,
    table_targets,
)
from towers.input_pipeline.sources.targets import Target, TargetKind
from towers.program.extras import install_command

_CYCLE_LENGTH = 4
_BLOCK_LENGTH = 16

# A raw record: the encoded image or the row of numbers; where columns of text are
# learnt from, the texts of the row; and the label.
_Record = tuple[tf.Tensor, ...]


class ParquetSource(FileSource, StreamSource):
    """Parquet files with the same columns in each.

    A file is read by the row group: four at a time are in memory, and the next ones,
    whole, but without the columns that are not needed. Groups come shuffled, and rows
    within the buffer of the shuffle. Write small groups: 100 to 1000 images each.
    Python reads them: the workers of a tf.data service cannot.

    Args:
        pattern: see ``FileSource``.
        image_key: column of JPEG or PNG bytes, or of structs with a field ``bytes``;
            None takes ``image``. Where there is none, rows are float64 [F], as in
            ``csv:``.
        label_column: see ``CSVSource``.
        target: see ``CSVSource``.
        feature_columns: see ``CSVSource``; in place of images.
        class_names: see ``columns.order_classes``.
        num_classes: None takes it from Hugging Face's description of the columns, or
            reads all labels and takes the largest plus one.
        vocabularies: see ``CSVSource``.
        **options: see ``FileSource``.

    Raises:
        ValueError: no package, no file, no row, no such column, one of another type, or
            a negative label.
    """

    kind = "parquet"
    in_graph = False
    why_whole = "a group of rows is read as a whole"

    def __init__(
        self,
        pattern: str,
        *,
        image_key: str | None = None,
        label_column: str | Sequence[str] | None = None,
        feature_columns: Sequence[str] | None = None,
        target: TargetKind | None = None,
        class_names: Sequence[str] | None = None,
        num_classes: int | None = None,
        vocabularies: Mapping[str, Sequence[str]] | None = None,
        **options: Any,
    ):
        try:
            import pyarrow  # noqa: F401 (the rest of this file needs it)
        except ImportError as error:
            raise ValueError(
                f"'parquet:{pattern}' needs the package pyarrow, which is not "
                f"installed: {install_command('parquet')}"
            ) from error
        super().__init__(pattern, num_classes, **options)
        self._groups = row_groups.RowGroups(self._all_files(), self._stored)
        for split, paths in self._files.items():
            self._set_sizes(split, [self._groups.rows(path) for path in paths])
        first, *others = self._all_files()
        schema = self._groups.schema(first)
        self._columns = parquet_columns.choose(
            first, schema, image_key, label_column, feature_columns
        )
        self.image_fields = self._columns.examples
        self.vocabularies = dict.fromkeys(self._columns.texts, ())
        self._ids = categories.finders(self.vocabularies)
        self.image_shape = self._columns.image_shape
        self.label_field = ",".join(self._columns.labels)
        self.encoded = len(self.image_shape) == 3
        self.notes += (self._columns.note,) if self._columns.note else ()
        self.reads = (*self._columns.names, self._fraction)
        for path in others:
            found = self._groups.schema(path)
            for name in self._columns.names:
                if name not in found.names or found.field(name) != schema.field(name):
                    raise ValueError(
                        f"the column {name!r} of {path} is not that of {first}: "
                        "expected the same columns in all files"
                    )
        self._numbers = () if self.encoded else self.image_fields
        self._names: Sequence[str] = ()
        rows = self._groups.first(first, [*self._columns.labels, *self._numbers])
        named = label_column is not None
        self._look_at_labels(first, rows, target, class_names or num_classes, named)
        self._check_first(lambda where, raw: None)
        self._name_classes(schema, num_classes, class_names)
        self._look_at_rows(first, rows)
        self._count_classes()
        self._hold_out()
        if self.vocabularies:
            found = vocabularies or self._read_vocabularies()
            categories.check(self.name, self.vocabularies, found)
            self.vocabularies, self.table_sizes = found, categories.table_sizes(found)
            self._ids = categories.finders(found)
            self.reads = (*self.reads, *self.vocabularies.items())

    def records(
        self, split: str, shuffle_seed: tf.Tensor | None = None
    ) -> tf.data.Dataset:
        """See ``StreamSource.records``."""
        paths = self.files(split)
        # Of both splits, where they have parts of the same files.
        splits = self.splits if self._fraction else [split]
        passed_over = [
            record for each in splits for record in self.passed_over.get(each, ())
        ]
        unreadable = {record.number for record in passed_over if record.gap}
        empty = {record.number for record in passed_over}
        # File, row group and the number of its first row.
        groups = [
            (file, group, file * FILE + first)
            for file, path in enumerate(paths)
            for group, first in enumerate(self._groups.bounds(path)[:-1])
            if file * FILE + first not in unreadable
        ]
        places = tf.reshape(tf.constant(groups, tf.int64), [-1, 3])
        dataset = tf.data.Dataset.from_tensor_slices(places)
        dataset = shuffle_all(dataset, len(groups), shuffle_seed)

        def read(place):
            found = self._load_group(paths, place[0], place[1], empty)
            numbers = place[2] + tf.range(tf.shape(found[-1], tf.int64)[0])
            return tf.data.Dataset.from_tensor_slices((numbers, found))

        records = dataset.interleave(
            read,
            cycle_length=min(max(len(groups), 1), _CYCLE_LENGTH),
            block_length=_BLOCK_LENGTH,
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        return self._of_split(records, split)

    def record_bytes(self, split: str) -> float:
        """See ``StreamSource.record_bytes``."""
        return self._groups.row_bytes(self.files(split))

    def parse(self, records: _Record) -> tuple[tf.Tensor, tf.Tensor]:
        """See ``Source.parse``."""
        if not self.vocabularies:
            return records
        rows, texts, labels = records
        texts = tf.unstack(texts, len(self._ids), axis=1)
        found = zip(self._ids.items(), texts, strict=True)
        ids = {name: find(text) for (name, find), text in found}
        return categories.examples(rows if self.image_fields else None, ids), labels

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """See ``Source.walk``."""
        number = self._first_number(path)
        bounds = self._groups.bounds(path)
        for group, (first, end) in enumerate(itertools.pairwise(bounds)):
            try:
                read = self._groups.read(path, group, self._columns.names)
            except ValueError as error:
                bad = Record(path, f"row group {group}", number + first)
                gap, count = (first, end), end - first
                yield bad.with_fault(str(error), gap=gap, count=count)
                continue
            faults = row_groups.missing(read, self._columns.texts, self._numbers)
            for row, raw in enumerate(zip(*self._values(read), strict=True)):
                record = Record(path, f"row {first + row}", number + first + row)
                if not self._has(split, record.number):
                    continue
                if row in faults:
                    yield record.with_fault(faults[row])
                else:
                    yield record.with_raw(tuple(map(tf.constant, raw)))

    def labels(self, path: str, limit: int | None = None) -> tf.data.Dataset:
        """See ``Source.labels``."""
        groups = tf.data.Dataset.range(self._groups.count(path))

        def read(group):
            return self._load_group([path], 0, group, (), images=False)[-1]

        labels = groups.map(read)
        if limit is None:
            return labels
        return labels.unbatch().take(limit).batch(limit)

    def _name_classes(
        self,
        schema: Any,
        num_classes: int | None,
        class_names: Sequence[str] | None,
    ) -> None:
        """Finds names of classes, in the labels or in Hugging Face's description."""
        label = self.label_field
        if self.target.kind != "class":
            return
        if self._columns.text_labels:
            self.class_names = columns.order_classes(
                self.name, label, self._names, num_classes, class_names
            )
            self.num_classes = len(self.class_names)
            return
        names = row_groups.described_classes(schema, label)
        if names and num_classes in (None, len(names)):
            self.class_names, self.num_classes = names, len(names)

    def _read_vocabularies(self) -> dict[str, tuple[str, ...]]:
        """Reads the columns of categories of the training data."""
        names = self._columns.texts
        split = "train" if "train" in self.splits else "test"
        found = {name: set() for name in names}
        for path in self.files(split):
            first = self._first_number(path)
            chosen = self._fraction and (lambda k, n=first: self._has(split, n + k))
            for name, some in self._groups.texts(path, names, chosen or None).items():
                found[name] |= some
        return {name: categories.ordered(texts) for name, texts in found.items()}

    def _look_at_labels(
        self,
        path: str,
        rows: dict[str, Any],
        asked: TargetKind | None,
        of_classes: Any,
        named: bool,
    ) -> None:
        """Decides what the targets are, by the values of their columns."""
        labels = self._columns.labels
        found = [
            parquet_columns.look_at(name, rows[name]) for name in labels if name in rows
        ]
        values, count = None, 0
        if len(labels) == 1 and asked in (None, "class"):
            values, count = self._groups.different(self._all_files(), labels[0])
        # Where no group can be read as a whole, the first rows tell.
        if values is not None:
            found = [parquet_columns.look_at(labels[0], values, count)]
        kind, note = table_targets.choose(path, found, asked, of_classes)
        self.notes = (*self.notes, note) if note else self.notes
        if kind != "class":
            self._take_target(Target(kind, len(labels), tuple(labels)))
        elif values is not None and self._columns.text_labels:
            self._names = row_groups.as_text(values).to_pylist()
            texts = self._names
            note = columns.check_classes(path, labels[0], texts, count, named)
            self.notes = (*self.notes, note) if note else self.notes

    def _look_at_rows(self, path: str, rows: dict[str, Any]) -> None:
        """Looks at the first rows for columns that are not what they seem."""
        features = () if self.encoded else self.image_fields
        for name in features if rows else ():
            others = [other for other in features if other != name]
            values = rows[name]
            if values.null_count or not others:
                continue
            note = columns.index_note(name, values.to_pylist(), others)
            self.notes = (*self.notes, note) if note else self.notes

    def _load_group(
        self,
        paths: list[str],
        file: int | tf.Tensor,
        group: tf.Tensor,
        empty: Collection[int],
        images: bool = True,
    ) -> tuple[tf.Tensor, ...]:
        """Images (or rows of numbers), texts and labels of a row group, in a graph.

        Args:
            paths: of a split.
            file: which of them.
            group: number of the row group.
            empty: numbers of records in which something may be missing.
            images: False leaves them out.
        """
        names = self._columns.names if images else self._columns.labels

        def load(file, group):
            path, group = paths[file], int(group)
            try:
                read = self._groups.read(path, group, names)
            except ValueError as error:
                raise ValueError(f"{path}: row group {group}: {error}") from error
            first = self._groups.bounds(path)[group]
            faults = row_groups.missing(read, self._columns.texts, self._numbers)
            for row, fault in faults.items():
                if int(file) * FILE + first + row not in empty:
                    raise ValueError(f"{path}: row {first + row}: {fault}")
            return self._values(read)

        target = self.target
        texts = [tf.string] * bool(self._columns.texts)
        of_targets = target.dtype if target.kind == "class" else tf.float64
        types = [tf.string if self.encoded else tf.float64, *texts, of_targets]
        found = in_python.call(load, [file, group], [*map(tf.as_dtype, types)])
        shape = [] if self.encoded else self.image_shape
        shapes = shape, *[[len(self._columns.texts)] for _ in texts], target.row_shape
        pairs = zip(found, shapes, strict=True)
        return tuple(tf.ensure_shape(each, [None, *shape]) for each, shape in pairs)

    def _values(self, read: dict[str, Any]) -> tuple[np.ndarray, ...]:
        """Images (or rows of numbers), texts, if there are any, and targets."""
        labels = [read[name] for name in self._columns.labels]
        if self.target.kind != "class":
            targets = row_groups.numbers_in(labels, len(labels[0]), len(labels))
        else:
            names = (self.class_names or ()) if self._columns.text_labels else None
            targets = row_groups.labels_in(labels[0], names)
        images = [read[name] for name in self.image_fields if name in read]
        if not self.encoded:
            count = len(targets)
            texts = [read[name] for name in self._columns.texts if name in read]
            texts = [row_groups.texts_in(texts, count)] * bool(self._columns.texts)
            rows = row_groups.numbers_in(images, count, *self.image_shape)
            return rows, *texts, targets
        images = [row_groups.filled(column).to_pylist() for column in images]
        return np.array([*images[0]] if images else [], object), targets
