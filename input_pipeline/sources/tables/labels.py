"""The columns of a table's targets, and the targets that their values make."""

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from towers.input_pipeline.sources.tables import columns, table_targets, values
from towers.input_pipeline.sources.tables.table_targets import number_of
from towers.input_pipeline.sources.targets import Target, TargetKind

# With more classes than this, some may have no record.
_MANY = 1000


class Labels:
    """Collects columns of targets, block by block, and makes targets of them.

    Args:
        where: the first file, for messages.
        names: the names of the columns.
        types: pyarrow's types of the columns, by their names.

    Attributes:
        notes: sentences on defaults that were chosen.
        target: the target of the model; known once `decide` has been called.
    """

    def __init__(self, where: str, names: Sequence[str], types: dict[str, Any]):
        self._where, self._names, self._types = where, names, types
        self._blocks: list[Sequence[Any]] = []
        # The rows of each block that are not learnt from.
        self._bad: list[Sequence[int]] = []
        # Classes by their texts; None for whole numbers.
        self._labels: dict[str, int] | None = None
        self.notes: list[str] = []
        self.target: Target | None = None

    def add(self, block: Sequence[Any], bad: Sequence[int]) -> None:
        """Adds the columns of a block.

        Args:
            block: encoded texts, or float64 numbers [rows].
            bad: rows that are not learnt from.
        """
        self._blocks.append(block)
        self._bad.append(bad)

    def let_go(self) -> None:
        """Releases the columns: later blocks are given to `targets`."""
        self._blocks, self._bad = [], []

    def decide(
        self,
        asked: TargetKind | None,
        class_names: Sequence[str] | None,
        num_classes: int | None,
        named: bool,
        described: Sequence[str] | None = None,
    ) -> None:
        """Decides the kind of target.

        Args:
            asked: the requested kind; None for what the values tell.
            class_names: names of the classes, in order, if they are known.
            num_classes: the number of classes, if known.
            named: whether the user has named the columns.
            described: a file's names for the numbers of its classes.

        Raises:
            ValueError: the columns cannot have that kind.
        """
        of_columns = [self._different(column) for column in range(len(self._names))]
        kind, note = table_targets.choose(
            self._where,
            [
                table_targets.Column.of(name, *different)
                for name, different in zip(self._names, of_columns, strict=True)
            ],
            asked,
            class_names or num_classes,
        )
        self.notes += filter(None, [note])
        (texts, rows), name = of_columns[0], self._names[0]
        if kind != "class":
            names = tuple(self._names)
            self.target = Target(kind, len(names), names)
        elif table_targets.Column.of(name, texts, rows).form == "text":
            note = columns.check_classes(self._where, name, texts, rows, named)
            self.notes += filter(None, [note])
            names = columns.order_classes(
                self._where, name, texts, num_classes, class_names
            )
            self.target = Target("class", len(names), names)
            self._labels = {text: label for label, text in enumerate(names)}
        else:
            self.target = self._of_numbers(
                texts, rows, class_names or described, num_classes
            )

    def targets(self, block: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Makes targets of a block's columns.

        Returns:
            int64 classes [rows], or float64 numbers [rows, columns], and whether each
            row has a good target, bool [rows].
        """
        if self.target.kind != "class":
            y = np.stack([*map(_numbers, block)], axis=1)
            return y, self.target.is_good(y).all(axis=1)
        if self._labels is None:
            y = _numbers(block[0])
            y = np.where(y == np.floor(y), y, -1).astype(np.int64)
        else:
            y = _by_texts(block[0], lambda text: self._labels.get(text, -1), np.int64)
        return y, self.target.is_good(y)

    def bad(self) -> list[np.ndarray]:
        """Returns the positions of rows without a good target, for each block."""
        return [np.flatnonzero(~self.targets(block)[1]) for block in self._blocks]

    def fault(self, number: int, row: int) -> str:
        """Describes the fault of a row's target in a phrase."""
        expected = self.target.expected
        if self._of_class:
            names = "the name of a class", "a whole number from 0"
            expected = names[self._labels is None]
        for name, column in zip(self._names, self._blocks[number], strict=True):
            cell = _cell(column, row)
            if cell in ("", None):
                return f"nothing in the column {name!r}, expected {expected}"
            if "\ufffd" in str(cell):
                return f"{name} is {cell[:60]!r}, expected {expected} in UTF-8"
            value = number_of(cell)
            if self._labels is None and (
                value is None or (self._of_class and value % 1)
            ):
                return f"{name} is {str(cell)[:60]!r}, expected {expected}" + _ADVICE
        y = np.atleast_1d(self.targets(self._blocks[number])[0][row])
        counted = Target("class", math.inf) if self._of_class and y < 0 else self.target
        return counted.fault(y, self._names[0])

    @property
    def _of_class(self) -> bool:
        return self.target.kind == "class"

    def _different(self, index: int) -> tuple[Sequence[Any], int]:
        """Returns the different values of a column, and how many rows have one."""
        parts = [block[index] for block in self._blocks]
        if self._is_text(index):
            counts = collections.Counter()
            for part, bad in zip(parts, self._bad, strict=True):
                codes = np.delete(part.indices.to_numpy(), bad)
                of_codes = np.bincount(codes, minlength=len(part.dictionary))
                counts.update(
                    dict(zip(part.dictionary.to_pylist(), of_codes, strict=True))
                )
            texts = [text for text, count in counts.items() if count and text]
            return sorted(texts), int(sum(counts[text] for text in texts))
        parts = [
            np.delete(part, bad) for part, bad in zip(parts, self._bad, strict=True)
        ]
        numbers = np.unique(np.concatenate([np.unique(part) for part in parts]))
        numbers = numbers[~np.isnan(numbers)]
        rows = sum(int((~np.isnan(part)).sum()) for part in parts)
        if values.is_whole(self._types[self._names[index]]):
            return [int(number) for number in numbers], rows
        return numbers.tolist(), rows

    def _is_text(self, index: int) -> bool:
        return values.is_text(self._types[self._names[index]])

    def _of_numbers(
        self,
        different: Sequence[Any],
        rows: int,
        names: Sequence[str] | None,
        num_classes: int | None,
    ) -> Target:
        """Makes the target for whole numbers that are classes."""
        if num_classes is not None or names is not None:
            size = num_classes or len(names)
            fits = names is not None and len(names) == size
            return Target("class", size, tuple(names) if fits else None)
        numbers = (number_of(value) for value in different)
        used = np.array([n for n in numbers if n is not None and n >= 0 and n % 1 == 0])
        size = int(used.max(initial=-1)) + 1
        if size > max(_MANY, rows):
            raise ValueError(
                f"{self._where} has labels up to {size - 1:,} in {self._names[0]!r}, "
                "which is more than it has records: expected numbers of classes, so "
                "learn numbers by --task=regression (in Python, target='numbers'), "
                "name another field or column, or give the number of classes by "
                "--num_classes (in Python, num_classes)"
            )
        return Target("class", size)


_ADVICE = (
    "; where labels are names of classes, none is a number; --task=regression (in "
    "Python, target='numbers') learns numbers"
)


def _numbers(column: Any) -> np.ndarray:
    if isinstance(column, np.ndarray):
        return column
    return _by_texts(column, _number_or_nan, np.float64)


def _number_or_nan(text: str) -> float:
    number = number_of(text)
    return np.nan if number is None else number


def _by_texts(column: Any, value: Any, dtype: type) -> np.ndarray:
    """Returns values of the rows of encoded texts; converts each text once."""
    of_texts = np.array([*map(value, column.dictionary.to_pylist())], dtype)
    return of_texts[column.indices.to_numpy()] if len(of_texts) else of_texts


def _cell(column: Any, row: int) -> str | float | None:
    if isinstance(column, np.ndarray):
        return None if np.isnan(column[row]) else float(column[row])
    return column.dictionary[column.indices[row].as_py()].as_py()
