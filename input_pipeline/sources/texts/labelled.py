"""``csv:GLOB`` and ``parquet:GLOB`` with a column of text, and labels beside it."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from towers.input_pipeline.sources import label_notes
from towers.input_pipeline.sources.files import splits
from towers.input_pipeline.sources.files.file_source import group_by_split
from towers.input_pipeline.sources.files.record import FILE
from towers.input_pipeline.sources.tables import columns, table_targets
from towers.input_pipeline.sources.tables.csv_file import CSVFile
from towers.input_pipeline.sources.tables.opened import text_rows
from towers.input_pipeline.sources.tables.parquet_file import ParquetFile
from towers.input_pipeline.sources.tables.row_groups import described_classes
from towers.input_pipeline.sources.targets import Target, TargetKind
from towers.input_pipeline.sources.texts.encoded import EncodedSource, Example
from towers.input_pipeline.sources.texts.rows import bad_record, check_length
from towers.input_pipeline.text import Tokenizer, open_tokenizer


def open_csv(pattern: str, **options: Any) -> "LabelledTextSource":
    """Opens CSV files; see ``LabelledTextSource``."""
    return LabelledTextSource("csv", pattern, **options)


def open_parquet(pattern: str, **options: Any) -> "LabelledTextSource":
    """Opens Parquet files; see ``LabelledTextSource``."""
    return LabelledTextSource("parquet", pattern, **options)


class LabelledTextSource(EncodedSource):
    """Rows of tables with a text, which is tokenised once, and labels.

    A row is int32 [T], cut off, or padded with 0 at its end. All are kept in memory.

    Args:
        kind: "csv" or "parquet".
        pattern: glob of files, or a folder, for all files in it.
        text_column: the text's column.
        label_column: see ``table_targets.read_names``.
        target: what the labels are; see ``table_targets.choose``.
        class_names: see ``columns.order_classes``.
        num_classes: number of classes. None: counted from the labels.
        tokenizer: a spec of ``open_tokenizer``, or a tokenizer.
        sequence_length: T. None: 128.
        eval_fraction: of the rows to hold out, unless files are held out by their
            names, as those of ``FileSource``. None: a tenth.
        skip_bad: whether to leave out rows that are bad.

    Raises:
        ValueError: there is no file, row, column, tokenizer or package, or a row is
            bad.
    """

    def __init__(
        self,
        kind: str,
        pattern: str,
        *,
        text_column: str,
        label_column: str | Sequence[str] | None = None,
        target: TargetKind | None = None,
        class_names: Sequence[str] | None = None,
        num_classes: int | None = None,
        tokenizer: str | Tokenizer = "bytes",
        sequence_length: int | None = None,
        eval_fraction: float | None = None,
        skip_bad: bool = False,
    ):
        self.image_shape = (check_length(sequence_length),)
        self.name = f"{kind}:{pattern}"
        self.tokenizer = open_tokenizer(tokenizer)
        self._files, self.notes = group_by_split(kind, pattern)
        by_name = "test" in self._files or "train" not in self._files
        if by_name and eval_fraction:
            raise splits.held_out_by_name(eval_fraction, self.name, self._files)
        fraction = 0.0 if by_name else splits.check_fraction(eval_fraction)
        paths = [path for some in self._files.values() for path in some]
        opens = CSVFile if kind == "csv" else ParquetFile
        self._tables = {path: opens(path) for path in paths}
        labels = self._find_columns(paths, text_column, label_column)
        faults, found = [], {"train": [], "test": []}
        for split, example in self._examples([text_column, *labels], fraction, faults):
            found[split].append(example)
        every = [each for some in found.values() for each in some]
        asked = target, class_names, num_classes, label_column is not None
        targets = self._choose_target(every, labels, *asked)
        good = self._check(every, targets, faults)
        self._refuse(faults, skip_bad)
        self._size(found, good, fraction)
        kept = [each for each, is_good in zip(every, good, strict=True) if is_good]
        self.reads = (text_column, *labels, fraction, *self.image_shape)
        self.reads += (self.tokenizer.fingerprint,)
        split_of = np.repeat([*found], [*map(len, found.values())])
        by_split = {split: targets[good & (split_of == split)] for split in found}
        self._note(*label_notes.notes(self.target, by_split))
        self._encode(kept, targets[good])

    def _find_columns(
        self, paths: list[str], text: str, label_column: str | Sequence[str] | None
    ) -> list[str]:
        """Checks the columns of all files; returns those of the labels."""
        first, *others = paths
        names = [*self._tables[first].names]
        columns.check_named(first, names, [text], "text_column")
        others_of_first = [name for name in names if name != text]
        labels, note = table_targets.read_names(first, others_of_first, label_column)
        self._note(note)
        self.label_field, self.image_fields = ",".join(labels), (text,)
        for path in others:
            names = self._tables[path].names
            columns.check_named(path, names, labels, "label_column")
            columns.check_named(path, names, [text], "text_column")
        return labels

    def _examples(
        self, names: list[str], fraction: float, faults: list
    ) -> Iterator[tuple[str, Example]]:
        """Split and content of each row that is whole; notes what is bad."""
        for split, paths in self._files.items():
            for file, path in enumerate(paths):
                rows = text_rows(self._tables[path], names)
                for number, (place, values, fault) in enumerate(rows):
                    text, *labels = values or [""]
                    labels = [label.strip() for label in labels]
                    fault = fault or self._fault(text, labels, names)
                    if fault:
                        faults.append(bad_record(path, place, fault))
                        continue
                    held = splits.is_held_out(file * FILE + number, fraction)
                    content = text.encode("utf-8", "surrogateescape")
                    example = Example(path, place, content, labels)
                    yield "test" if held else split, example

    def _fault(self, text: str, labels: list[str], names: list[str]) -> str:
        if self.tokenizer.needs_utf8 and not _is_utf8(text):
            return f"{names[0]} is not UTF-8; --tokenizer=bytes reads any"
        for name, label in zip(names[1:], labels, strict=True):
            if not label:
                return f"nothing in the column {name!r}, expected a value"
            if not _is_utf8(label):
                return f"{name} is not UTF-8"
        return ""

    def _choose_target(
        self,
        every: list[Example],
        labels: list[str],
        asked: TargetKind | None,
        class_names: Sequence[str] | None,
        num_classes: int | None,
        named: bool,
    ) -> np.ndarray:
        """Decides what the targets are; returns them, and NaN where one is none."""
        path = every[0].path if every else self.name
        values = zip(*[each.labels for each in every], strict=True)
        found = [
            table_targets.Column.of(name, {*texts}, len(every))
            for name, texts in zip(labels, values, strict=False)
        ]
        kind, note = table_targets.choose(
            path, found, asked, class_names or num_classes
        )
        self._note(note)
        if kind == "class" and found and found[0].form == "text":
            texts = [each.labels[0] for each in every]
            note = columns.check_classes(path, labels[0], {*texts}, len(texts), named)
            self._note(note)
            names = columns.order_classes(
                self.name, labels[0], {*texts}, num_classes, class_names
            )
            self._take_target(Target("class", len(names), names))
            number = {name: label for label, name in enumerate(names)}
            return np.array([number[text] for text in texts], np.float64)
        values = np.array([[*map(_number, each.labels)] for each in every], np.float64)
        values = values.reshape(len(every), len(labels))
        if kind != "class":
            self._take_target(Target(kind, len(labels), tuple(labels)))
            return values
        whole = values[np.isfinite(values) & (values == np.floor(values))]
        described = every and self._described(labels[0])
        size = num_classes or len(described or ()) or int(whole.max(initial=0)) + 1
        names = described if described and len(described) == size else class_names
        if names and len(names) != size:
            raise ValueError(
                f"class_names has {len(names)} names, but {self.name} has {size} "
                "classes: expected a name for each"
            )
        self._take_target(Target("class", size, names and tuple(names)))
        return values[:, 0]

    def _described(self, label: str) -> tuple[str, ...] | None:
        """Names of the classes, if the files have a description of them."""
        schema = getattr(next(iter(self._tables.values())), "schema", None)
        return schema and described_classes(schema, label)

    def _check(
        self, every: list[Example], targets: np.ndarray, faults: list
    ) -> np.ndarray:
        """Which examples can be learnt from; notes the others."""
        good = self.target.is_good(targets)
        if self.target.kind == "class":
            good = good & (targets == np.floor(targets))
        good = good if good.ndim == 1 else good.all(axis=1)
        for place in np.flatnonzero(~good):
            example = every[place]
            fault = (
                f"{self.label_field} is {','.join(example.labels)[:60]!r}, expected "
                f"{self.target.expected}"
            )
            faults.append(bad_record(example.path, example.place, fault))
        return good

    def _size(self, found: dict[str, list], good: np.ndarray, fraction: float) -> None:
        """Counts the rows of each split, which must have some."""
        count = int(good[: len(found["train"])].sum())
        sizes = {"train": count, "test": int(good.sum()) - count}
        needed = {*self._files} | ({"train"} if fraction else set())
        for split in sorted(needed):
            if not sizes[split]:
                first = (
                    f"; the first bad one is {self._faults[0]}" if self._faults else ""
                )
                raise ValueError(f"{self.name} has no row in its split {split}{first}")
        self.splits = {split: size for split, size in sizes.items() if size}
        if fraction and "test" in self.splits:
            self._note(splits.note(fraction, "rows", self.splits["test"]))


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= sign <= "\udfff" for sign in text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan
