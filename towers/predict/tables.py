"""Rows of CSV and Parquet files, by the columns that a model was trained on."""

import csv
import math
from collections.abc import Iterator, Sequence
from typing import Any

from towers.input_pipeline.sources.tables.row_groups import is_text
from towers.train.outputs.preprocessing import Preprocessing

_PARQUET = (".parquet", ".pq")
# Of files with columns, by how their names end.
SUFFIXES = (".csv", *_PARQUET)


def rows(
    file: str, columns: Sequence[str], empty: str | None = None
) -> Iterator[Sequence[Any]]:
    """Reads some columns of a file, row by row; `None` where nothing stands.

    Args:
        file: Its path.
        columns: Names of the columns.
        empty: What a missing text of a Parquet file is.

    Raises:
        ValueError: It is no such file, or has no such columns.
    """
    if file.lower().endswith(_PARQUET):
        return _parquet(file, columns, empty)
    return _csv(file, columns)


def cell(known: Preprocessing, name: str, value: Any) -> Any:
    """Makes of what a file has in a column what a `Preprocessor` takes.

    Raises:
        ValueError: It cannot be that.
    """
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
    if not math.isfinite(number):
        raise ValueError(f"column {name!r} is {value!r}, expected a number")
    return number


def as_text(value: Any) -> str:
    """A category as a text; an empty one where nothing stands."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return "" if value is None or value != value else str(value)


def _number(value):
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _csv(file, columns):
    try:
        with open(file, newline="", encoding="utf-8-sig") as lines:
            reader = csv.reader(lines)
            places = _places(file, next(reader, []), columns)
            for row in filter(None, reader):
                yield [row[i] if i < len(row) else None for i in places]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is no text in UTF-8; expected a CSV or a Parquet file."
        ) from error


def _parquet(file, columns, empty):
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(
            f"{file} needs the package pyarrow, which is not installed; expected it, "
            "so pip install 'keras-towers[parquet]'."
        ) from error
    try:
        table = parquet.ParquetFile(file)
        _places(file, table.schema_arrow.names, columns)
        for batch in table.iter_batches(columns=[*columns]):
            found = [batch.column(name) for name in columns]
            missing = [empty if is_text(each.type) else None for each in found]
            for row in zip(*(each.to_pylist() for each in found), strict=True):
                pairs = zip(row, missing, strict=True)
                yield [none if cell is None else cell for cell, none in pairs]
    except ArrowException as error:
        raise ValueError(f"{file} cannot be read: {error}; correct it.") from error


def _places(file, header, columns):
    missing = [name for name in columns if name not in header]
    if missing:
        raise ValueError(
            f"{file} has no column {', '.join(map(repr, missing))}, which the model "
            f"was trained on; its columns are {', '.join(map(repr, header))}."
        )
    return [header.index(name) for name in columns]
