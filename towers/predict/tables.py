"""Columns of CSV and Parquet files, as a model was trained on them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from towers.input_pipeline.sources.tables import kinds, reading, values
from towers.input_pipeline.sources.tables.blocks import Block, TableFile
from towers.input_pipeline.sources.tables.opened import SUFFIXES, open_table, text_rows
from towers.input_pipeline.sources.tables.reading import Wanted
from towers.train.outputs.preprocessing import Preprocessing

__all__ = ["SUFFIXES", "Rows", "as_text", "blocks", "texts"]


class Rows(NamedTuple):
    """The rows of a block of a file.

    Attributes:
        columns: What the model takes, by the names of columns: float64, int64 or
            objects, [rows].
        numbers: Of the rows in the file, from 1.
        kept: Columns that are only copied, by their names, as they are written.
        faults: What is wrong with other rows, by their numbers.
        unseen: How many of the rows have a text that training has not seen, by the
            columns of categories.
    """

    columns: dict[str, np.ndarray]
    numbers: np.ndarray
    kept: dict[str, list[Any]]
    faults: dict[int, str]
    unseen: dict[str, int]


def blocks(known: Preprocessing, file: str, kept: Sequence[str] = ()) -> Iterator[Rows]:
    """Reads the columns of a model from a file, block by block.

    Args:
        known: What the model takes.
        file: The path of the file.
        kept: Names of columns that are only copied.

    Raises:
        ValueError: It is no such file, or has no such columns.
    """
    table = open_table(file)
    _check_columns(table, known.columns, "which the model was trained on")
    _check_columns(table, kept, "which --keep_columns names")
    wanted = _wanted(table, known)
    seen = {name: {*known.vocabularies[name], ""} for name in wanted.texts}
    first = 1
    for block, data in table.blocks():
        part = reading.read_part(table, block, data, wanted)
        columns = dict(zip(wanted.numbers, part.numbers.T, strict=True))
        is_new = {}
        for name, column in zip(wanted.texts, part.texts, strict=True):
            texts = np.array(column.dictionary.to_pylist(), object)
            codes = column.indices.to_numpy(zero_copy_only=False)
            columns[name] = texts[codes]
            unknown = np.array([text not in seen[name] for text in texts], bool)
            is_new[name] = unknown[codes]
        of_block = dict.fromkeys(range(part.rows), part.fault) if part.fault else {}
        faults = {**_bad_ids(known, columns), **part.faults, **of_block}
        good = np.delete(np.arange(part.rows), [*faults])
        yield Rows(
            {name: column[good] for name, column in columns.items()},
            first + good,
            _kept(table, block, data, kept, good),
            {first + row: fault for row, fault in sorted(faults.items())},
            {name: int(new[good].sum()) for name, new in is_new.items()},
        )
        first += part.rows


def texts(
    known: Preprocessing, file: str, kept: Sequence[str] = ()
) -> Iterator[tuple[bytes, str, list[str]]]:
    """Reads a column of texts: yields each with its fault, or "", and what is kept."""
    table = open_table(file)
    _check_columns(table, known.columns, "which the model was trained on")
    _check_columns(table, kept, "which --keep_columns names")
    for row in text_rows(table, [*dict.fromkeys((*known.columns, *kept))]):
        cells = dict(zip((*known.columns, *kept), row.values, strict=False))
        text, *_ = row.values or [""]
        copied = [cells.get(name, "") for name in kept]
        # Bytes that are no text are for the tokenizer to find.
        yield text.encode(errors="surrogateescape"), row.fault, copied


def as_text(value: Any) -> str:
    """Returns a category as a text; an empty one where nothing stands."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return "" if value is None or value != value else str(value)


def _wanted(table: TableFile, known: Preprocessing) -> Wanted:
    """The columns to read, as training had them, whatever the first rows have."""
    import pyarrow as pa

    texts = [name for name in known.columns if known.is_text(name)]
    numbers = [name for name in known.columns if name not in texts]
    types = {}
    for name in known.columns:
        if name in known.column_kinds:
            types[name] = kinds.read_as(table, name, known.column_kinds[name])
        elif name in numbers:
            types[name] = kinds.read_as(table, name, *kinds.NUMBERS)
        else:
            is_text = values.is_text(table.types[name])
            types[name] = table.types[name] if is_text else pa.string()
    fills = known.scaling is not None and bool(known.scaling.fill)
    return Wanted(numbers, texts, [], types, may_be_missing=fills)


def _bad_ids(known, columns):
    """Faults of ids that no table has, by their rows."""
    faults = {}
    for name, size in known.tables.items():
        if known.is_text(name):
            continue
        with np.errstate(invalid="ignore"):
            ids = columns[name]
            bad = ~((ids >= 0) & (ids < size) & (ids == np.floor(ids)))
        for row in np.flatnonzero(bad):
            faults[int(row)] = (
                f"column {name!r} is {ids[row]:g}, expected an id of 0 to {size - 1}"
            )
    return faults


def _kept(
    table: TableFile, block: Block, data: bytes, names: Sequence[str], good: np.ndarray
) -> dict[str, list[Any]]:
    """Cells of columns that are only copied."""
    if not names or not len(good):
        return {name: [] for name in names}
    read = table.parse(block, data, {name: table.text_type(name) for name in names})
    row_of = {place: row for row, place in enumerate(read.places.tolist())}
    rows = [row_of[place] for place in good.tolist()]
    kept = {}
    for name in names:
        cells = read.values[name].take(rows).to_pylist()
        kept[name] = [_written(cell) for cell in cells]
    return kept


def _written(cell):
    return cell.decode(errors="replace") if isinstance(cell, bytes) else cell


def _check_columns(table, names, why):
    if missing := [name for name in names if name not in table.names]:
        raise ValueError(
            f"{table.path} has no column {', '.join(map(repr, missing))}, {why}; its "
            f"columns are {', '.join(map(repr, table.names)) or 'none'}."
        )
