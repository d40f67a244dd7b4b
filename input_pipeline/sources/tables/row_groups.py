"""The row groups of Parquet files, as pyarrow reads them."""

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow
import tensorflow as tf
from pyarrow import parquet

from towers.input_pipeline.local_store.store import StoredFiles
from towers.input_pipeline.sources.files.stored import StoredFile

# A pyarrow column; columns that were read are found by their names.
Column = Any


class RowGroups:
    """The row groups of some files, whose footers are read once.

    Args:
        paths: the paths of the files.
        stored: the files, if they are read through a store.

    Raises:
        ValueError: one is no whole Parquet file.
    """

    def __init__(self, paths: Iterable[str], stored: StoredFiles | None = None):
        self._stored = stored
        self._footers = {path: _footer(path, stored) for path in paths}

    def schema(self, path: str) -> Any:
        """Returns the columns of a file and their types, as pyarrow has them."""
        return self._footers[path].schema.to_arrow_schema()

    def count(self, path: str) -> int:
        """Returns the number of row groups of a file."""
        return self._footers[path].num_row_groups

    def rows(self, path: str) -> int:
        """Returns the number of rows of a file."""
        return self._footers[path].num_rows

    def bounds(self, path: str) -> list[int]:
        """Returns the first row's number for each row group, and the number of rows."""
        footer = self._footers[path]
        counts = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        return [*itertools.accumulate(counts, initial=0)]

    def row_bytes(self, paths: Sequence[str]) -> float:
        """Returns the mean bytes of a row in some files."""
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
        """Reads columns of one row group, by their names.

        Args:
            path: the path of the file.
            group: the number of the row group.
            names: the names of the columns.
            most: the number of rows to read; None for all.

        Raises:
            ValueError: the row group cannot be read.
        """
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
                # A missing struct has no bytes either.
                read[name] = column.flatten()[column.type.get_field_index("bytes")]
        return read

    def null_count(self, path: str, group: int, name: str) -> int | None:
        """Returns how many values of a column are missing, if the footer tells."""
        group = self._footers[path].row_group(group)
        for place in range(group.num_columns):
            column = group.column(place)
            # A struct of bytes and a path has no bytes if it is missing itself.
            if column.path_in_schema in (name, f"{name}.bytes"):
                known = column.statistics
                if known is not None and known.has_null_count:
                    return known.null_count
        return None


def described_classes(schema: Any, label: str) -> tuple[str, ...] | None:
    """Returns the names of the classes, if Hugging Face has written them."""
    try:
        text = (schema.metadata or {})[b"huggingface"]
        return tuple(json.loads(text)["info"]["features"][label]["names"])
    except (KeyError, TypeError, ValueError):
        return None


class _File(tf.io.gfile.GFile):
    """A file of any file system, for pyarrow."""

    closed = False


def _open(path: str, stored: StoredFiles | None, footer: Any = None) -> Any:
    file = _File(path, "rb") if stored is None else StoredFile(stored, path)
    return parquet.ParquetFile(file, metadata=footer)


def _footer(path: str, stored: StoredFiles | None) -> Any:
    try:
        with _open(path, stored) as file:
            return file.metadata
    except (pyarrow.ArrowException, tf.errors.OpError, OSError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; expected a whole Parquet file"
        ) from error
