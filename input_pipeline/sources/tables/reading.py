"""Reads a table's columns in blocks: numbers, texts, targets, and bad rows."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from towers.input_pipeline.sources import memory
from towers.input_pipeline.sources.tables import columns, values
from towers.input_pipeline.sources.tables.blocks import (
    Block,
    Columns,
    TableFile,
    read_in_order,
)
from towers.input_pipeline.sources.targets import LARGEST, expected_number


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The columns to read.

    Attributes:
        numbers: names of the columns of numbers to learn from.
        texts: names of the columns of text to learn from.
        labels: names of the columns of targets.
        types: pyarrow's types of all of these, by their names.
        may_be_missing: whether a number to learn from may be missing.
    """

    numbers: Sequence[str]
    texts: Sequence[str]
    labels: Sequence[str]
    types: Mapping[str, Any]
    may_be_missing: bool = True


@dataclasses.dataclass
class Part:
    """All rows of a block. An unreadable row has NaN and empty texts.

    Attributes:
        block: the block.
        rows: the number of rows.
        numbers: float64 [rows, numbers]; NaN where a number is missing.
        texts: columns [rows] of text, encoded by `values.as_categories`.
        labels: columns of targets: encoded texts, or float64 [rows].
        faults: the fault of a row, a phrase, by its position in the block.
        lines: the line of each such row, if rows are lines.
        fault: why no row of the block can be read; empty if they can.
    """

    block: Block
    rows: int
    numbers: np.ndarray
    texts: list[Any]
    labels: list[Any]
    faults: dict[int, str]
    lines: dict[int, int]
    fault: str = ""

    @property
    def good(self) -> np.ndarray:
        """The rows without a fault: bool [rows]."""
        good = np.full(self.rows, not self.fault)
        good[[*self.faults]] = False
        return good


def read_parts(
    files: Sequence[TableFile], wanted: Wanted
) -> Iterator[tuple[int, Part]]:
    """Yields the index of a file and the rows of each of its blocks, in order."""
    items = (
        (index, *block) for index, file in enumerate(files) for block in file.blocks()
    )

    def read(item):
        index, block, data = item
        return index, read_part(files[index], block, data, wanted)

    return read_in_order(items, read)


def read_part(file: TableFile, block: Block, data: bytes, wanted: Wanted) -> Part:
    """Reads the wanted columns of a block."""
    read = file.parse(block, data, wanted.types)
    faults, positions = dict(read.faults), read.places
    numbers = memory.zeros((read.rows, len(wanted.numbers)), np.float64)
    numbers[[*read.left_out]] = np.nan
    for column, name in enumerate(wanted.numbers if len(positions) else ()):
        numbers[positions, column] = values.as_numbers(read.values[name])
    for row, column in np.argwhere(np.abs(numbers) > LARGEST):
        value = numbers[row, column]
        expected = expected_number(value)
        fault = f"{wanted.numbers[column]} is {value:g}, expected {expected}"
        faults.setdefault(int(row), fault)
    if not wanted.may_be_missing and not read.fault:
        for row, column in np.argwhere(np.isnan(numbers)):
            fault = f"nothing in the column {wanted.numbers[column]!r}: {columns.FILL}"
            faults.setdefault(int(row), fault)
    texts = [_categories(read, name, positions) for name in wanted.texts]
    labels = [_target(read, name, positions, wanted) for name in wanted.labels]
    lines = file.lines(block, data, [*faults]) if faults else {}
    return Part(block, read.rows, numbers, texts, labels, faults, lines, read.fault)


def _target(read, name, positions, wanted):
    if not values.is_number(wanted.types[name]):
        return _categories(read, name, positions)
    numbers = np.full(read.rows, np.nan)
    if len(positions):
        numbers[positions] = values.as_numbers(read.values[name])
    return numbers


def _categories(read: Columns, name: str, positions: np.ndarray) -> Any:
    """Returns a column of text, with a row for each row of the block."""
    column = read.values.get(name, pa.array([], pa.string()))
    if len(positions) < read.rows:
        rows = np.full(read.rows, -1)
        rows[positions] = np.arange(len(positions))
        column = column.take(pa.array(rows, mask=rows < 0))
    return values.as_categories(column)


def ids(column: Any, id_of: Mapping[str, int]) -> np.ndarray:
    """Returns ids of the rows of an encoded column; 0 for a text without one."""
    of_texts = [id_of.get(text, 0) for text in column.dictionary.to_pylist()]
    return np.array([*of_texts, 0], np.int64)[column.indices.to_numpy()]
