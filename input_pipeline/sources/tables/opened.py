"""Opens a file of columns, and reads texts of it row by row."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from towers.input_pipeline.local_store.store import StoredFiles
from towers.input_pipeline.sources.tables.blocks import TableFile
from towers.input_pipeline.sources.tables.csv_file import CSVFile

_PARQUET = (".parquet", ".pq")
# Endings of the names of files with columns.
SUFFIXES = (".csv", ".csv.gz", ".csv.zst", ".tsv", *_PARQUET)


def open_table(path: str, stored: StoredFiles | None = None) -> TableFile:
    """Opens a CSV or Parquet file, as the end of its name tells; by default CSV.

    Args:
        path: the path of the file.
        stored: the files of its data set, if they are read through a store.

    Raises:
        ValueError: it is no such file.
    """
    if path.lower().endswith(_PARQUET):
        from towers.input_pipeline.sources.tables.parquet_file import ParquetFile

        return ParquetFile(path, stored)
    return CSVFile(path, stored)


class TextRow(NamedTuple):
    """A row of texts.

    Attributes:
        place: the position in the file, a phrase.
        values: the values of the requested columns. Bytes that are not UTF-8 are kept
            as Python's surrogates.
        fault: why the row cannot be used, or "".
    """

    place: str
    values: Sequence[str]
    fault: str = ""


def text_rows(table: TableFile, names: Sequence[str]) -> Iterator[TextRow]:
    """Yields the values in some columns of a file, as text, row by row."""
    first = 0
    for block, data in table.blocks():
        read = table.parse(block, data, {name: table.text_type(name) for name in names})
        cells = {name: read.values[name].to_pylist() for name in read.values}
        lines = table.lines(block, data, range(read.rows))
        column = 0
        left_out = {*read.left_out}
        for row in range(read.rows):
            place = f"line {lines[row] + 1}" if row in lines else f"row {first + row}"
            if row in left_out:
                yield TextRow(place, (), read.faults.get(row, read.fault))
                continue
            values = [cells[name][column] for name in names]
            column += 1
            fault = read.faults.get(row) or _fault(names, values)
            yield TextRow(place, [*map(_as_text, values)], fault)
        first += read.rows


def _fault(names, values):
    for name, value in zip(names, values, strict=True):
        if value is None:
            return f"nothing in the column {name!r}, expected a value"
        if isinstance(value, list | dict):
            return f"{name} is {str(value)[:60]}, expected a text"
    return ""


def _as_text(value):
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return str(value)
