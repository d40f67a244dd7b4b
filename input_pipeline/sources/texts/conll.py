"""``conll:GLOB``: sentences of words, each of which has a tag."""

import collections
import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources import label_notes
from towers.input_pipeline.sources.files import splits
from towers.input_pipeline.sources.files.file_source import group_by_split
from towers.input_pipeline.sources.files.record import Record, fault_of
from towers.input_pipeline.sources.tables import columns
from towers.input_pipeline.sources.targets import Target
from towers.input_pipeline.sources.texts.rows import (
    RaggedSource,
    bad_record,
    check_length,
)
from towers.input_pipeline.text import Tokenizer, WordTokenizer, open_tokenizer
from towers.program import words

# Of less text, words that are seen once are words of the vocabulary, too.
_MUCH = 10_000
# Columns of CoNLL-U, from 1: of the word, and of its part of speech.
_UNIVERSAL = (2, 4)
_COLUMNS_OF_UNIVERSAL = 10


@dataclasses.dataclass(frozen=True)
class _Sentence:
    path: str
    line: int
    words: Sequence[str]
    tags: Sequence[str]
    fault: str = ""

    def as_bad(self) -> Record:
        """The sentence as a bad record."""
        place = f"line {self.line}" if self.line else ""
        return bad_record(self.path, place, self.fault)


class CoNLLSource(RaggedSource):
    """Files with a word and its tag in each line, and an empty line behind a sentence.

    A row is a sentence: int32 [T] of ids of its words, padded with 0, and int64 [T] of
    its tags, padded with -1. A longer sentence becomes several rows.

    Args:
        pattern: glob of files, or a folder, for all files in it.
        text_column: number of the words' column, from 1. None: the first; in CoNLL-U,
            which has ten, the second.
        label_column: number of the tags' column, from 1. None: the last; in CoNLL-U,
            the fourth, which has the part of speech.
        tokenizer: ``words:FILE``, or a tokenizer of words. None: of the words of the
            training data.
        sequence_length: T. None: 128.
        class_names: the tags 0, 1, ... None: all that there are, sorted.
        eval_fraction: of the sentences to hold out, unless files are held out by their
            names, as those of ``FileSource``. None: a tenth.
        skip_bad: whether to leave out sentences that are bad.

    Raises:
        ValueError: there is no file or sentence, a sentence is bad, or a number is too
            small.
    """

    image_fields = ("word",)
    label_field = "tag"

    def __init__(
        self,
        pattern: str,
        *,
        text_column: str | int | None = None,
        label_column: str | int | None = None,
        tokenizer: str | Tokenizer | None = None,
        sequence_length: int | None = None,
        class_names: Sequence[str] | None = None,
        eval_fraction: float | None = None,
        skip_bad: bool = False,
    ):
        self.image_shape = (check_length(sequence_length),)
        self.name = f"conll:{pattern}"
        asked = (
            _number("text_column", text_column),
            _number("label_column", label_column),
        )
        self._files, self.notes = group_by_split("conll", pattern)
        if asked[0] is not None:
            self.image_fields = (str(asked[0]),)
        by_name = "test" in self._files or "train" not in self._files
        if by_name and eval_fraction:
            raise splits.held_out_by_name(eval_fraction, self.name, self._files)
        fraction = 0.0 if by_name else splits.check_fraction(eval_fraction)
        found = {
            split: [each for path in paths for each in _read(path, asked)]
            for split, paths in self._files.items()
        }
        bad = [each for some in found.values() for each in some if each.fault]
        self._refuse([each.as_bad() for each in bad], skip_bad)
        found = {
            split: [s for s in some if not s.fault] for split, some in found.items()
        }
        if fraction:
            found = _held_out(found["train"], fraction)
        self._note(*self._notes(found, fraction))
        self.tokenizer = self._words(found, tokenizer)
        tags = {tag for some in found.values() for each in some for tag in each.tags}
        names = columns.order_classes(self.name, "tag", tags, None, class_names)
        self._take_target(Target("tags", len(names), names))
        self.reads = (*asked, fraction, *self.image_shape, self.tokenizer.fingerprint)
        self._pack(found)

    def _notes(
        self, found: dict[str, list[_Sentence]], fraction: float
    ) -> tuple[str, ...]:
        for split, some in found.items():
            if not some:
                raise ValueError(
                    f"{self.name} has no sentence in its split {split}: expected lines "
                    "of a word and its tag, and empty lines between sentences"
                )
        if fraction and "test" in found:
            return (splits.note(fraction, "sentences", len(found["test"])),)
        return ()

    def _words(
        self, found: dict[str, list[_Sentence]], tokenizer: str | Tokenizer | None
    ) -> WordTokenizer:
        """The vocabulary: one that is given, or the words of the training data."""
        if tokenizer is not None:
            tokenizer = open_tokenizer(tokenizer)
            if not isinstance(tokenizer, WordTokenizer):
                raise ValueError(
                    f"the tokenizer {tokenizer.name!r} divides words, and {self.name} "
                    "has a tag for each: expected words:FILE, or none"
                )
            return tokenizer
        used = [word for each in found.get("train", ()) for word in each.words]
        # What is seen once stands for what is never seen, which has its id.
        least = 2 if len(used) >= _MUCH else 1
        made = WordTokenizer.of(used, least)
        what = "word" if least == 1 else "word that is seen twice or more"
        plural = "words" if least == 1 else "words that are seen twice or more"
        count = words.count(len(made.words), what, plural)
        self._note(f"The vocabulary is of the training data: {count}.")
        return made

    def _pack(self, found: dict[str, list[_Sentence]]) -> None:
        """Puts all words and tags one behind the other, in rows."""
        (length,) = self.image_shape
        number = {name: tag for tag, name in enumerate(self.class_names)}
        ids, tags, lengths, places = [], [], [], []
        self.splits, by_split = {}, {}
        for split, some in found.items():
            before, seen = len(lengths), len(tags)
            for each in some:
                ids += self.tokenizer.look_up(each.words)
                tags += [number[tag] for tag in each.tags]
                rows = range(0, len(each.words), length)
                lengths += [min(length, len(each.words) - begin) for begin in rows]
                places += [(each.path, f"line {each.line}")] * len(rows)
            self.splits[split] = len(lengths) - before
            by_split[split] = tags[seen:]
        self._note(*label_notes.missing(self.class_names, by_split))
        self._keep(np.array(ids, np.int32), lengths, np.array(tags, np.int64), places)

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See ``Source.parse``."""
        x, is_word, places = self._tokens_of(records)
        return x, tf.where(is_word, tf.gather(self._tensors[-1], places), -1)


def _held_out(found: list[_Sentence], fraction: float) -> dict[str, list[_Sentence]]:
    groups = {"train": [], "test": []}
    for number, each in enumerate(found):
        held = splits.is_held_out(number, fraction)
        groups["test" if held else "train"].append(each)
    return groups if groups["test"] else {"train": found}


def _number(name: str, value: Any) -> int | None:
    """The number of a column, from 1."""
    if value is None or (str(value).isdecimal() and int(value) > 0):
        return value and int(value)
    raise ValueError(f"{name} is {value!r}, expected the number of a column, from 1")


def words_of(
    path: str, column: int | None = None
) -> Iterator[tuple[int, list[str], str]]:
    """Reads the words of sentences, whether or not they have tags.

    Args:
        path: of a local file in UTF-8.
        column: number of the words' column, from 1. None: the first; in CoNLL-U, the
            second.

    Returns:
        For each sentence the number of its first line, its words, and an empty fault;
        for a bad one the number of the bad line, no words, and the fault.

    Raises:
        UnicodeDecodeError: the file is no text.
    """
    with open(path, "rb") as file:
        text = file.read().decode("utf-8-sig")
    form = _Form.of(text)
    place = column or (_UNIVERSAL[0] if form.is_universal else 1)
    for begin, lines in _blocks(text):
        rows = [*form.rows(begin, lines)]
        bad = next((row for row in rows if form.fault(row, [place])), None)
        if bad is not None:
            yield bad.line, [], form.fault(bad, [place])
        elif rows:
            yield begin, [row.fields[place - 1] for row in rows], ""


class _Row(NamedTuple):
    """The number of a word's line, and its fields."""

    line: int
    fields: Sequence[str]


@dataclasses.dataclass(frozen=True)
class _Form:
    """How the lines of a file are divided: as most of them are.

    Attributes:
        tabs: whether tabs divide them; else white space.
        columns: how many each line has.
    """

    tabs: bool
    columns: int

    @classmethod
    def of(cls, text: str) -> "_Form":
        """Looks at all lines of a file."""
        forms: collections.Counter[_Form] = collections.Counter()
        for _, lines in _blocks(text):
            for line in lines:
                if not _is_comment(line):
                    tabs = "\t" in line
                    forms[cls(tabs, len(_fields(line, tabs)))] += 1
        # Of two that are as frequent, the first one.
        return max(forms, key=forms.__getitem__, default=cls(False, 0))

    @property
    def is_universal(self) -> bool:
        """Tells whether this is CoNLL-U."""
        return self.tabs and self.columns == _COLUMNS_OF_UNIVERSAL

    def rows(self, begin: int, lines: Sequence[str]) -> Iterator[_Row]:
        """The lines of words, of which the first line has the number `begin`."""
        for number, line in enumerate(lines, begin):
            if _is_comment(line) or (self.is_universal and line.startswith("#")):
                continue
            fields = _fields(line, self.tabs)
            # Words of several parts and of none, in CoNLL-U.
            whole = len(fields) == self.columns
            if not (self.is_universal and whole and not fields[0].isdecimal()):
                yield _Row(number, fields)

    def fault(self, row: _Row, places: Sequence[int]) -> str:
        """Says why columns of a row cannot be read, a phrase; empty if they can."""
        count = words.count(len(row.fields), "column")
        if len(row.fields) != self.columns:
            return (
                f"has {count}, expected {self.columns}, divided by "
                f"{'tabs' if self.tabs else 'spaces or tabs'}, as most lines of the "
                "file have"
            )
        if max(places) > self.columns or len({*places}) < len(places):
            what = "a word and its tag" if len(places) > 1 else "a word"
            if self.columns > 1:
                what += f" in the columns {' and '.join(map(str, places))}"
            return f"has {count}, expected {what}"
        if not all(row.fields[place - 1] for place in places):
            return "has an empty word or tag"
        return ""


def _is_comment(line: str) -> bool:
    return line.startswith(("# ", "-DOCSTART-"))


def _fields(line: str, tabs: bool) -> list[str]:
    if not tabs:
        return line.split()
    return [field.strip() for field in line.rstrip("\n").split("\t")]


def _read(path: str, asked: tuple[int | None, int | None]) -> Iterator[_Sentence]:
    """The sentences of a file; a bad one has a fault, and the number of its line."""
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            text = file.read().decode("utf-8-sig")
    except tf.errors.OpError as error:
        yield _Sentence(path, 0, (), (), fault_of(error))
        return
    except UnicodeDecodeError as error:
        yield _Sentence(path, 0, (), (), f"is not UTF-8 at byte {error.start}")
        return
    form = _Form.of(text)
    for begin, lines in _blocks(text):
        if (sentence := _sentence(path, begin, lines, form, asked)) is not None:
            yield sentence


def _blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """Lines that empty lines divide, and the number of the first one of each."""
    begin, lines = 1, []
    # Lines may end as on any system.
    for number, line in enumerate(io.StringIO(text + "\n\n", newline=None), 1):
        if line.strip():
            lines.append(line)
            continue
        if lines:
            yield begin, lines
        begin, lines = number + 1, []


def _sentence(
    path: str,
    begin: int,
    lines: Sequence[str],
    form: _Form,
    asked: tuple[int | None, int | None],
) -> _Sentence | None:
    default = _UNIVERSAL if form.is_universal else (1, form.columns)
    word, tag = (a or d for a, d in zip(asked, default, strict=True))
    rows = [*form.rows(begin, lines)]
    for row in rows:
        if fault := form.fault(row, [word, tag]):
            return _Sentence(path, row.line, (), (), fault)
    if not rows:
        return None
    found, tags = ([row.fields[k - 1] for row in rows] for k in (word, tag))
    return _Sentence(path, begin, found, tags)
