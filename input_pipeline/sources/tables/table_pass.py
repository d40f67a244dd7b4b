"""One pass over all rows of a table: what must be known, and the rows if they fit."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from towers.input_pipeline.sources import memory
from towers.input_pipeline.sources.tables import reading
from towers.input_pipeline.sources.tables.blocks import Block, TableFile
from towers.input_pipeline.sources.tables.columns import SAMPLE
from towers.input_pipeline.sources.tables.labels import Labels
from towers.input_pipeline.sources.tables.moments import Moments
from towers.input_pipeline.sources.tables.reading import Part, Wanted
from towers.machine import limits

# A column of text is a category if each text stands in so many rows, on average.
_ROWS_OF_A_TEXT = 5
# Of a column with more texts, which nobody has asked for, no more are collected.
_MOST_TEXTS = 100_000


@dataclasses.dataclass(frozen=True)
class Located:
    """A block, and where its rows are in a file.

    Attributes:
        file: place of the file among all.
        block: the block.
        first: number of the first row in the file.
        rows: how many there are.
    """

    file: int
    block: Block
    first: int
    rows: int


@dataclasses.dataclass
class Texts:
    """The texts of a column, as the training rows have them.

    Attributes:
        texts: the different ones, without the empty one.
        rows: how many rows have one of them.
    """

    texts: set[str] = dataclasses.field(default_factory=set)
    rows: int = 0

    def add(self, column: Any, training: np.ndarray) -> None:
        """Adds an encoded column of a block, of which some rows are for training."""
        codes = column.indices.to_numpy(zero_copy_only=False)[training]
        if self.repeat or len(self.texts) < _MOST_TEXTS:
            texts = column.dictionary.take(np.unique(codes)).to_pylist()
            self.texts.update({*texts} - {""})
        empty = column.dictionary.index("").as_py()
        self.rows += int((codes != empty).sum())

    @property
    def repeat(self) -> bool:
        """Whether each text stands in several rows, on average."""
        return len(self.texts) * _ROWS_OF_A_TEXT <= self.rows


@dataclasses.dataclass(frozen=True)
class Memory:
    """All good rows, those for training first.

    Attributes:
        numbers: float64 [N, F].
        ids: int64 [N] of each column of categories.
        targets: int64 [N] of classes, else float64 [N, K].
        training: how many rows are for training.
    """

    numbers: np.ndarray
    ids: Mapping[str, np.ndarray]
    targets: np.ndarray
    training: int


class TablePass:
    """Reads all rows of some files once.

    Args:
        tables: the files.
        wanted: the columns.
        labels: is given the columns of the targets.
        is_training: tells which rows are for training, bool [N], of the place of a file
            and the numbers of rows in it.

    Attributes:
        wanted: the columns.
        blocks: where the rows are, in order.
        faults: what is wrong with a row, by its block's place and its own there.
        lines: the line of such a row, by the same.
        moments: of the numbers of training rows.
        texts: of each column of text.
        first: numbers of the first rows, float64 [N, columns].
    """

    def __init__(
        self,
        tables: Sequence[TableFile],
        wanted: Wanted,
        labels: Labels,
        is_training: Callable[[int, np.ndarray], np.ndarray],
    ):
        self.wanted, self._tables, self._is_training = wanted, tables, is_training
        self.blocks: list[Located] = []
        self.faults: dict[tuple[int, int], str] = {}
        self.lines: dict[tuple[int, int], int] = {}
        self.first = np.zeros([0, len(wanted.numbers)])
        self.moments = Moments.of_nothing(len(wanted.numbers))
        self.texts = {name: Texts() for name in wanted.texts}
        # Numbers and texts of each block, until they take too much memory.
        self._parts: list[tuple[np.ndarray, list[Any]]] | None = []
        self._targets: list[Sequence[Any]] = []
        self._read(labels)

    def rows(self, file: int) -> int:
        """How many rows a file has."""
        return sum(located.rows for located in self.blocks if located.file == file)

    def _read(self, labels):
        room, taken = limits.SHARE * limits.free_memory(), 0
        firsts = dict.fromkeys(range(len(self._tables)), 0)
        for file, part in reading.read_parts(self._tables, self.wanted):
            located = Located(file, part.block, firsts[file], part.rows)
            firsts[file] += part.rows
            self._note_faults(part)
            self.blocks.append(located)
            training = part.good & self._training_rows(located)
            if len(self.first) < SAMPLE:
                self.first = np.concatenate([self.first, part.numbers[:SAMPLE]])
            self.moments.add(part.numbers[training])
            for texts, column in zip(self.texts.values(), part.texts, strict=True):
                texts.add(column, training)
            labels.add(part.labels, [*part.faults])
            self._targets.append(part.labels)
            taken += part.numbers.nbytes + 4 * part.rows * len(part.texts)
            if taken > room:
                self._parts = None
            if self._parts is not None:
                self._parts.append((part.numbers, part.texts))

    def _note_faults(self, part: Part) -> None:
        block = len(self.blocks)
        for row, fault in part.faults.items():
            self.faults[block, row] = fault
            if row in part.lines:
                self.lines[block, row] = part.lines[row]

    def _training_rows(self, located: Located) -> np.ndarray:
        rows = located.first + np.arange(located.rows)
        return self._is_training(located.file, rows)

    def find_bad_targets(self, labels: Labels) -> None:
        """Notes rows whose targets cannot be learnt."""
        for place, rows in enumerate(labels.bad()):
            wrong = [int(row) for row in rows if (place, int(row)) not in self.faults]
            if not wrong:
                continue
            located = self.blocks[place]
            table = self._tables[located.file]
            lines = table.lines(located.block, table.load(located.block), wrong)
            for row in wrong:
                self.faults[place, row] = labels.fault(place, row)
                if row in lines:
                    self.lines[place, row] = lines[row]

    def targets(self, labels: Labels) -> dict[str, np.ndarray]:
        """Returns the good targets of the training rows and of the others."""
        parts = {"train": [], "test": []}
        for place, located in enumerate(self.blocks):
            rows = self._good(place)
            training = self._training_rows(located)[rows]
            y = labels.targets(self._targets[place])[0][rows]
            parts["train"].append(y[training])
            parts["test"].append(y[~training])
        return {split: np.concatenate(some) for split, some in parts.items()}

    def joined(
        self,
        wanted: Wanted,
        labels: Labels,
        vocabularies: Mapping[str, Sequence[str]],
    ) -> Memory | None:
        """Joins the good rows, those for training first; `None` if they do not fit.

        Each block is let go as its rows are copied, so that there is no second copy.

        Args:
            wanted: the columns that are taken of those that were read.
            labels: makes targets.
            vocabularies: texts of the columns of categories, whose places from 1 are
                their ids.
        """
        if self._parts is None:
            return None
        chosen = [self.wanted.numbers.index(name) for name in wanted.numbers]
        texts = [self.wanted.texts.index(name) for name in wanted.texts]
        id_of = {
            name: {text: place + 1 for place, text in enumerate(vocabularies[name])}
            for name in wanted.texts
        }
        good = [self._good(place) for place in range(len(self.blocks))]
        training = [
            self._training_rows(located)[rows]
            for located, rows in zip(self.blocks, good, strict=True)
        ]
        count = sum(map(len, good))
        at = {True: 0, False: sum(int(some.sum()) for some in training)}
        first_of_others = at[False]
        target = labels.target
        kept = Memory(
            memory.zeros((count, len(chosen)), np.float64),
            {name: memory.zeros((count,), np.int64) for name in wanted.texts},
            memory.zeros((count, *target.row_shape), target.dtype),
            first_of_others,
        )
        for place, (rows, is_training) in enumerate(zip(good, training, strict=True)):
            (numbers, columns), self._parts[place] = self._parts[place], None
            if len(chosen) < numbers.shape[1]:
                numbers = numbers[:, chosen]
            y, _ = labels.targets(self._targets[place])
            ids = {
                name: reading.ids(columns[text], id_of[name])
                for name, text in zip(wanted.texts, texts, strict=True)
            }
            for of_training in (True, False):
                some = rows[is_training == of_training]
                to = slice(at[of_training], at[of_training] + len(some))
                at[of_training] = to.stop
                kept.numbers[to] = numbers[some]
                kept.targets[to] = y[some]
                for name, of_rows in ids.items():
                    kept.ids[name][to] = of_rows[some]
        self._parts = []
        return kept

    def _good(self, place: int) -> np.ndarray:
        good = np.ones(self.blocks[place].rows, bool)
        good[[row for block, row in self.faults if block == place]] = False
        return np.flatnonzero(good)
