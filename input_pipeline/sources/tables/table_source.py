"""``csv:GLOB`` and ``parquet:GLOB`` of columns: numbers, categories, and targets."""

import abc
import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources import label_notes
from towers.input_pipeline.sources.arrays import RowSource
from towers.input_pipeline.sources.base import size_and_time
from towers.input_pipeline.sources.files import in_python, splits
from towers.input_pipeline.sources.files.file_source import FileSource
from towers.input_pipeline.sources.files.record import CHANGED, BadRecordError, Record
from towers.input_pipeline.sources.tables import (
    categories,
    columns,
    kinds,
    reading,
    shuffling,
    table_targets,
    values,
)
from towers.input_pipeline.sources.tables.blocks import TableFile, read_in_order
from towers.input_pipeline.sources.tables.labels import Labels
from towers.input_pipeline.sources.tables.reading import Part, Wanted
from towers.input_pipeline.sources.tables.table_pass import TablePass
from towers.input_pipeline.sources.targets import TargetKind
from towers.program import words

# The least number of blocks whose rows are shuffled together, whatever their size.
_LEAST_BLOCKS = 4
# Rows after a bad one that tell whether it is one among good ones.
_LOOK_ON, _FEW = 20, 0.25


class TableSource(FileSource):
    """Files of columns, with the same columns in each.

    One pass over all files finds the contents of columns: classes, categories, means,
    and bad rows. The rows that it reads stay in memory if there is room, and
    `in_memory` returns them. Otherwise they are read again, a few shuffled blocks at a
    time.

    "Images" are rows: float64 [F], the columns of numbers, NaN if one is missing; with
    categories, a dict of those as "dense" and the id [] of each category.

    Args:
        pattern: see ``FileSource``.
        label_column: see ``table_targets.read_names``. Whole numbers from 0 are classes
            as they are; texts are names of classes, which are numbered in sorted order;
            other numbers are numbers.
        feature_columns: see ``columns.find_features``. Columns of text that are named
            are categories. None: all but the labels; columns of text only if texts
            repeat.
        target: the kind of the labels; see ``table_targets.choose``.
        class_names: see ``columns.order_classes``.
        num_classes: see ``FileSource``.
        vocabularies: see ``Source``; None for those of the training data.
        column_kinds: see ``Source``; None for the kinds of each file's first rows.
        missing: the replacement of missing numbers: the "mean" or "median" of the
            column; "fail" makes the row a bad record.
        findings: a file, without its suffix, for the pass's findings about rows that do
            not fit in memory; later runs use it while the files have the same names,
            sizes and times. None: there is no such file.
        **options: see ``FileSource``.

    Attributes:
        moments: the moments of the numbers of the training rows.
        missing_columns: columns with a missing number in some training row.

    Raises:
        ValueError: no file, no row, other columns in one file than in another, no such
            column, text for a number, or a bad record, unless these are skipped.
    """

    encoded = False
    in_graph = False
    has_buffer = True
    why_whole = "rows are read by the block"
    labels_need_checking = False

    def __init__(
        self,
        pattern: str,
        *,
        label_column: str | Sequence[str] | None = None,
        feature_columns: Sequence[str] | None = None,
        target: TargetKind | None = None,
        class_names: Sequence[str] | None = None,
        num_classes: int | None = None,
        vocabularies: Mapping[str, Sequence[str]] | None = None,
        column_kinds: Mapping[str, str] | None = None,
        missing: str = "mean",
        findings: str | None = None,
        **options: Any,
    ):
        super().__init__(pattern, num_classes, **options)
        self.missing, self.column_kinds = missing, column_kinds or {}
        self._paths = self._all_files()
        self._stamps = [size_and_time(path) for path in self._paths]
        self._tables = [self._open(path) for path in self._paths]
        # An empty file tells nothing of its columns.
        self._first = first = next(filter(_has_types, self._tables), self._tables[0])
        columns.check_several(first.path, first.names)
        names, note = table_targets.read_names(first.path, first.names, label_column)
        self._note(note)
        self.label_field = ",".join(names)
        wanted = self._choose_columns(names, feature_columns)
        self._check_same_columns(wanted)
        labels = Labels(self.name, names, wanted.types)
        asked = feature_columns is not None
        stamp = repr((wanted, asked, self._fraction, self._paths, self._stamps))
        path = findings and f"{findings}.npz"
        read = TablePass(
            self._tables, wanted, labels, self._is_training, asked, path, stamp
        )
        if read.was_known:
            self._note(f"What {self.name} holds is known from an earlier run.")
        self._count(read)
        self._take_columns(read, asked, vocabularies)
        labels.decide(
            target,
            class_names,
            num_classes,
            label_column is not None,
            self._described(names[0]),
        )
        self._note(*labels.notes)
        self._labels = labels
        self._take_target(labels.target)
        self.faults = self._find_faults(read)
        targets = read.targets(labels)
        if "train" not in self._files:
            targets = {"test": targets["train"]}
        self._note(*label_notes.notes(labels.target, targets))
        self._hold_out()
        self._memory = read.joined(self._wanted, labels, self.vocabularies)
        labels.let_go()
        self._blocks, self._unreadable = read.blocks, {*read.block_faults}
        # By the index of a block, and the position of the row there.
        self._known_faults = read.faults
        self._id_of = {
            name: {text: index + 1 for index, text in enumerate(texts)}
            for name, texts in self.vocabularies.items()
        }
        self.reads = (self.label_field, *self._wanted.numbers, self._fraction, missing)
        self.reads += (*self.vocabularies.items(), *self.column_kinds.items())

    @abc.abstractmethod
    def _open(self, path: str) -> TableFile:
        """Opens a file of the table."""

    @abc.abstractmethod
    def _type_of_label(self, kind: Any) -> Any:
        """Returns the type in which a column of targets is read, given its own type."""

    def _described(self, label: str) -> Sequence[str] | None:
        """Returns the files' names for the numbers of classes."""
        del label
        return None

    def _choose_columns(
        self, labels: list[str], feature_columns: Sequence[str] | None
    ) -> Wanted:
        """Decides by types which columns are numbers, and which may be categories."""
        first, asked = self._first, feature_columns is not None
        names = columns.find_features(first.path, first.names, labels, feature_columns)
        types = {name: self._type_of(name, asked) for name in names}
        types |= {name: self._type_of_label(first.types[name]) for name in labels}
        wrong = {
            name: kind
            for name, kind in types.items()
            if not (values.is_number(kind) or values.is_text(kind))
            or str(kind) == "null"
        }
        if bad := [name for name in (*labels, *names * asked) if name in wrong]:
            raise ValueError(
                f"{first.path} has the column {bad[0]!r} of {wrong[bad[0]]}: expected "
                "numbers or texts, so name other columns by --label_column and "
                "--feature_columns (in Python, label_column, feature_columns)"
            )
        names = [name for name in names if name not in wrong]
        numbers = [name for name in names if values.is_number(types[name])]
        texts = [name for name in names if name not in numbers]
        types = {name: types[name] for name in (*names, *labels)}
        return Wanted(numbers, texts, labels, types, self.missing != "fail")

    def _type_of(self, name: str, asked: bool) -> Any:
        """Returns the type in which a column to learn from is read."""
        first, kind = self._first, self.column_kinds.get(name)
        if kind is None and str(first.types[name]) == "null" and asked:
            kind = "number"
        return kinds.read_as(first, name, kind) if kind else first.types[name]

    def _check_same_columns(self, wanted: Wanted) -> None:
        first = self._first
        for table in self._tables:
            for name in wanted.types:
                if name not in table.names or not self._is_same(table, name):
                    here, there = map(columns.listed, (table.types, first.types))
                    raise ValueError(
                        f"{table.path} has the columns {here}, but {first.path} has "
                        f"{there}: expected the same in all files, so correct {name!r}"
                    )

    def _is_same(self, table: TableFile, name: str) -> bool:
        """Tells whether a column of another file may be read as that of the first."""
        del table, name
        return True

    def _is_training(self, file: int, rows: np.ndarray) -> np.ndarray:
        """Tells which rows of a file, by their numbers in it, are for training."""
        path = self._paths[file]
        if path not in self._files.get("train", ()):
            # If all data are for evaluation, these rows are measured.
            return np.full(len(rows), "train" not in self._files)
        numbers = self._first_number(path) + rows
        return ~np.broadcast_to(
            splits.is_held_out(numbers, self._fraction), numbers.shape
        )

    def _take_columns(
        self,
        read: TablePass,
        asked: bool,
        vocabularies: Mapping[str, Sequence[str]] | None,
    ) -> None:
        """Takes the columns to learn from, and notes the columns left out."""
        wanted = read.wanted
        firsts = dict(zip(wanted.numbers, read.first.T, strict=True))
        chosen = [
            name
            for name, texts in read.texts.items()
            if asked or (texts.repeat if vocabularies is None else name in vocabularies)
        ]
        ids = [
            name
            for name, first in firsts.items()
            if not asked and columns.is_id(name, first)
        ]
        if len(ids) == len(wanted.numbers) and not chosen:
            ids = []
        nothing = (read.moments.count == 0) & (read.moments.missing > 0)
        empty = [*itertools.compress(wanted.numbers, nothing)]
        unused = {*ids, *([] if asked else empty)}
        numbers = [name for name in wanted.numbers if name not in unused]
        self._wanted = dataclasses.replace(wanted, numbers=numbers, texts=chosen)
        every = columns.find_features(
            self._first.path, self._first.names, wanted.labels, None
        )
        taken, types = [*numbers, *chosen], self._first.types | wanted.types
        used = {*taken}
        left_out = [] if asked else [name for name in every if name not in used]
        pictures = [
            name
            for name, texts in read.texts.items()
            if name not in chosen and columns.name_pictures(texts.texts)
        ]
        if not taken:
            raise columns.nothing_to_learn_from(self._paths[0], left_out, pictures)
        self._say_left_out(
            {name: types[name] for name in left_out}, taken, ids, pictures
        )
        if chosen and not asked:
            self._note(columns.categories_note(chosen, numbers))
        self.image_fields, self.image_shape = numbers, (len(numbers),)
        self.moments = read.moments.of(
            [index for index, name in enumerate(wanted.numbers) if name in used]
        )
        for name in numbers if len(taken) > 1 else ():
            if not values.is_date(types[name]):
                self._note(columns.index_note(name, firsts[name], taken))
        missing = zip(numbers, self.moments.missing, strict=True)
        self.missing_columns = tuple(name for name, count in missing if count)
        own = {name: categories.ordered(read.texts[name].texts) for name in chosen}
        self.vocabularies = own if vocabularies is None else dict(vocabularies)
        self.column_kinds = {name: kinds.kind_of(wanted.types[name]) for name in taken}
        if own or self.vocabularies:
            categories.check(self.name, own, self.vocabularies)
            self.table_sizes = categories.table_sizes(self.vocabularies)

    def _say_left_out(
        self,
        types: Mapping[str, Any],
        taken: Sequence[str],
        ids: Sequence[str],
        pictures: Sequence[str],
    ) -> None:
        """Notes which columns are left out, and why.

        Args:
            types: the types of these columns, by their names.
            taken: the columns to learn from.
            ids: the columns that are ids.
            pictures: the columns that name pictures.
        """
        texts = [name for name, kind in types.items() if values.is_text(kind)]
        unknown = [name for name, kind in types.items() if str(kind) == "null"]
        numbers = [name for name, kind in types.items() if values.is_number(kind)]
        empty = [name for name in numbers if name not in (*ids, *unknown)]
        known = {*texts, *numbers}
        others = {name: types[name] for name in types if name not in known}
        if unknown:
            names = ", ".join(map(repr, unknown))
            self._note(f"Left out, because their first cells are empty: {names}.")
        if empty:
            self._note(f"Left out, because empty: {', '.join(map(repr, empty))}.")
        if others:
            self._note(f"Left out, because of their types: {columns.listed(others)}.")
        self._note(columns.ids_note(ids, taken))
        if texts:
            self._note(columns.left_out_note(texts, taken, pictures))

    def _count(self, read: TablePass) -> None:
        """Counts the rows of the splits, including bad ones."""
        rows = [read.rows(file) for file in range(len(self._paths))]
        if not any(rows):
            raise ValueError(f"{self.name} holds no record: expected at least one")
        self._note(
            *(
                f"{path} holds no record."
                for path, count in zip(self._paths, rows, strict=True)
                if not count
            )
        )
        rows_of = dict(zip(self._paths, rows, strict=True))
        for split, paths in self._files.items():
            self._set_sizes(split, [rows_of[path] for path in paths])

    def _find_faults(self, read: TablePass) -> Mapping[str, Sequence[Record]]:
        """Returns the bad records of each split, and counts the others.

        Raises:
            ValueError: there are bad records, and they are not skipped.
        """
        read.find_bad_targets(self._labels)
        faults: dict[str, list[Record]] = {}
        for index, located in enumerate(read.blocks):
            for record in self._bad_records(read, index):
                rows = np.arange(record.count) + record.number
                rows -= self._first_number(record.path)
                for split in self._splits_of(located.file, rows):
                    faults.setdefault(split, []).append(record)
        if faults and not self._skip_bad:
            bad = min(
                itertools.chain(*faults.values()), key=lambda record: record.number
            )
            rows = self._first_number(bad.path) + read.rows(self._paths.index(bad.path))
            raise _refused(bad, itertools.chain(*faults.values()), rows)
        good = [read.good_rows(file) for file in range(len(self._paths))]
        training = [self._is_training(file, rows) for file, rows in enumerate(good)]
        count = int(sum(map(np.sum, training))) if "train" in self._files else 0
        self.good = {"train": count, "test": sum(map(len, good)) - count}
        return faults

    def _bad_records(self, read: TablePass, index: int) -> Iterator[Record]:
        """Yields the bad records of a block; one for all, if no row can be read."""
        located = read.blocks[index]
        path = self._paths[located.file]
        first = self._first_number(path) + located.first
        if index in read.block_faults:
            yield Record(
                path,
                f"row group {located.block.begin}",
                first,
                fault=read.block_faults[index],
                gap=(located.first, located.first + located.rows),
                count=located.rows,
            )
            return
        lines = read.lines.get(index, {})
        for row, fault in sorted(read.faults.get(index, {}).items()):
            where = f"row {located.first + row}"
            where = f"line {lines[row] + 1}" if row in lines else where
            yield Record(path, where, first + row, fault=fault)

    def _splits_of(self, file: int, rows: np.ndarray) -> list[str]:
        """Returns the splits that have some of the rows of a file."""
        training = self._is_training(file, rows)
        if "train" not in self._files:
            return ["test"]
        return ["train"] * bool(training.any()) + ["test"] * bool((~training).any())

    # Reading.

    def medians(self) -> Sequence[float]:
        """Returns the medians of the columns of numbers; see ``Source.medians``."""
        if self._memory is None:
            raise ValueError(
                f"received missing='median', but {self.name} does not fit in memory, "
                "so no median is known: expected 'mean' or 'fail'"
            )
        rows = self._memory.numbers[: self._memory.training]
        with warnings.catch_warnings():
            # For a column without any number; it becomes 0 then, as its mean does.
            warnings.simplefilter("ignore", RuntimeWarning)
            return np.nan_to_num(np.nanmedian(rows, axis=0)).tolist()

    def in_memory(self) -> RowSource | None:
        """Returns the good rows as a source in memory; `None` if they did not fit."""
        memory, self._memory = self._memory, None
        if memory is None:
            return None
        sizes = {"train": memory.training, "test": len(memory.targets)}
        if "train" in self._files:
            sizes["test"] -= memory.training
        numbers = memory.numbers if self.image_fields else None
        x = categories.examples(numbers, memory.ids)
        rows = RowSource(
            self.name,
            x,
            memory.targets,
            {split: sizes[split] for split in self.splits},
            self.target,
            self.image_shape,
            self,
        )
        rows.note = f"{words.size(rows.memory_bytes)} of numbers kept in memory"
        return rows

    def _batches(self, split, batch_size, seeds, buffer_mb, start, take):
        """Reads some blocks at a time, and shuffles their rows; see ``batches``."""
        blocks = self._blocks_of(split)
        at_once = 1 if seeds is None else self._blocks_at_once(split, blocks, buffer_mb)
        groups = -(-len(blocks) // at_once)
        # A call of Python accepts no `None`.
        seeds = tf.zeros([0], tf.int64) if seeds is None else seeds

        def locate(seeds, start):
            if not start:  # most epochs: nothing is counted
                return np.int64(0), np.int64(0)
            rows = [
                sum(len(self._numbers_of(index, split)) for index in group)
                for group in shuffling.groups(blocks, at_once, seeds)
            ]
            return shuffling.locate(rows, int(start))

        def read(group, skipped, seeds):
            together = shuffling.groups(blocks, at_once, seeds)[int(group)]
            return [part[skipped:] for part in self._read_rows(together, split, seeds)]

        first, skipped = in_python.call(locate, [seeds, start], [tf.int64, tf.int64])
        first, skipped = tf.ensure_shape(first, []), tf.ensure_shape(skipped, [])

        def read_in_graph(group):
            here = tf.where(group == first, skipped, 0)
            types = [tf.int64, *(dtype for dtype, _ in self._parts)]
            numbers, *parts = in_python.call(read, [group, here, seeds], types)
            parts = tuple(
                tf.ensure_shape(part, [None, *shape])
                for part, (_, shape) in zip(parts, self._parts, strict=True)
            )
            return tf.ensure_shape(numbers, [None]), parts

        # The next group is read meanwhile, which takes its memory a second time.
        rows = tf.data.Dataset.range(first, groups).map(read_in_graph).prefetch(1)
        batches = rows.rebatch(batch_size)
        return batches if take is None else batches.map(take)

    def _blocks_at_once(self, split: str, blocks: Sequence[int], buffer_mb: int) -> int:
        """Returns how many blocks half of a buffer holds; at least a few."""
        rows = sum(self._blocks[index].rows for index in blocks) / max(len(blocks), 1)
        block_bytes = max(rows * self.record_bytes(split), 1)
        return max(int(buffer_mb * 2**20 / 2 / block_bytes), _LEAST_BLOCKS)

    def record_bytes(self, split: str) -> float:
        """Returns the bytes of a row in memory, with its number and its target."""
        del split
        return 8.0 * (len(self.image_fields) + len(self.vocabularies) + 2)

    def _blocks_of(self, split: str) -> list[int]:
        """Returns the indices of the blocks of a split's files."""
        paths = {*self.files(split)}
        return [
            index
            for index, located in enumerate(self._blocks)
            if self._paths[located.file] in paths
        ]

    def _numbers_of(self, index: int, split: str) -> np.ndarray:
        """Returns the numbers of a split's good records in a block: int64 [N]."""
        first = self._first_of(index)
        numbers = np.arange(first, first + self._blocks[index].rows)
        return self._good_of_split(numbers, split)

    def _first_of(self, index: int) -> int:
        """Returns the number of the first record in a block."""
        located = self._blocks[index]
        return self._first_number(self._paths[located.file]) + located.first

    def numbers(self, split: str) -> np.ndarray:
        """Returns the numbers of a split's records; see ``Source.numbers``."""
        parts = [self._numbers_of(index, split) for index in self._blocks_of(split)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _read_rows(
        self, blocks: Sequence[int], split: str, seeds: np.ndarray
    ) -> list[np.ndarray]:
        """Reads a split's rows of some blocks: their numbers, and `_parts` of them.

        Args:
            blocks: the indices of the blocks.
            split: the split of the rows.
            seeds: the seeds of their order; empty for the order of the files.
        """
        numbers = {index: self._numbers_of(index, split) for index in blocks}
        count = sum(map(len, numbers.values()))
        to = shuffling.order(count, seeds, *blocks[:1])
        shapes = [(tf.int64, ()), *self._parts]
        joined = [
            np.empty([count, *shape], dtype.as_numpy_dtype) for dtype, shape in shapes
        ]

        def read(index):
            rows = numbers[index] - self._first_of(index)
            return numbers[index], *(part[rows] for part in self._read_block(index))

        begin = 0
        # In the order of the file, so that a compressed file is unpacked once.
        readable = [index for index in sorted(blocks) if len(numbers[index])]
        for block in read_in_order(readable, read):
            end = begin + len(block[0])
            for part, of_block in zip(joined, block, strict=True):
                part[to[begin:end]] = of_block
            begin = end
        return joined

    @property
    def _parts(self) -> list[tuple[tf.DType, tuple[int, ...]]]:
        """Types and shapes of a raw record: numbers, ids if there are any, a target."""
        target = self.target
        parts = [
            (tf.float64, self.image_shape),
            (tf.int64, (len(self.vocabularies),)),
            (tf.int64 if target.kind == "class" else tf.float64, target.row_shape),
        ]
        # A part without columns is left out.
        return [part for part in parts if 0 not in part[1]]

    def _unchanged(self, file: int) -> TableFile:
        """Returns a file whose blocks are where they were.

        Raises:
            ValueError: the file has changed since it was opened.
        """
        table = self._tables[file]
        if size_and_time(table.path) != self._stamps[file]:
            raise ValueError(f"{table.path} {CHANGED}")
        return table

    def _read_part(self, index: int) -> tuple[TableFile, Part]:
        """Reads a block again, which must not have changed.

        Raises:
            ValueError: it cannot be read, or has other bad rows than before.
        """
        located = self._blocks[index]
        table = self._unchanged(located.file)
        data = table.load(located.block)
        part = reading.read_part(table, located.block, data, self._wanted)
        if part.fault:
            where = f"{table.path}: row group {located.block.begin}"
            raise ValueError(f"{where}: {part.fault}")
        if new := part.faults.keys() - self._known_faults.get(index, {}).keys():
            where = f"row {located.first + min(new)}: {part.faults[min(new)]}"
            raise ValueError(f"{table.path} {CHANGED}; {where}")
        return table, part

    def _read_block(self, index: int) -> list[np.ndarray]:
        """Reads the parts of a block's raw records."""
        _, part = self._read_part(index)
        y, _ = self._labels.targets(part.labels)
        ids = [
            reading.ids(column, self._id_of[name])
            for name, column in zip(self._wanted.texts, part.texts, strict=True)
        ]
        numbers = [part.numbers] * bool(self._wanted.numbers)
        return [*numbers, *([np.stack(ids, axis=1)] if ids else ()), y]

    def parse(self, records: tuple) -> tuple[Any, tf.Tensor]:
        """Makes examples of rows and ids, and returns targets; see ``Source.parse``."""
        *parts, y = records
        rows = parts.pop(0) if self.image_fields else None
        ids = tf.unstack(parts[0], axis=1) if parts else ()
        of_categories = dict(zip(self.vocabularies, ids, strict=True))
        return categories.examples(rows, of_categories), y

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """Yields the rows of a file, including bad ones; see ``Source.walk``."""
        bad = {
            record.number: record
            for some in self.faults.values()
            for record in some
            if record.path == path
        }
        first = self._first_number(path)
        for index, located in enumerate(self._blocks):
            if self._paths[located.file] != path:
                continue
            number = self._first_of(index)
            if index in self._unreadable:
                yield bad[number]
                continue
            try:
                rows = zip(*self._read_block(index), strict=True)
            except ValueError as error:
                gap = located.first, located.first + located.rows
                group = f"row group {located.block.begin}"
                fault = " ".join(str(error).split()).removeprefix(f"{path}: {group}: ")
                whole = Record(path, group, number)
                yield whole.with_fault(fault, gap=gap, count=located.rows)
                continue
            for row, raw in enumerate(rows, number):
                if self._has(split, row):
                    where = f"row {row - first}"
                    good = Record(path, where, row, tuple(map(tf.constant, raw)))
                    yield bad.get(row, good)


def _has_types(table: TableFile) -> bool:
    """Tells whether some column of a file has a type; a file without rows has none."""
    return any(str(kind) != "null" for kind in table.types.values())


def _refused(first: Record, bad: Iterable[Record], end: int) -> BadRecordError:
    """Makes an error from the first bad record, with the number that follow it.

    Args:
        first: the record.
        bad: all bad records.
        end: number of the record after the last one of the file.
    """
    rows = min(_LOOK_ON, end - first.number - 1)
    near = sum(0 < record.number - first.number <= rows for record in bad)
    if near <= _FEW * rows:
        return BadRecordError(str(first))
    count = f"{near} of the {rows} behind it" if rows > 1 else "the next"
    return BadRecordError(f"{first}; and {count} cannot be used either", many=True)
