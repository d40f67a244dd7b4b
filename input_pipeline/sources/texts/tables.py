"""Rows of text and labels, as CSV and Parquet files have them."""

import io
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from towers.input_pipeline.sources.files.record import BadRecordError, fault_of
from towers.input_pipeline.sources.tables import columns, csv_rows, row_groups
from towers.program.extras import install_command


class Row(NamedTuple):
    """A row of a file.

    Attributes:
        place: in the file, a phrase.
        values: of the columns that were asked for.
        fault: why it cannot be used, or "".
    """

    place: str
    values: Sequence[str]
    fault: str = ""


class Table(Protocol):
    """How files of one kind are read."""

    def columns(self, path: str) -> list[str]:
        """Names of the columns of a file."""

    def rows(self, path: str, names: Sequence[str]) -> Iterator[Row]:
        """The rows of a file, as far as some columns go."""

    def described(self, path: str, label: str) -> tuple[str, ...] | None:
        """Names of the classes, if the file has a description of them."""


class CSV:
    """CSV files, in which quotes may hold commas and line breaks."""

    def columns(self, path: str) -> list[str]:
        """See ``Table.columns``."""
        fields, _, fault = next(self._read(path), csv_rows.CSVRow([], 1))
        if fault:
            raise BadRecordError(f"{path}: the header {fault}")
        names = [name.strip() for name in fields]
        columns.check_different(path, names)
        if len(names) < 2:
            raise ValueError(
                f"{path} begins with {','.join(names)[:60]!r}: expected a header, the "
                "names of at least two columns, separated by commas"
            )
        return names

    def rows(self, path: str, names: Sequence[str]) -> Iterator[Row]:
        """See ``Table.rows``."""
        found = self.columns(path)
        places = [found.index(name) for name in names]
        for fields, line, fault in itertools.islice(self._read(path), 1, None):
            place = f"line {line}"
            if fault:
                yield Row(place, (), fault)
            elif len(fields) == len(found):
                yield Row(place, [fields[k] for k in places])
            elif fields:
                fault = f"has {len(fields)} fields, expected {len(found)}"
                yield Row(place, (), fault)

    def _read(self, path: str) -> Iterator[csv_rows.CSVRow]:
        """Reads the rows of a file; see ``csv_rows.read``."""
        try:
            with tf.io.gfile.GFile(path, "rb") as file:
                content = file.read()
        except tf.errors.OpError as error:
            raise BadRecordError(f"{path}: {fault_of(error)}") from error
        # What is no UTF-8 stays what it is. Excel begins its files with a mark.
        text = content.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
        return csv_rows.read(io.StringIO(text, newline=""))

    def described(self, path: str, label: str) -> None:
        """See ``Table.described``: CSV files have none."""


class Parquet:
    """Parquet files.

    Args:
        paths: of all.

    Raises:
        ValueError: there is no pyarrow, or one is no such file.
    """

    def __init__(self, paths: Sequence[str]):
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"{paths[0]} needs the package pyarrow, which is not installed: "
                f"{install_command('parquet')}"
            ) from error
        self._groups = row_groups.RowGroups(paths)

    def columns(self, path: str) -> list[str]:
        """See ``Table.columns``."""
        names = [*self._groups.schema(path).names]
        columns.check_different(path, names)
        return names

    def rows(self, path: str, names: Sequence[str]) -> Iterator[Row]:
        """See ``Table.rows``."""
        bounds = self._groups.bounds(path)
        for group in range(self._groups.count(path)):
            try:
                read = self._groups.read(path, group, [*names])
            except ValueError as error:
                yield Row(f"row group {group}", (), str(error))
                continue
            faults = row_groups.missing(read)
            values = [read[name].to_pylist() for name in names]
            for row, found in enumerate(zip(*values, strict=True)):
                texts = [_as_text(value) for value in found]
                place = f"row {bounds[group] + row}"
                fault = faults.get(row, "")
                for name, value in zip(names, found, strict=True):
                    if isinstance(value, list | dict):
                        fault = f"{name} is {str(value)[:60]}, expected a text"
                yield Row(place, texts, fault)

    def described(self, path: str, label: str) -> tuple[str, ...] | None:
        """See ``Table.described``."""
        return row_groups.described_classes(self._groups.schema(path), label)


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return str(value)
