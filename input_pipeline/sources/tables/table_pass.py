"""Reads all rows of a table once, to learn facts, and to keep rows that fit."""

import dataclasses
import functools
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from towers.input_pipeline.sources import memory
from towers.input_pipeline.sources.tables import reading, values
from towers.input_pipeline.sources.tables.blocks import Block, TableFile
from towers.input_pipeline.sources.tables.columns import SAMPLE
from towers.input_pipeline.sources.tables.labels import Labels
from towers.input_pipeline.sources.tables.moments import Moments
from towers.input_pipeline.sources.tables.reading import Part, Wanted
from towers.machine import limits
from towers.program import voice, whole_file
from towers.program.progress import EARLY_S, Progress

# A column of text is a category if each text is in this many rows, on average.
_ROWS_OF_A_TEXT = 5
# A column with more texts is no category, unless it was requested.
_MOST_TEXTS = 100_000
# The version of the file of findings: changes with its contents.
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Located:
    """A block, and the position of its rows in a file.

    Attributes:
        file: the index of the file.
        block: the block.
        first: the number of the first row in the file.
        rows: the number of rows.
    """

    file: int
    block: Block
    first: int
    rows: int


@dataclasses.dataclass
class Texts:
    """The texts of a column in the training rows.

    Attributes:
        asked: whether the column was requested, however many texts it has.
        texts: the different texts, without the empty one; empty if they are too many.
        rows: the number of rows with a text.
        too_many: whether there are too many texts for a category.
    """

    asked: bool = False
    texts: set[str] = dataclasses.field(default_factory=set)
    rows: int = 0
    too_many: bool = False

    def add(self, column: Any, training: np.ndarray) -> None:
        """Adds an encoded column of a block, of which some rows are for training."""
        codes = column.indices.to_numpy(zero_copy_only=False)[training]
        if not self.too_many:
            texts = column.dictionary.take(np.unique(codes)).to_pylist()
            self.texts.update({*texts} - {""})
            self.too_many = not self.asked and len(self.texts) > _MOST_TEXTS
        if self.too_many:
            self.texts.clear()
        empty = column.dictionary.index("").as_py()
        self.rows += int((codes != empty).sum())

    @property
    def repeat(self) -> bool:
        """True if each text is in several rows, on average."""
        return not self.too_many and len(self.texts) * _ROWS_OF_A_TEXT <= self.rows


@dataclasses.dataclass(frozen=True)
class Memory:
    """All good rows, those for training first.

    Attributes:
        numbers: float64 [N, F].
        ids: int64 [N] for each column of categories.
        targets: int64 [N] for classes, else float64 [N, K].
        training: the number of rows for training.
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
        labels: receives the columns of the targets.
        is_training: tells which rows are for training, bool [N], given the index of a
            file and the numbers of rows in it.
        asked: whether the columns of text were requested.
        path: a file for the findings about rows that do not fit in memory. If it
            exists, for the same files, these are not read again. None: there is no such
            file.
        stamp: changes with all that changes the findings.

    Attributes:
        wanted: the columns.
        blocks: the positions of the rows, in order.
        faults: the fault of a row, by the index of its block and its position there.
        lines: the line of such a row, in the same way.
        block_faults: why no row of a block can be read, by its index.
        moments: the moments of the numbers of training rows.
        texts: the texts of each column of text.
        first: numbers of the first rows, float64 [N, columns].
        was_known: whether all findings were in the file.
    """

    def __init__(
        self,
        tables: Sequence[TableFile],
        wanted: Wanted,
        labels: Labels,
        is_training: Callable[[int, np.ndarray], np.ndarray],
        asked: bool,
        path: str | None = None,
        stamp: str = "",
    ):
        self.wanted, self._tables, self._is_training = wanted, tables, is_training
        self.blocks: list[Located] = []
        self.faults: dict[int, dict[int, str]] = {}
        self.lines: dict[int, dict[int, int]] = {}
        self.block_faults: dict[int, str] = {}
        self.first = np.zeros([0, len(wanted.numbers)])
        self.moments = Moments.of_nothing(len(wanted.numbers))
        self.texts = {name: Texts(asked) for name in wanted.texts}
        # Numbers and texts of each block, until they take too much memory.
        self._parts: list[tuple[np.ndarray, list[Any]]] | None = []
        self._targets: list[Sequence[Any]] = []
        self.was_known = path is not None and self._restore(path, stamp)
        if not self.was_known:
            self._read()
            if path is not None and self._parts is None:
                self._write(path, stamp)
        for index, targets in enumerate(self._targets):
            labels.add(targets, self._bad(index))

    @functools.cached_property
    def _of_file(self) -> dict[int, list[int]]:
        """The indices of the blocks of each file that has some."""
        blocks_of = {}
        for index, located in enumerate(self.blocks):
            blocks_of.setdefault(located.file, []).append(index)
        return blocks_of

    def rows(self, file: int) -> int:
        """Returns the number of rows of a file."""
        return sum(self.blocks[index].rows for index in self._of_file.get(file, ()))

    def _read(self) -> None:
        """Reads the files, and keeps the rows while there is room."""
        room, taken = _room(), 0
        firsts = dict.fromkeys(range(len(self._tables)), 0)
        total, seen = sum(table.size for table in self._tables), 0
        others = f" and {len(self._tables) - 1} others" * (len(self._tables) > 1)
        reading_files = f"Reading {self._tables[0].path}{others}"
        with Progress(reading_files, silent_s=EARLY_S) as progress:
            for file, part in reading.read_parts(self._tables, self.wanted):
                self._add(Located(file, part.block, firsts[file], part.rows), part)
                firsts[file] += part.rows
                texts = [
                    None if of_column.too_many else column
                    for of_column, column in zip(
                        self.texts.values(), part.texts, strict=True
                    )
                ]
                taken += part.numbers.nbytes
                # Codes become ids of 8 bytes.
                taken += sum(4 * part.rows + text.nbytes for text in texts if text)
                if taken > room:
                    self._parts = None
                if self._parts is not None:
                    self._parts.append((part.numbers, texts))
                seen += self._tables[file].bytes_of(part.block)
                progress.add(part.rows)
                if seen:
                    progress.total = progress.done * total // seen

    def _add(self, located: Located, part: Part) -> None:
        """Notes the contents of a block."""
        if part.fault:
            self.block_faults[len(self.blocks)] = part.fault
        if part.faults:
            self.faults[len(self.blocks)] = part.faults
            self.lines[len(self.blocks)] = part.lines
        self.blocks.append(located)
        training = part.good & self._training_rows(located)
        if len(self.first) < SAMPLE:
            self.first = np.concatenate([self.first, part.numbers[:SAMPLE]])
        self.moments.add(part.numbers[training])
        for texts, column in zip(self.texts.values(), part.texts, strict=True):
            texts.add(column, training)
        self._targets.append(part.labels)

    def _write(self, path: str, stamp: str) -> None:
        """Writes the findings: JSON, and arrays without objects."""
        about = {
            "stamp": [_VERSION, stamp],
            "paths": [table.path for table in self._tables],
            "faults": _listed(self.faults),
            "lines": _listed(self.lines),
            "block_faults": [*self.block_faults.items()],
            "texts": [
                [sorted(some.texts), some.rows, some.too_many]
                for some in self.texts.values()
            ],
            "dictionaries": [],
        }
        arrays = {
            "first": self.first,
            "moments": np.stack(dataclasses.astuple(self.moments)),
            "blocks": np.array(
                [_numbers(located) for located in self.blocks], np.int64
            ),
        }
        for index in range(len(self.wanted.labels)):
            parts = [block[index] for block in self._targets]
            if isinstance(parts[0], np.ndarray):
                arrays[f"target_{index}"] = np.concatenate(parts)
                about["dictionaries"].append(None)
            else:
                codes, texts = values.joined(parts)
                arrays[f"target_{index}"] = codes
                about["dictionaries"].append(texts)
        text = json.dumps(about).encode()
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with whole_file.opened(path, "wb") as file:
                np.savez(file, about=np.frombuffer(text, np.uint8), **arrays)
        except OSError as error:
            voice.warn(
                f"What is in {self._tables[0].path} cannot be written to {path} "
                f"({error.strerror}): the next run reads all rows again."
            )

    def _restore(self, path: str, stamp: str) -> bool:
        """Takes the findings of an earlier run; returns whether there are any."""
        if not os.path.isfile(path) or os.path.islink(path):
            return False
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            about = json.loads(arrays["about"].tobytes())
            if about["stamp"] != [_VERSION, stamp]:
                return False
            blocks = [_located(row, self._tables) for row in arrays["blocks"].tolist()]
            columns = [
                _column(arrays[f"target_{index}"], dictionary)
                for index, dictionary in enumerate(about["dictionaries"])
            ]
            texts = {
                name: Texts(some.asked, {*known}, rows, too_many)
                for (name, some), (known, rows, too_many) in zip(
                    self.texts.items(), about["texts"], strict=True
                )
            }
            moments = Moments(*arrays["moments"])
            first, block_faults = arrays["first"], dict(about["block_faults"])
            faults, lines = _by_place(about["faults"]), _by_place(about["lines"])
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            voice.warn(f"{path} cannot be read ({error}): all rows are read again.")
            return False
        rows = sum(located.rows for located in blocks)
        if rows * 8 * (len(self.wanted.numbers) + len(self.wanted.texts)) <= _room():
            return False  # now they may fit
        self.blocks, self.texts, self.moments, self.first = (
            blocks,
            texts,
            moments,
            first,
        )
        self.faults, self.lines, self.block_faults = faults, lines, block_faults
        self._parts, begin = None, 0
        for located in blocks:
            end = begin + located.rows
            self._targets.append([column[begin:end] for column in columns])
            begin = end
        return True

    def _training_rows(self, located: Located) -> np.ndarray:
        rows = located.first + np.arange(located.rows)
        return self._is_training(located.file, rows)

    def find_bad_targets(self, labels: Labels) -> None:
        """Notes rows whose targets cannot be learnt."""
        for index, rows in enumerate(labels.bad()):
            known = self.faults.get(index, {})
            wrong = [int(row) for row in rows if int(row) not in known]
            if not wrong or index in self.block_faults:
                continue
            located = self.blocks[index]
            table = self._tables[located.file]
            lines = table.lines(located.block, table.load(located.block), wrong)
            self.faults[index] = known | {
                row: labels.fault(index, row) for row in wrong
            }
            self.lines[index] = self.lines.get(index, {}) | lines

    def targets(self, labels: Labels) -> dict[str, np.ndarray]:
        """Returns the good targets of the training rows and of the others."""
        parts = {"train": [], "test": []}
        for index, located in enumerate(self.blocks):
            rows = self._good(index)
            training = self._training_rows(located)[rows]
            y = labels.targets(self._targets[index])[0][rows]
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

        Each block is released when its rows are copied, so there is no second copy.

        Args:
            wanted: the columns that are taken, of those that were read.
            labels: makes targets.
            vocabularies: the texts of the columns of categories, whose positions from 1
                are their ids.
        """
        if self._parts is None:
            return None
        place_of = {name: index for index, name in enumerate(self.wanted.numbers)}
        chosen = [place_of[name] for name in wanted.numbers]
        texts = [self.wanted.texts.index(name) for name in wanted.texts]
        id_of = {
            name: {text: index + 1 for index, text in enumerate(vocabularies[name])}
            for name in wanted.texts
        }
        good = [self._good(index) for index in range(len(self.blocks))]
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
        for index, (rows, is_training) in enumerate(zip(good, training, strict=True)):
            (numbers, columns), self._parts[index] = self._parts[index], None
            if len(chosen) < numbers.shape[1]:
                numbers = numbers[:, chosen]
            y, _ = labels.targets(self._targets[index])
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

    def _bad(self, index: int) -> list[int]:
        """Returns the rows of a block that cannot be used."""
        if index in self.block_faults:
            return [*range(self.blocks[index].rows)]
        return [*self.faults.get(index, ())]

    def _good(self, index: int) -> np.ndarray:
        """Returns the usable rows of a block."""
        return np.delete(np.arange(self.blocks[index].rows), self._bad(index))

    def good_rows(self, file: int) -> np.ndarray:
        """Returns the numbers of the usable rows of a file."""
        parts = [
            self.blocks[index].first + self._good(index)
            for index in self._of_file.get(file, ())
        ]
        return np.concatenate([np.zeros(0, np.int64), *parts])


def _room() -> float:
    """Returns the bytes for rows: a share of free memory, at least a fixed size."""
    fixed = min(limits.SMALL, limits.share_of_container())
    return max(limits.SHARE * limits.free_memory(), fixed)


def _listed(by_place: Mapping[int, Mapping[int, Any]]) -> list[list[Any]]:
    """Returns lists for JSON, whose keys would be texts."""
    return [[index, [*rows.items()]] for index, rows in by_place.items()]


def _by_place(listed: Sequence[Sequence[Any]]) -> dict[int, dict[int, Any]]:
    return {index: dict(rows) for index, rows in listed}


def _numbers(located: Located) -> list[int]:
    block = located.block
    return [
        *(located.file, located.first, located.rows),
        *(block.begin, block.size, block.line, block.is_whole),
    ]


def _located(numbers: Sequence[int], tables: Sequence[TableFile]) -> Located:
    file, first, rows, begin, size, line, is_whole = numbers
    block = Block(tables[file].path, begin, size, line, bool(is_whole))
    return Located(file, block, first, rows)


def _column(array: np.ndarray, texts: Sequence[str] | None) -> Any:
    if texts is None:
        return array
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array(array), pa.array(texts, pa.string()))
