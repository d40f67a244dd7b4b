"""The row groups of Parquet files, as pyarrow reads them."""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.local_store.store import StoredFiles
from towers.input_pipeline.sources.files.stored import StoredFile
from towers.input_pipeline.sources.tables import columns

# A column of pyarrow's; read, they are by their names.
Column = Any


class RowGroups:
    """The row groups of some files, whose footers are read once.

    Args:
        paths: of the files.
        stored: the files, if they are read through a store.

    Raises:
        ValueError: one is no whole Parquet file.
    """

    def __init__(self, paths: Iterable[str], stored: StoredFiles | None = None):
        self._stored = stored
        self._footers = {path: _footer(path, stored) for path in paths}

    def schema(self, path: str) -> Any:
        """The columns of a file and their types, as pyarrow has them."""
        return self._footers[path].schema.to_arrow_schema()

    def count(self, path: str) -> int:
        """Row groups of a file."""
        return self._footers[path].num_row_groups

    def rows(self, path: str) -> int:
        """Rows of a file."""
        return self._footers[path].num_rows

    def bounds(self, path: str) -> list[int]:
        """Number of the first row of each row group, and of rows in all."""
        footer = self._footers[path]
        counts = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        return [*itertools.accumulate(counts, initial=0)]

    def row_bytes(self, paths: Sequence[str]) -> float:
        """Bytes of a row, on average over files."""
        footers = [self._footers[path] for path in paths]
        groups = [
            footer.row_group(group).total_byte_size
            for footer in footers
            for group in range(footer.num_row_groups)
        ]
        return sum(groups) / max(sum(footer.num_rows for footer in footers), 1)

    def read(
        self, path: str, group: int, names: list[str], most: int | None = None
    ) -> dict[str, Column]:
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
            with _open(path, self._stored, self._footers[path]) as file:
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

    def first(self, path: str, names: list[str]) -> dict[str, Column]:
        """The first values of columns of a file, ``columns.SAMPLE`` or some more."""
        import pyarrow

        parts = {name: [] for name in names}
        count = 0
        for group in range(self.count(path)):
            with contextlib.suppress(ValueError):  # said of its record
                read = self.read(path, group, names, columns.SAMPLE)
                for name, values in read.items():
                    parts[name].append(values)
                count += len(read[names[0]])
            if count >= columns.SAMPLE:
                break
        return {
            name: pyarrow.concat_arrays(values)
            for name, values in parts.items()
            if values
        }

    def texts(
        self,
        path: str,
        names: list[str],
        chosen: Callable[[np.ndarray], np.ndarray | bool] | None = None,
    ) -> dict[str, set[str]]:
        """Different texts in columns of a file, by their names.

        What cannot be read is left out: whoever reads the rows says so.

        Args:
            path: of the file.
            names: of the columns.
            chosen: tells which rows to look at, of their places; None for all.
        """
        found = {name: set() for name in names}
        for group, (first, end) in enumerate(itertools.pairwise(self.bounds(path))):
            rows = np.arange(first, end)
            rows = rows - first if chosen is None else np.flatnonzero(chosen(rows))
            with contextlib.suppress(ValueError):
                for name, column in self.read(path, group, names).items():
                    found[name] |= {*as_text(column).take(rows).unique().to_pylist()}
        return {name: some - {None} for name, some in found.items()}

    def different(self, paths: Iterable[str], name: str) -> tuple[Column | None, int]:
        """Returns a column's different values in all files, and how many rows have one.

        Row groups that cannot be read are left out: whoever reads their rows says so.
        """
        import pyarrow

        parts, count = [], 0
        for path in paths:
            for group in range(self.count(path)):
                with contextlib.suppress(ValueError):
                    values = self.read(path, group, [name])[name].drop_null()
                    count += len(values)
                    values = as_text(values) if is_text(values.type) else values
                    parts.append(values.unique())
        return (pyarrow.concat_arrays(parts).unique() if parts else None), count


def is_text(kind: Any) -> bool:
    """Tells whether a column's type is text, with or without a dictionary."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    return types.is_string(kind) or types.is_large_string(kind)


def as_text(column: Column) -> Column:
    """A column of texts, without a dictionary."""
    import pyarrow

    return column.cast(pyarrow.string())


def missing(
    read: dict[str, Column],
    may_be_empty: Sequence[str] = (),
    numbers: Sequence[str] = (),
) -> dict[int, str]:
    """The rows in which there is nothing, and what to say of each.

    Args:
        read: columns by their names.
        may_be_empty: those that may be.
        numbers: those of numbers to learn from, which can be filled or left out.
    """
    rows = {}
    for name, column in read.items():
        if column.null_count and name not in may_be_empty:
            fault = f"nothing in the column {name!r}, expected a value"
            fault += f": {columns.FILL}" if name in numbers else ""
            for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)):
                rows.setdefault(int(row), fault)
    return rows


def filled(column: Column) -> Column:
    """A column with something in the place of nothing: its rows are passed over."""
    if not column.null_count:
        return column
    import pyarrow

    is_binary, is_large = pyarrow.types.is_binary, pyarrow.types.is_large_binary
    of_bytes = is_binary(column.type) or is_large(column.type)
    return column.fill_null(b"" if of_bytes else 0)


def labels_in(column: Column, class_names: Sequence[str] | None) -> np.ndarray:
    """int64 labels [B] of a column of whole numbers, or of names of classes.

    `class_names` are all of them, by their labels; None for numbers.
    """
    if class_names is not None:
        import pyarrow
        from pyarrow import compute

        names = pyarrow.array(class_names, pyarrow.string())
        column = compute.index_in(as_text(column), value_set=names).fill_null(-1)
    labels = filled(column).to_numpy(zero_copy_only=False)
    # No class is a fraction.
    return np.where(labels % 1 == 0, labels, -1).astype(np.int64)


def numbers_in(found: Sequence[Column], rows: int, count: int) -> np.ndarray:
    """float64 [rows, count] of columns of numbers; zeros where fewer were read."""
    numbers = np.zeros([rows, count], np.float64)
    for place, column in enumerate(found):
        numbers[:, place] = filled(column).to_numpy(zero_copy_only=False)
    return numbers


def texts_in(found: Sequence[Column], rows: int) -> np.ndarray:
    """Texts [rows, columns] of columns of text; empty where there is nothing."""
    texts = np.full([rows, len(found)], "", object)
    for place, column in enumerate(found):
        texts[:, place] = as_text(column).fill_null("").to_pylist()
    return texts


def described_classes(schema: Any, label: str) -> tuple[str, ...] | None:
    """Names of the classes, where Hugging Face has written them."""
    try:
        text = (schema.metadata or {})[b"huggingface"]
        return tuple(json.loads(text)["info"]["features"][label]["names"])
    except (KeyError, TypeError, ValueError):
        return None


class _File(tf.io.gfile.GFile):
    """A file of any file system, for pyarrow."""

    closed = False


def _open(path: str, stored: StoredFiles | None, footer: Any = None) -> Any:
    from pyarrow import parquet

    file = _File(path, "rb") if stored is None else StoredFile(stored, path)
    return parquet.ParquetFile(file, metadata=footer)


def _footer(path: str, stored: StoredFiles | None) -> Any:
    import pyarrow

    try:
        with _open(path, stored) as file:
            return file.metadata
    except (pyarrow.ArrowException, tf.errors.OpError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; expected a whole Parquet file"
        ) from error
