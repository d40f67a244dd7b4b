"""``parquet:GLOB``: images as Hugging Face writes them, or columns of numbers."""

import contextlib
import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources import columns, in_python
from towers.input_pipeline.sources.base import FILE, Record, StreamSource, shuffle_all
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
            None takes ``image``. Where there is none, rows are float32 [F], as in
            ``csv:``.
        label_column: see ``csv_source.CSVSource``.
        num_classes: None takes it from Hugging Face's description of the columns, or
            reads all labels and takes the largest plus one.
        skip_bad: see ``FileSource``.
        feature_columns: see ``columns.find_features``; in place of images.
        eval_fraction: see ``FileSource``.
        class_names: see ``columns.order_classes``.

    Raises:
        ValueError: no package, no file, no row, no such column, one of another type, or
            a negative label.
    """

    in_graph = False

    def __init__(
        self,
        pattern: str,
        image_key: str | None = None,
        label_column: str | None = None,
        num_classes: int | None = None,
        skip_bad: bool = False,
        feature_columns: Sequence[str] | None = None,
        eval_fraction: float | None = None,
        class_names: Sequence[str] | None = None,
    ):
        try:
            import pyarrow  # noqa: F401 (the rest of this file needs it)
        except ImportError as error:
            raise ValueError(
                f"'parquet:{pattern}' needs the package pyarrow, which is not "
                "installed: pip install 'towers[parquet]'"
            ) from error
        super().__init__("parquet", pattern, num_classes, skip_bad, eval_fraction)
        self._footers = {path: _footer(path) for path in self._all_files()}
        for split, paths in self._files.items():
            self._set_sizes(split, [self._footers[path].num_rows for path in paths])
        first, *others = self._all_files()
        schema = self._footers[first].schema.to_arrow_schema()
        self._choose_columns(first, schema, image_key, label_column, feature_columns)
        self.reads = (*self._columns, self._label, self._fraction)
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
        if self._is_text:
            found = self._names_of_classes()
            self.class_names = columns.order_classes(
                self.name, self._label, found, num_classes, class_names
            )
            self.num_classes = len(self.class_names)
        else:
            names = _class_names(schema, self._label)
            if names and num_classes in (None, len(names)):
                self.class_names, self.num_classes = names, len(names)
        self._look_at_rows(first)
        self._count_classes()
        self._hold_out()

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

        records = dataset.interleave(
            read,
            cycle_length=min(max(len(groups), 1), _CYCLE_LENGTH),
            block_length=_BLOCK_LENGTH,
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        return self._of_split(records, split)

    def record_bytes(self, split: str) -> float:
        """See ``StreamSource.record_bytes``."""
        footers = [self._footers[path] for path in self.files(split)]
        groups = [
            footer.row_group(group).total_byte_size
            for footer in footers
            for group in range(footer.num_row_groups)
        ]
        return sum(groups) / max(sum(footer.num_rows for footer in footers), 1)

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
                read = self._read_group(path, group, names)
            except ValueError as error:
                bad = Record(path, f"row group {group}", number + first)
                gap, count = (first, end), end - first
                yield bad.with_fault(str(error), gap=gap, count=count)
                continue
            missing = _missing(read)
            for row, raw in enumerate(zip(*self._values(read), strict=True)):
                record = Record(path, f"row {first + row}", number + first + row)
                if not self._has(split, record.number):
                    continue
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
        self,
        path: str,
        schema: Any,
        image_key: str | None,
        label_column: str | None,
        feature_columns: Sequence[str] | None,
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
        if image_key is not None:
            columns.check_named(path, schema.names, [image_key], "image_key")
            if feature_columns is not None:
                raise ValueError(
                    f"received image_key={image_key} and feature_columns="
                    f"{','.join(feature_columns)}: expected images or numbers, so "
                    "leave one out"
                )
        self._label, note = columns.find_label(path, schema.names, label_column)
        self.notes = (note,) if note else ()
        kind = kinds[self._label]
        self._is_text = _is_text(kind) or types.is_boolean(kind)
        if not types.is_integer(kind) and not self._is_text:
            raise ValueError(
                f"{path} has the columns {listed}: expected whole numbers, or names "
                f"of classes, as labels in {self._label!r}; name another column by "
                "--label_column (in Python, label_column)"
            )
        image = image_key
        if image is None and feature_columns is None:
            image = next(
                (name for name in ("image/encoded", "image") if name in kinds), None
            )
        self.encoded = image is not None
        if not self.encoded:
            self._columns = columns.find_features(
                path, schema.names, self._label, feature_columns
            )
            self.image_shape = (len(self._columns),)
            wrong = {
                name: str(kinds[name])
                for name in self._columns
                if not types.is_integer(kinds[name])
                and not types.is_floating(kinds[name])
                and not types.is_boolean(kinds[name])
            }
            if wrong:
                right = [name for name in self._columns if name not in wrong]
                asked = feature_columns is not None
                error = columns.not_numbers(path, wrong, right, asked)
                images = ", or a column of images by --image_key (in Python, image_key)"
                raise ValueError(f"{error}{images}")
            return
        self._columns = [image]
        self.image_shape = (None, None, 3)
        kind = kinds[image]
        if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            kind = kind.field("bytes").type
        if not types.is_binary(kind) and not types.is_large_binary(kind):
            raise ValueError(
                f"{path} has the columns {listed}: expected bytes of JPEG or PNG in "
                f"{image!r}, or a struct with a field of them, bytes; name the column "
                "by --image_key (in Python, image_key)"
            )

    def _names_of_classes(self) -> set[str]:
        """All names of classes; whoever reads the rows says what is wrong."""
        found = set()
        for path in self._all_files():
            for group in range(self._footers[path].num_row_groups):
                with contextlib.suppress(ValueError):
                    labels = self._read_group(path, group, [self._label])[self._label]
                    found |= {*_as_text(labels).unique().to_pylist()}
        return found - {None}

    def _look_at_rows(self, path: str) -> None:
        """Looks at the first rows for columns that are not what they seem.

        Raises:
            ValueError: another text in each row is no class.
        """
        if self.encoded and not self._is_text:
            return
        import pyarrow

        names = [self._label, *(() if self.encoded else self._columns)]
        parts = []
        for group in range(self._footers[path].num_row_groups):
            with contextlib.suppress(ValueError):  # said of its record
                parts.append(self._read_group(path, group, names, columns.SAMPLE))
            if sum(len(part[self._label]) for part in parts) >= columns.SAMPLE:
                break
        if not parts:
            return
        if self._is_text:
            texts = [_as_text(part[self._label]).to_pylist() for part in parts]
            labels = [text for some in texts for text in some if text]
            columns.check_classes(path, self._label, labels)
        for name in names[1:]:
            others = [other for other in names[1:] if other != name]
            values = pyarrow.concat_arrays([part[name] for part in parts])
            if values.null_count or not others:
                continue
            if columns.counts_rows(values.to_pylist()):
                note = columns.counting_note(name, values[0].as_py(), others)
                self.notes = (*self.notes, note)

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
                read = self._read_group(path, group, names)
            except ValueError as error:
                raise ValueError(f"{path}: row group {group}: {error}") from error
            first = self._first_rows(path)[group]
            for row, fault in _missing(read).items():
                if int(file) * FILE + first + row not in empty:
                    raise ValueError(f"{path}: row {first + row}: {fault}")
            return self._values(read)

        dtype = tf.string if self.encoded else tf.float32
        rows, labels = in_python.call(load, [file, group], [dtype, tf.int64])
        shape = [] if self.encoded else self.image_shape
        return tf.ensure_shape(rows, [None, *shape]), tf.ensure_shape(labels, [None])

    def _read_group(
        self, path: str, group: int, names: list[str], most: int | None = None
    ) -> dict[str, Any]:
        """Columns of one row group, by their names.

        Args:
            path: of the file.
            group: number of the row group.
            names: of the columns.
            most: rows to read; None for all.

        Raises:
            ValueError: it cannot be read.
        """
        import pyarrow

        try:
            with _open(path, self._footers[path]) as file:
                if most is None:
                    table = file.read_row_group(group, columns=names)
                else:
                    some = file.iter_batches(most, row_groups=[group], columns=names)
                    table = pyarrow.Table.from_batches([*itertools.islice(some, 1)])
        except (pyarrow.ArrowException, tf.errors.OpError, OSError) as error:
            raise ValueError(str(error)) from error
        read = {name: table[name].combine_chunks() for name in names}
        for name, column in read.items():
            if pyarrow.types.is_struct(column.type):
                # A struct that is missing has no bytes either.
                read[name] = column.flatten()[column.type.get_field_index("bytes")]
        return read

    def _values(self, read: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Images (or rows of numbers), if there are any, and labels."""
        *images, labels = read.values()
        labels = self._labels_of(labels)
        images = [_filled(column) for column in images]
        if self.encoded:
            return np.array([*images[0].to_pylist()] if images else [], object), labels
        rows = np.zeros([len(labels), *self.image_shape], np.float32)
        for place, column in enumerate(images):
            rows[:, place] = column.to_numpy(zero_copy_only=False)
        return rows, labels

    def _labels_of(self, column: Any) -> np.ndarray:
        """int64 labels [B]."""
        if self._is_text:
            import pyarrow
            from pyarrow import compute

            names = pyarrow.array(self.class_names or (), pyarrow.string())
            column = compute.index_in(_as_text(column), value_set=names)
            column = column.fill_null(-1)
        return _filled(column).to_numpy(zero_copy_only=False).astype(np.int64)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind)


def _as_text(column: Any) -> Any:
    """A column of texts, without a dictionary."""
    import pyarrow

    return column.cast(pyarrow.string())


def _missing(read: dict[str, Any]) -> dict[int, str]:
    """The rows in which there is nothing, and what to say of each."""
    rows = {}
    for name, column in read.items():
        if column.null_count:
            fault = f"nothing in the column {name!r}, expected a value"
            for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)):
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
