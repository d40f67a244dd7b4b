"""``parquet:GLOB``: images as Hugging Face writes them, or columns of numbers."""

import itertools
import json
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources import in_python
from towers.input_pipeline.sources.base import FILE, Record, StreamSource, shuffle_all
from towers.input_pipeline.sources.csv_source import find_label
from towers.input_pipeline.sources.files import FileSource

_CYCLE_LENGTH = 4
_BLOCK_LENGTH = 16

# A raw record: the encoded image or the row of numbers, and the label.
_Record = tuple[tf.Tensor, tf.Tensor]


class ParquetSource(FileSource, StreamSource):
    """Parquet files with the same columns in each.

    A file is read by the row group: four at a time are in memory, and the next ones,
    whole, but without the columns that are not needed. Groups come shuffled, and rows
    within the buffer of the shuffle. Write small groups: 100 to 1000 images each.
    Python reads them: the workers of a tf.data service cannot.

    Args:
        pattern: see ``FileSource``.
        image_key: column of JPEG or PNG bytes, or of structs with a field ``bytes``;
            where there is none of this name, ``image``. Where there is neither, rows
            are float32 [F] of all columns but the label's, as in ``csv:``.
        label_key: see ``csv_source.CSVSource``.
        num_classes: None takes it from Hugging Face's description of the columns, or
            reads all labels and takes the largest plus one.
        skip_bad: see ``FileSource``.

    Raises:
        ValueError: no package, no file, no row, a column of another type, or a negative
            label.
    """

    in_graph = False

    def __init__(
        self,
        pattern: str,
        image_key: str = "image",
        label_key: str = "label",
        num_classes: int | None = None,
        skip_bad: bool = False,
    ):
        try:
            import pyarrow  # noqa: F401 (the rest of this file needs it)
        except ImportError as error:
            raise ValueError(
                f"'parquet:{pattern}' needs the package pyarrow, which is not "
                "installed: pip install 'towers[parquet]'"
            ) from error
        super().__init__("parquet", pattern, num_classes, skip_bad)
        self._footers = {path: _footer(path) for path in self._all_files()}
        for split, paths in self._files.items():
            self.splits[split] = sum(self._footers[path].num_rows for path in paths)
        first, *others = self._all_files()
        schema = self._footers[first].schema.to_arrow_schema()
        self._choose_columns(first, schema, image_key, label_key)
        self.reads = (*self._columns, self._label)
        self.image_fields, self.label_field = self._columns, self._label
        for path in others:
            found = self._footers[path].schema.to_arrow_schema()
            for name in (*self._columns, self._label):
                if name not in found.names or found.field(name) != schema.field(name):
                    raise ValueError(
                        f"the column {name!r} of {path} is not that of {first}: "
                        "expected the same columns in all files"
                    )
        self._check_first(lambda where, raw: None)
        names = _class_names(schema, self._label)
        if names and num_classes in (None, len(names)):
            self.class_names, self.num_classes = names, len(names)
        self._count_classes()

    def records(
        self, split: str, shuffle_seed: tf.Tensor | None = None
    ) -> tf.data.Dataset:
        """See ``StreamSource.records``."""
        paths = self.files(split)
        passed_over = self.passed_over.get(split, ())
        unreadable = {record.number for record in passed_over if record.gap}
        empty = {record.number for record in passed_over}
        # File, row group and the number of its first row.
        groups = [
            (file, group, file * FILE + first)
            for file, path in enumerate(paths)
            for group, first in enumerate(self._first_rows(path))
            if file * FILE + first not in unreadable
        ]
        places = tf.reshape(tf.constant(groups, tf.int64), [-1, 3])
        dataset = tf.data.Dataset.from_tensor_slices(places)
        dataset = shuffle_all(dataset, len(groups), shuffle_seed)

        def read(place):
            images, labels = self._load_group(paths, place[0], place[1], empty)
            numbers = place[2] + tf.range(tf.size(labels, tf.int64))
            return tf.data.Dataset.from_tensor_slices((numbers, (images, labels)))

        return dataset.interleave(
            read,
            cycle_length=min(max(len(groups), 1), _CYCLE_LENGTH),
            block_length=_BLOCK_LENGTH,
            num_parallel_calls=tf.data.AUTOTUNE,
        )

    def record_bytes(self, split: str) -> float:
        """See ``StreamSource.record_bytes``."""
        footers = [self._footers[path] for path in self.files(split)]
        groups = [
            footer.row_group(group).total_byte_size
            for footer in footers
            for group in range(footer.num_row_groups)
        ]
        return sum(groups) / max(self.splits[split], 1)

    def parse(self, records: _Record) -> tuple[tf.Tensor, tf.Tensor]:
        """See ``Source.parse``."""
        return records

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """See ``Source.walk``."""
        number = self._first_number(path)
        names = [*self._columns, self._label]
        rows = [*self._first_rows(path), self._footers[path].num_rows]
        for group, (first, end) in enumerate(itertools.pairwise(rows)):
            try:
                columns = self._read_group(path, group, names)
            except ValueError as error:
                bad = Record(path, f"row group {group}", number + first)
                gap, count = (first, end), end - first
                yield bad.with_fault(str(error), gap=gap, count=count)
                continue
            missing = _missing(columns)
            for row, raw in enumerate(zip(*self._values(columns), strict=True)):
                record = Record(path, f"row {first + row}", number + first + row)
                if row in missing:
                    yield record.with_fault(missing[row])
                else:
                    yield record.with_raw(tuple(map(tf.constant, raw)))

    def labels(self, path: str, limit: int | None = None) -> tf.data.Dataset:
        """See ``Source.labels``."""
        groups = tf.data.Dataset.range(self._footers[path].num_row_groups)

        def read(group):
            return self._load_group([path], 0, group, (), images=False)[1]

        labels = groups.map(read)
        if limit is None:
            return labels
        return labels.unbatch().take(limit).batch(limit)

    def _choose_columns(
        self, path: str, schema: Any, image_key: str, label_key: str
    ) -> None:
        """Decides what is read, by the types of the first file's columns."""
        from pyarrow import types

        kinds = {field.name: field.type for field in schema}
        listed = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        if len(kinds) < 2:
            raise ValueError(
                f"{path} has the columns {listed or 'none'}: expected at least two, "
                "images and labels"
            )
        self._label = find_label(schema.names, label_key)
        if not types.is_integer(kinds[self._label]):
            raise ValueError(
                f"{path} has the columns {listed}: expected whole numbers as labels in "
                f"{self._label!r}; pass the column's name as label_key"
            )
        names = (name for name in (image_key, "image") if name in kinds)
        image = next(names, None)
        self.encoded = image is not None
        if not self.encoded:
            self._columns = [name for name in kinds if name != self._label]
            self.image_shape = (len(self._columns),)
            fit = all(
                types.is_integer(kinds[name])
                or types.is_floating(kinds[name])
                or types.is_boolean(kinds[name])
                for name in self._columns
            )
            if not fit or not self._columns:
                raise ValueError(
                    f"{path} has the columns {listed}: expected numbers in all of "
                    "them, or one of images; pass its name as image_key"
                )
            return
        self._columns = [image]
        self.image_shape = (None, None, 3)
        kind = kinds[image]
        if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            kind = kind.field("bytes").type
        if not types.is_binary(kind) and not types.is_large_binary(kind):
            raise ValueError(
                f"{path} has the columns {listed}: expected bytes of JPEG or PNG in "
                f"{image!r}, or a struct with a field of them, bytes; pass the "
                "column's name as image_key"
            )

    def _first_rows(self, path: str) -> list[int]:
        """Number of the first row of each row group."""
        footer = self._footers[path]
        counts = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        return list(itertools.accumulate(counts, initial=0))[:-1]

    def _load_group(
        self,
        paths: list[str],
        file: int | tf.Tensor,
        group: tf.Tensor,
        empty: Collection[int],
        images: bool = True,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Images (or rows of numbers) and labels of one row group, in a graph.

        Args:
            paths: of a split.
            file: which of them.
            group: number of the row group.
            empty: numbers of records in which something may be missing.
            images: False leaves them out.
        """
        names = [*(self._columns if images else ()), self._label]

        def load(file, group):
            path, group = paths[file], int(group)
            try:
                columns = self._read_group(path, group, names)
            except ValueError as error:
                raise ValueError(f"{path}: row group {group}: {error}") from error
            first = self._first_rows(path)[group]
            for row, fault in _missing(columns).items():
                if int(file) * FILE + first + row not in empty:
                    raise ValueError(f"{path}: row {first + row}: {fault}")
            return self._values(columns)

        dtype = tf.string if self.encoded else tf.float32
        rows, labels = in_python.call(load, [file, group], [dtype, tf.int64])
        shape = [] if self.encoded else self.image_shape
        return tf.ensure_shape(rows, [None, *shape]), tf.ensure_shape(labels, [None])

    def _read_group(self, path: str, group: int, names: list[str]) -> dict[str, Any]:
        """Columns of one row group, by their names.

        Raises:
            ValueError: it cannot be read.
        """
        import pyarrow

        try:
            with _open(path, self._footers[path]) as file:
                table = file.read_row_group(group, columns=names)
        except (pyarrow.ArrowException, tf.errors.OpError, OSError) as error:
            raise ValueError(str(error)) from error
        columns = {name: table[name].combine_chunks() for name in names}
        for name, column in columns.items():
            if pyarrow.types.is_struct(column.type):
                # A struct that is missing has no bytes either.
                columns[name] = column.flatten()[column.type.get_field_index("bytes")]
        return columns

    def _values(self, columns: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Images (or rows of numbers), if there are any, and labels."""
        *columns, labels = (_filled(column) for column in columns.values())
        labels = labels.to_numpy(zero_copy_only=False).astype(np.int64)
        if self.encoded:
            return np.array(
                [*columns[0].to_pylist()] if columns else [], object
            ), labels
        rows = np.zeros([len(labels), *self.image_shape], np.float32)
        for place, column in enumerate(columns):
            rows[:, place] = column.to_numpy(zero_copy_only=False)
        return rows, labels


def _missing(columns: dict[str, Any]) -> dict[int, str]:
    """The rows in which there is nothing, and what to say of each."""
    rows = {}
    for name, column in columns.items():
        if column.null_count:
            for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)):
                fault = f"nothing in the column {name!r}, expected a value"
                rows.setdefault(int(row), fault)
    return rows


def _filled(column: Any) -> Any:
    """A column with something in the place of nothing: its rows are passed over."""
    if not column.null_count:
        return column
    import pyarrow

    is_binary, is_large = pyarrow.types.is_binary, pyarrow.types.is_large_binary
    of_bytes = is_binary(column.type) or is_large(column.type)
    return column.fill_null(b"" if of_bytes else 0)


class _File(tf.io.gfile.GFile):
    """A file of any file system, for pyarrow."""

    closed = False


def _open(path: str, footer: Any = None) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(_File(path, "rb"), metadata=footer)


def _footer(path: str) -> Any:
    import pyarrow

    try:
        with _open(path) as file:
            return file.metadata
    except (pyarrow.ArrowException, tf.errors.OpError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; expected a whole Parquet file"
        ) from error


def _class_names(schema: Any, label: str) -> tuple[str, ...] | None:
    """Names of the classes, where Hugging Face has written them."""
    try:
        text = (schema.metadata or {})[b"huggingface"]
        return tuple(json.loads(text)["info"]["features"][label]["names"])
    except (KeyError, TypeError, ValueError):
        return None
