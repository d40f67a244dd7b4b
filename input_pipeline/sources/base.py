"""The interface of sources, and what sources that read files share."""

import abc
import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import tensorflow as tf

from towers.input_pipeline.images import ignored, masks
from towers.input_pipeline.images.decode import decode_image
from towers.input_pipeline.sources.files.record import FAULTS, Record
from towers.input_pipeline.sources.tables.moments import Moments
from towers.input_pipeline.sources.targets import Target
from towers.input_pipeline.text import Tokenizer
from towers.program.progress import EARLY_S, Progress

# The bytes of the shortest record in a shuffle buffer: its slot, which TensorFlow
# allocates beforehand, two tensors, and their memory.
_LEAST_BYTES = 256
# Files whose sizes a thread requests in one go.
_FILES_AT_ONCE = 256

_NUMBERS_AT_ONCE = 4096
# The largest number of files whose sizes are requested.
_SAMPLE = 256

# `columns` is a dict of tensors, by name.
InputKind = Literal["image", "row", "tokens", "columns"]


class Take(Protocol):
    """Takes the needed rows from batches of raw records.

    Attributes:
        count: number of rows of each batch but the last, at least one.
    """

    count: int

    def __call__(self, numbers: tf.Tensor, records: Any) -> tuple:
        """Returns numbers and raw records of those rows, and further values."""


class Source(abc.ABC):
    """A data set in splits: images, rows, tokens or columns, with targets.

    Records are handled in batches. A *raw* record costs little to move: bytes from a
    file, or a number.

    Attributes:
        name: the spec that it was opened with.
        num_classes: labels are in [0, num_classes).
        class_names: one name for each label, or None.
        image_shape: (H, W, C) of decoded images; None where it varies.
        encoded: whether `parse` gives images that have yet to be decoded.
        splits: number of examples for each split, None if unknown; the keys are "train"
            and, if there is one, "test". Empty until prepared.
        in_graph: False if Python reads the records, which workers of a tf.data service
            cannot run.
        is_far: whether `load` and `load_mask` wait for far files.
        labels_need_checking: False if labels are right by construction.
        ends_need_checking: whether reading a truncated file may go unnoticed; see
            ``is_whole``.
        reads: options besides the files that decide what a source reads, such as names
            of fields.
        image_fields: the name of a record's image, or of each number of its row.
        label_field: the name of a record's label.
        table_sizes: number of ids of each column of categories, by its name; with such
            columns, examples are dicts of columns.
        vocabularies: the texts of columns of text: the id of a text is its position
            there, from 1, and 0 is any other text.
        column_kinds: the contents of a table's columns, by their names: "number",
            "date", "truth" or "text".
        passed_over: bad records that are left out, for each split; see ``without``.
        note: a further fact, as a phrase; may be empty.
        notes: sentences on defaults that were chosen, such as which records are held
            out.
        tokenizer: the tokenizer of texts, or None.
        bytes_per_token: for text, by split, where known.
        faults: bad records of each split that has some, if opening a source finds all
            of them; None if it does not look at all records.
        good: number of other records of each split, if `faults` are known.
        moments: count, mean and squares of the numbers of the training rows, if known
            without reading.
        missing: the replacement of missing numbers: the "mean" or "median" of the
            column; "fail": none may be missing.
        missing_columns: columns with a missing number in some training row.
        has_padding: whether rows of tokens are padded to one length; such a source has
            ``batches_by_length``.
        epochs_alone: whether an epoch begins only once the one before has been read.
        has_buffer: whether records are shuffled in a buffer, at least in the first
            epoch.
        why_whole: the result of ``reads_whole`` for all splits.
    """

    name: str
    num_classes: int
    class_names: tuple[str, ...] | None = None
    image_shape: tuple[int | None, int | None, int]
    encoded: bool = True
    splits: dict[str, int | None]
    in_graph: bool = True
    is_far: bool = False
    labels_need_checking: bool = False
    ends_need_checking: bool = False
    reads: tuple = ()
    image_fields: Sequence[str] = ("image",)
    label_field: str = "label"
    table_sizes: Mapping[str, int] = {}
    vocabularies: Mapping[str, Sequence[str]] = {}
    column_kinds: Mapping[str, str] = {}
    passed_over: Mapping[str, Sequence[Record]] = {}
    note: str = ""
    notes: Sequence[str] = ()
    tokenizer: Tokenizer | None = None
    bytes_per_token: Mapping[str, float] = {}
    has_padding: bool = False
    epochs_alone: bool = False
    has_buffer: bool = False
    why_whole: str = ""
    faults: Mapping[str, Sequence[Record]] | None = None
    good: Mapping[str, int] = {}
    moments: Moments | None = None
    missing: str = "fail"
    missing_columns: Sequence[str] = ()
    _target: Target | None = None

    @property
    def target(self) -> Target:
        """The target of a model for an example: a class, unless a source has another.

        For other targets, `num_classes` and `class_names` are those of the target if it
        has classes, and else 0 and None.
        """
        return self._target or Target("class", self.num_classes, self.class_names)

    def _note(self, *notes: str) -> None:
        """Adds notes; one that is empty says nothing."""
        self.notes = (*self.notes, *filter(None, notes))

    def _take_target(self, target: Target) -> None:
        """Sets the target, for other targets than a class."""
        self._target = None if target.kind == "class" else target
        self.num_classes, self.class_names = target.num_classes, target.class_names

    @property
    def input_kind(self) -> InputKind:
        """The kind of an example: an image, a row of numbers, tokens, or columns."""
        if self.tokenizer is not None:
            return "tokens"
        if self.table_sizes:
            return "columns"
        return "row" if len(self.image_shape) == 1 else "image"

    def prepare(self) -> None:  # noqa: B027 (most sources are ready as they are)
        """Downloads or writes missing files; does nothing the second time.

        Raises:
            ValueError: the files cannot be downloaded or written.
        """

    # AutoGraph would take a second to find that there is nothing to convert.
    @tf.autograph.experimental.do_not_convert
    def batches(
        self,
        split: str,
        batch_size: int,
        *,
        seeds: tf.Tensor | None = None,
        buffer_mb: int = 0,
        start: int | tf.Tensor = 0,
        take: Take | None = None,
        epoch: int | tf.Tensor = 0,
    ) -> tf.data.Dataset:
        """Returns raw records of one epoch, in order, in batches.

        Args:
            split: one of `splits`.
            batch_size: records in a batch; the last one may be shorter.
            seeds: int64 [2], the seeds of the order; None for the fixed order.
            buffer_mb: memory of the buffer from which the next record is drawn, if the
                source cannot jump to records.
            start: number of records of that order to skip, at the least cost.
            take: takes the needed rows. Other records are not read, unless a stream
                ``reads_whole``. None: all rows are needed.
            epoch: number of the epoch. Some sources have another order in the first
                one.

        Returns:
            A dataset of (int64 numbers [B], raw records with B rows), or of the results
            of `take`. A record has the same number in every order.
        """
        del epoch
        return self._batches(split, batch_size, seeds, buffer_mb, start, take)

    @abc.abstractmethod
    def numbers(self, split: str) -> np.ndarray:
        """Returns the numbers of a split's records, int64 [N], in their fixed order.

        It reads records only if there is no other way.
        """

    @abc.abstractmethod
    def _batches(self, split, batch_size, seeds, buffer_mb, start, take):
        """Makes the dataset of ``batches``."""

    @abc.abstractmethod
    def parse(self, records: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Parses a batch of raw records.

        Args:
            records: raw records with B rows.

        Returns:
            Images: uint8 [B, H, W, C] or, if they are `encoded`, the inputs of `load`
                [B]; or rows of numbers [B, F], float64 for tables; or a dict of these
                as "dense", and int64 ids [B] of each column that has a table. Targets
                with B rows, as `target` describes: int64 labels [B] of classes. Masks
                are uint8 [B, H, W] or, if they are encoded, the inputs of `load_mask`
                [B].
        """

    def load(self, image: tf.Tensor) -> tf.Tensor:
        """Returns the encoded bytes, a scalar string, of one image from `parse`."""
        return image

    def load_mask(self, mask: tf.Tensor) -> tf.Tensor:
        """Returns the bytes of a PNG, a scalar string, for one mask from `parse`."""
        return mask

    def decode(self, record: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Decodes one raw record: (uint8 image [H, W, C], target).

        For looking at records one by one; the pipeline decodes no more than it needs.
        """
        image, label = self.parse_one(record)
        if self.encoded:
            image = decode_image(self.load(image), self.image_shape)
        if label.dtype == tf.string:
            label = masks.decode(self.load_mask(label))
        return image, label

    def _notes_of_pictures(self, records: Iterable[Record]) -> list[str]:
        """Describes what decoding ignores in the first pictures: a sentence each."""

        def heads():
            # Reading a bad record reports it. Looking beyond it may mean reading all of
            # a file.
            good = itertools.takewhile(lambda record: not record.fault, records)
            for record in itertools.islice(good, ignored.MOST):
                with contextlib.suppress(*FAULTS):
                    image = self.load(self.parse_one(record.raw)[0])
                    yield record.where, image.numpy()[: ignored.HEAD]

        if self.input_kind != "image" or not self.encoded:
            return []
        return ignored.notes(heads())

    def parse_one(self, record: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Parses one raw record, as `parse` does with a batch."""
        batch = tf.nest.map_structure(lambda part: tf.expand_dims(part, 0), record)
        return tf.nest.map_structure(lambda part: part[0], self.parse(batch))

    @property
    def origin(self) -> "Source":
        """The source that the records come from; most often the source itself."""
        return self

    def files(self, split: str) -> list[str]:
        """Returns the paths of one split's files; none if the data is in memory."""
        del split
        return []

    def bytes_of(self, split: str) -> int:
        """Returns the size of one split's files, from a sample if there are many."""
        if split not in self._bytes:
            paths = self.files(split)
            some = paths[:: max(len(paths) // _SAMPLE, 1)]
            sizes = [size_and_time(path)[0] for path in some]
            self._bytes[split] = sum(sizes) * len(paths) // max(len(some), 1)
        return self._bytes[split]

    @functools.cached_property
    def _bytes(self) -> dict[str, int]:
        """Results of `bytes_of`, by split: files may be far."""
        return {}

    def files_digest(self, split: str) -> str:
        """Returns the number of a split's files, with a digest of their names.

        It does not depend on the folder, as a run may go on elsewhere.
        """
        if split not in self._digests:
            paths = self.files(split)
            names = " ".join([path.rpartition("/")[2] for path in paths])
            digest = hashlib.sha256(os.fsencode(names)).hexdigest()[:8]
            self._digests[split] = f"{len(paths)} ({digest})"
        return self._digests[split]

    @functools.cached_property
    def _digests(self) -> dict[str, str]:
        """Results of `files_digest`, by split: there may be a million files."""
        return {}

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """Reads one file's records eagerly, including bad ones.

        Args:
            path: the path of the file.
            split: leaves out the file's records of other splits; None for all.
        """
        raise NotImplementedError(f"{self.name} has no file {path}")

    def is_whole(self, path: str) -> bool:
        """Tells whether a file is complete, by its end."""
        del path
        return True

    def explain(self, fault: str) -> str:
        """Adds the name of a field to TensorFlow's message, where it is missing."""
        return fault

    def medians(self) -> Sequence[float]:
        """Returns the medians of the numbers of the training rows.

        Raises:
            ValueError: the rows are not in memory.
        """
        raise ValueError(f"{self.name} has no columns in memory to take medians of")

    def in_memory(self) -> "Source | None":
        """Returns the examples as a source in memory, if they are there already.

        Call it once: the source releases them.
        """
        return None

    def without(
        self, bad: Mapping[str, Sequence[Record]], splits: Mapping[str, int]
    ) -> "Source":
        """Returns the same source without some records.

        All others keep their order, numbers and augmentation.

        Args:
            bad: the records, for each split.
            splits: the number of remaining records of each.

        Raises:
            ValueError: the source cannot be read without them.
        """
        if not any(bad.values()):
            return self
        source = copy.copy(self)
        source.passed_over, source.splits = bad, {**self.splits, **splits}
        # Orders are drawn over all.
        source.all_splits = self.splits
        return source

    def size_of_all(self, split: str) -> int | None:
        """Returns the number of a split's examples, including those passed over."""
        return getattr(self, "all_splits", self.splits).get(split)

    def reads_whole(self, split: str) -> str:
        """Returns a clause why all records are read although some are taken; else "".

        For a stream of which only some are read, ``places`` describes their places.
        """
        del split
        return self.why_whole

    def _pass_over(self, dataset: tf.data.Dataset, split: str) -> tf.data.Dataset:
        """Removes bad records from a dataset of numbers and further values."""
        bad = self.passed_over.get(split, ())
        if not bad:
            return dataset
        first = [record.number for record in bad]
        last = [record.last_number for record in bad]

        def is_good(number, *_):
            return ~tf.reduce_any((number >= first) & (number <= last))

        return dataset.filter(is_good)

    def _without_bad(self, numbers: np.ndarray, split: str) -> np.ndarray:
        """Returns the numbers without those of records that are passed over."""
        bad = self.passed_over.get(split, ())
        if not bad:
            return numbers
        bounds = sorted((record.number, record.last_number) for record in bad)
        first, last = np.array(bounds).T
        place = np.searchsorted(first, numbers, side="right") - 1
        is_bad = (place >= 0) & (numbers <= np.maximum.accumulate(last)[place])
        return numbers[~is_bad]

    def labels(self, path: str, limit: int | None = None) -> Iterable[tf.Tensor]:
        """Returns targets of one file, in batches of B rows, without decoding an image.

        Only for sources with ``labels_need_checking``.

        Args:
            path: the path of the file.
            limit: the most records to read; None for all.
        """
        raise NotImplementedError(f"{self.name} has no labels to check in {path}")


@dataclasses.dataclass(frozen=True)
class Places:
    """The places of a split's records in its files.

    Attributes:
        records: as ``StreamSource.records``, with a tensor for the place of each
            record.
        read: reads the records at B such places.
    """

    records: Callable[[tf.Tensor | None], tf.data.Dataset]
    read: Callable[[tf.Tensor], Any]


class StreamSource(Source):
    """A source that is read from front to back, several files at once.

    Its order is the shuffled order of files, and that of a buffer of records.
    """

    has_buffer = True

    def places(self, split: str) -> Places:
        """Returns the places of a split's records, unless it ``reads_whole``."""
        raise NotImplementedError(f"{self.name}: {self.reads_whole(split)}")

    @abc.abstractmethod
    def records(
        self, split: str, shuffle_seed: tf.Tensor | None = None
    ) -> tf.data.Dataset:
        """Returns pairs of an int64 number and a raw record.

        Args:
            split: one of ``splits``.
            shuffle_seed: the seed of the order of files; None for their fixed order.
                The same seed gives the same order at each iteration.
        """

    @abc.abstractmethod
    def record_bytes(self, split: str) -> float:
        """Returns the approximate bytes of a raw record."""

    def numbers(self, split: str) -> np.ndarray:
        """Returns the numbers of a split's records; see ``Source.numbers``."""
        numbered = self._numbered(split) or self.records(split)
        numbers = self._pass_over(numbered, split).map(lambda number, *_: number)
        with Progress(f"Counting {self.name}", unit="records") as progress:
            parts = []
            for part in numbers.batch(_NUMBERS_AT_ONCE).as_numpy_iterator():
                parts.append(part)
                progress.add(len(part))
        return np.concatenate([np.empty(0, np.int64), *parts])

    def _numbered(self, split: str) -> tf.data.Dataset | None:
        """Returns a split's numbers, in tuples; `None` if only reading tells them."""
        del split

    def _batches(self, split, batch_size, seeds, buffer_mb, start, take):
        # Places come in the order of records.
        lookup = None
        if take is not None and not self.reads_whole(split):
            lookup = self.places(split)
        draw = lookup.records if lookup else functools.partial(self.records, split)
        records = draw(None if seeds is None else seeds[0])
        if seeds is not None:
            # Still encoded, which takes far less memory than pixels.
            record_bytes = max(self.record_bytes(split), _LEAST_BYTES)
            buffer = int(buffer_mb * 2**20 / record_bytes)
            buffer = min(buffer, self.size_of_all(split) or buffer)
            records = records.shuffle(
                max(buffer, 1), seed=seeds[1], reshuffle_each_iteration=False
            )
        batches = self._pass_over(records, split).skip(start).batch(batch_size)
        batches = batches if take is None else batches.map(take)
        if lookup is None:
            return batches
        return batches.map(
            lambda numbers, place, *beside: (numbers, lookup.read(place), *beside),
            tf.data.AUTOTUNE,
        )


class IndexedSource(Source):
    """A source whose records are numbers, which ``parse`` turns into examples.

    The test examples' numbers follow the training examples'. Any position of any order
    can be computed without the positions before it.
    """

    def _in_order(
        self, split: str, begin: tf.Tensor, size: int, seeds: tf.Tensor | None
    ) -> tf.Tensor:
        """Returns the numbers at positions of a split's order, up to its end."""
        count = self.size_of_all(split)
        positions = tf.range(begin, tf.minimum(begin + size, count))
        if seeds is not None:
            positions = tf.random.experimental.index_shuffle(
                positions, seeds, count - 1
            )
        return positions + self._first(split)

    def _batches(self, split, batch_size, seeds, buffer_mb, start, take):
        del buffer_mb
        count = self.size_of_all(split)

        def numbers(begin):
            numbers_there = self._in_order(split, begin, batch_size, seeds)
            return numbers_there, numbers_there

        if not self.passed_over.get(split):
            batches = tf.data.Dataset.range(start, count, batch_size).map(numbers)
        else:
            one_by_one = (
                tf.data.Dataset.range(0, count, batch_size).map(numbers).unbatch()
            )
            batches = self._pass_over(one_by_one, split).skip(start).batch(batch_size)
        batches = batches if take is None else batches.map(take)
        return self.announced(batches, split, seeds, batch_size)

    def announced(
        self,
        batches: tf.data.Dataset,
        split: str,
        seeds: tf.Tensor | None,
        batch_size: int,
    ) -> tf.data.Dataset:
        """Starts reading far records ahead.

        Args:
            batches: has batches of numbers, and further values.
            split: the split of the records.
            seeds: see ``batches``.
            batch_size: see ``batches``.
        """
        del split, seeds, batch_size
        return batches

    def numbers(self, split: str) -> np.ndarray:
        """Returns the numbers of a split's records; see ``Source.numbers``."""
        numbers = self._first(split) + np.arange(self.size_of_all(split))
        return self._without_bad(numbers, split)

    def _first(self, split: str) -> int:
        return 0 if split == "train" else self.size_of_all("train") or 0


def fingerprint(source: Source) -> str:
    """Returns a digest that changes with a source's examples, and with its files."""
    facts = [source.name, source.reads, sorted(source.splits.items())]
    facts.append((tuple(source.image_shape), source.num_classes))
    if source.target.kind != "class":
        facts.append(source.target)
    for split in source.splits:
        facts.append([bad.number for bad in source.passed_over.get(split, ())])
        paths = source.files(split)
        states = sizes_and_times(paths)
        facts += [(path, *of) for path, of in zip(paths, states, strict=True)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def sizes_and_times(paths: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yields `size_and_time` of each file; requests several at once."""
    some = [paths[i : i + _FILES_AT_ONCE] for i in range(0, len(paths), _FILES_AT_ONCE)]
    with (
        concurrent.futures.ThreadPoolExecutor() as pool,
        Progress("Looking for changed files", len(paths), "files", EARLY_S) as shown,
    ):
        for states in pool.map(lambda part: [*map(size_and_time, part)], some):
            yield from states
            shown.add(len(states))


def size_and_time(path: str) -> tuple[int, int]:
    """Returns a file's bytes and its time of change; zeros for a missing file."""
    if "://" not in path:
        # TensorFlow knows whole seconds only.
        try:
            stat = os.stat(path)
        except OSError:
            return 0, 0
        return stat.st_size, stat.st_mtime_ns
    try:
        stat = tf.io.gfile.stat(path)
    except tf.errors.OpError:
        return 0, 0
    return stat.length, stat.mtime_nsec
