"""Rows of CSV and Parquet files, by the columns that a model was trained on."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from towers.input_pipeline.sources.tables import csv_rows
from towers.input_pipeline.sources.tables.row_groups import is_text
from towers.input_pipeline.sources.targets import LARGEST, expected_number
from towers.program import words
from towers.program.extras import install_command
from towers.train.outputs.preprocessing import Preprocessing

_PARQUET = (".parquet", ".pq")
# Of files with columns, by how their names end.
SUFFIXES = (".csv", *_PARQUET)
# Why a column is to be there that the model does not need.
_TO_COPY = "which --keep_columns names"


class Row(NamedTuple):
    """A row of a file.

    Attributes:
        cells: What stands in the columns; `None` where nothing does.
        fault: Why the row cannot be read, or "".
        kept: What stands in columns that are only copied.
    """

    cells: Sequence[Any]
    fault: str = ""
    kept: Sequence[Any] = ()


def rows(
    file: str,
    columns: Sequence[str],
    empty: str | None = None,
    kept: Sequence[str] = (),
) -> Iterator[Row]:
    """Reads some columns of a file, row by row.

    Args:
        file: Its path.
        columns: Names of the columns.
        empty: What a missing text of a Parquet file is.
        kept: Names of columns that are only copied.

    Raises:
        ValueError: It is no such file, or has no such columns.
    """
    if file.lower().endswith(_PARQUET):
        return _parquet(file, columns, empty, kept)
    return _csv(file, columns, kept)


def cells(known: Preprocessing, row: Row) -> Sequence[Any]:
    """Makes of a row what a `Preprocessor` takes.

    Raises:
        ValueError: It cannot be that.
    """
    if row.fault:
        raise ValueError(row.fault)
    pairs = zip(known.columns, row.cells, strict=True)
    return [_cell(known, name, value) for name, value in pairs]


def _cell(known, name, value):
    if known.is_text(name):
        if value is None:
            raise ValueError(f"column {name!r} is {value!r}, expected a text")
        return as_text(value)
    number = _number(value)
    if name in known.tables:
        size = known.tables[name]
        if number not in range(size):
            raise ValueError(
                f"column {name!r} is {value!r}, expected an id of 0 to {size - 1}"
            )
        return int(number)
    if not abs(number) <= LARGEST:
        expected = expected_number(number)
        raise ValueError(f"column {name!r} is {value!r}, expected {expected}")
    return number


def as_text(value: Any) -> str:
    """A category as a text; an empty one where nothing stands."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return "" if value is None or value != value else str(value)


def _number(value):
    # Python takes 1_000 for a number, and training does not.
    if isinstance(value, str) and "_" in value:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _csv(file, columns, kept):
    try:
        with open(file, newline="", encoding="utf-8-sig") as lines:
            found = csv_rows.read(lines)
            header = next(found, csv_rows.CSVRow([], 1)).fields
            places = _places(file, header, columns, "which the model was trained on")
            copied = _places(file, header, kept, _TO_COPY)
            for cells, _, fault in found:
                if fault:
                    yield Row((), fault)
                elif len(cells) == len(header):
                    yield Row(
                        [cells[place] for place in places],
                        kept=[cells[place] for place in copied],
                    )
                elif any(map(str.strip, cells)):
                    count = words.count(len(cells), "field")
                    yield Row((), f"has {count}, expected {len(header)} as the header")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is no text in UTF-8; expected a CSV or a Parquet file."
        ) from error


def _parquet(file, columns, empty, kept):
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(
            f"{file} needs the package pyarrow, which is not installed; expected it, "
            f"so run: {install_command('parquet')}"
        ) from error
    try:
        table = parquet.ParquetFile(file)
        header = table.schema_arrow.names
        places = _places(file, header, columns, "which the model was trained on")
        places += _places(file, header, kept, _TO_COPY)
        names = [header[place] for place in places]
        for batch in table.iter_batches(columns=[*dict.fromkeys(names)]):
            found = [batch.column(name) for name in names]
            missing = [empty if is_text(each.type) else None for each in found]
            for row in zip(*(each.to_pylist() for each in found), strict=True):
                pairs = zip(row, missing, strict=True)
                cells = [none if cell is None else cell for cell, none in pairs]
                yield Row(cells[: len(columns)], kept=cells[len(columns) :])
    except ArrowException as error:
        raise ValueError(f"{file} cannot be read: {error}; correct it.") from error


def _places(file, header, columns, why):
    stripped = [name.strip() for name in header]
    names = stripped if {*columns} - {*header} else header
    if missing := [name for name in columns if name not in names]:
        raise ValueError(
            f"{file} has no column {', '.join(map(repr, missing))}, {why}; its "
            f"columns are {', '.join(map(repr, header)) or 'none'}."
        )
    if twice := [name for name in columns if names.count(name) > 1]:
        raise ValueError(
            f"{file} has two columns {twice[0]!r}; expected different names, so rename "
            "one."
        )
    return [names.index(name) for name in columns]
