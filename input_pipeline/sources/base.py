"""What every source offers, and what sources that read files share."""

import abc
import copy
import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

# The split to evaluate on while training, in order of preference. "test" is last
# where there are several: the labels of a test set are often withheld (ImageNet).
HELD_OUT = ("validation", "valid", "val", "test")

# More records than a file has; where files are read from front to back, the records of
# the n-th of a split are numbered from n times this.
FILE = 2**40


@dataclasses.dataclass(frozen=True)
class Record:
    """One record of a file, or what is found in its place.

    Attributes:
        path: the file.
        place: the position in it, a phrase; empty where the file is the record.
        number: the record's own, as ``Source.batches`` counts.
        raw: the raw record; None where there is none.
        fault: why it cannot be used, a phrase; empty if nothing is known against it.
        gap: in bytes, where it begins and ends, if it cannot even be read.
        count: records that it stands for; None for all that may follow in the file.
    """

    path: str
    place: str
    number: int
    raw: Any = None
    fault: str = ""
    gap: tuple[int, int] | None = None
    count: int | None = 1

    @property
    def last_number(self) -> int:
        """Number of the last record that it stands for."""
        if self.count is None:
            return self.number // FILE * FILE + FILE - 1
        return self.number + self.count - 1

    @property
    def where(self) -> str:
        """File and position."""
        return f"{self.path}: {self.place}" if self.place else self.path

    def __str__(self) -> str:
        """One sentence that names file, position and reason."""
        behind = "" if self.count is not None else ", and nothing behind it can be read"
        return f"{self.where}: {self.fault}{behind}"

    def with_raw(self, raw: Any) -> "Record":
        """The same, read."""
        return dataclasses.replace(self, raw=raw)

    def with_fault(self, fault: str, **facts: Any) -> "Record":
        """The same, found bad."""
        return dataclasses.replace(self, raw=None, fault=fault, **facts)


class Source(abc.ABC):
    """A set of labelled images, in named splits.

    Records are handled by the batch. A *raw* record is what costs little to move:
    bytes as they stand in a file, or a number.

    Attributes:
        name: the spec it was opened with.
        num_classes: labels are in [0, num_classes).
        class_names: one name for each label, or None.
        image_shape: (H, W, C) of decoded images; None where it varies.
        encoded: whether `parse` gives images that have yet to be decoded.
        splits: number of examples for each split, None where unknown; the keys are
            "train" and, where there is one, "test". Empty until prepared.
        all_jpeg: whether every encoded image is known to be a JPEG.
        in_graph: False where records are read by Python, which workers of a tf.data
            service cannot run.
        labels_need_checking: False where labels are right by construction.
        ends_need_checking: whether reading a file that is cut off may go unnoticed; see
            ``is_whole``.
        reads: what besides its files decides what a source reads, such as the names
            of fields.
        image_fields: what a record calls its image, or each number of its row.
        label_field: what it calls its label.
        passed_over: bad records that are left out, for each split; see ``without``.
        note: what else is to be known, a phrase; may be empty.
        notes: what was decided without being asked for, such as which records are held
            out: sentences.
    """

    name: str
    num_classes: int
    class_names: tuple[str, ...] | None = None
    image_shape: tuple[int | None, int | None, int]
    encoded: bool = True
    splits: dict[str, int | None]
    all_jpeg: bool = False
    in_graph: bool = True
    labels_need_checking: bool = False
    ends_need_checking: bool = False
    reads: tuple = ()
    image_fields: Sequence[str] = ("image",)
    label_field: str = "label"
    passed_over: Mapping[str, Sequence[Record]] = {}
    note: str = ""
    notes: Sequence[str] = ()

    def prepare(self) -> None:  # noqa: B027 (most sources are ready as they are)
        """Downloads or writes what is missing; does nothing the second time.

        Raises:
            ValueError: the files cannot be downloaded or written.
        """

    @abc.abstractmethod
    def batches(
        self,
        split: str,
        batch_size: int,
        *,
        seeds: tf.Tensor | None = None,
        buffer_mb: int = 0,
        start: int | tf.Tensor = 0,
    ) -> tf.data.Dataset:
        """Raw records of one epoch, in order, by the batch.

        Args:
            split: one of `splits`.
            batch_size: records in a batch; the last one may be shorter.
            seeds: int64 [2] of the order; None for the fixed one.
            buffer_mb: memory for drawing the next record from, where the source cannot
                jump to any.
            start: records of that order to pass over, at the least cost.

        Returns:
            A dataset of (int64 numbers [B], raw records with B rows). A record's number
            is its own, in whatever order it comes.
        """

    @abc.abstractmethod
    def parse(self, records: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes a batch of raw records apart.

        Args:
            records: with B rows.

        Returns:
            Images: uint8 [B, H, W, C] or, where they are `encoded`, what `load` takes
            [B]; int64 labels [B].
        """

    def load(self, image: tf.Tensor) -> tf.Tensor:
        """Makes encoded bytes, a scalar string, of one of what `parse` gave."""
        return image

    def decode(self, record: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Decodes one raw record: (uint8 image [H, W, C], int64 label []).

        For looking at records one by one; the pipeline decodes no more than it needs.
        """
        image, label = self.parse_one(record)
        if self.encoded:
            image = decode_image(self.load(image), self.image_shape)
        return image, label

    def parse_one(self, record: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes one raw record apart, as `parse` does with a batch."""
        batch = tf.nest.map_structure(lambda part: tf.expand_dims(part, 0), record)
        images, labels = self.parse(batch)
        return images[0], labels[0]

    @property
    def origin(self) -> "Source":
        """Where the records were read first; the source itself, mostly."""
        return self

    def files(self, split: str) -> list[str]:
        """Paths of one split's files; none where the data is in memory."""
        del split
        return []

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """Goes over one file's records eagerly, also over bad ones.

        Args:
            path: of the file.
            split: to leave out what the file has of others; None for all of it.
        """
        raise NotImplementedError(f"{self.name} has no file {path}")

    def is_whole(self, path: str) -> bool:
        """Tells whether a file's end is there."""
        del path
        return True

    def explain(self, fault: str) -> str:
        """Names the field in TensorFlow's message, where it does not."""
        return fault

    def without(
        self, bad: Mapping[str, Sequence[Record]], splits: Mapping[str, int]
    ) -> "Source":
        """The same source, which passes over some records.

        All others keep their order, numbers and augmentation.

        Args:
            bad: the records, for each split.
            splits: how many remain of those.

        Raises:
            ValueError: it cannot be read without them.
        """
        if not any(bad.values()):
            return self
        source = copy.copy(self)
        source.passed_over, source.splits = bad, {**self.splits, **splits}
        # Orders are drawn over all.
        source._all_splits = self.splits
        return source

    def size_of_all(self, split: str) -> int | None:
        """Examples of a split, those that are passed over among them."""
        return getattr(self, "_all_splits", self.splits).get(split)

    def _pass_over(self, dataset: tf.data.Dataset, split: str) -> tf.data.Dataset:
        """Leaves what is bad out of a dataset of numbers and anything else."""
        bad = self.passed_over.get(split, ())
        if not bad:
            return dataset
        first = [record.number for record in bad]
        last = [record.last_number for record in bad]

        def is_good(number, *_):
            return ~tf.reduce_any((number >= first) & (number <= last))

        return dataset.filter(is_good)

    def labels(self, path: str, limit: int | None = None) -> Iterable[tf.Tensor]:
        """int64 labels [B] of one file, in batches, without decoding an image.

        Only for sources with ``labels_need_checking``.

        Args:
            path: of the file.
            limit: records to read at most; None for all.
        """
        raise NotImplementedError(f"{self.name} has no labels to check in {path}")


class StreamSource(Source):
    """A source that is read from front to back, several files at once.

    Its order is that of the files, shuffled, and of a buffer of records.
    """

    @abc.abstractmethod
    def records(
        self, split: str, shuffle_seed: tf.Tensor | None = None
    ) -> tf.data.Dataset:
        """Pairs of an int64 number and a raw record.

        Args:
            split: one of ``splits``.
            shuffle_seed: of the order of the files; None for their fixed order. The
                same seed gives the same order at each iteration.
        """

    @abc.abstractmethod
    def record_bytes(self, split: str) -> float:
        """What a raw record takes, more or less."""

    def batches(
        self,
        split: str,
        batch_size: int,
        *,
        seeds: tf.Tensor | None = None,
        buffer_mb: int = 0,
        start: int | tf.Tensor = 0,
    ) -> tf.data.Dataset:
        """See ``Source.batches``."""
        if seeds is None:
            records = self.records(split)
        else:
            records = self.records(split, seeds[0])
            # Still encoded: that takes far less memory than pixels.
            buffer = int(buffer_mb * 2**20 / max(self.record_bytes(split), 1))
            buffer = min(buffer, self.size_of_all(split) or buffer)
            records = records.shuffle(
                max(buffer, 1), seed=seeds[1], reshuffle_each_iteration=False
            )
        return self._pass_over(records, split).skip(start).batch(batch_size)


class IndexedSource(Source):
    """A source whose records are numbers, which ``parse`` turns into examples.

    The test examples' numbers follow the training examples'. Any place of any order is
    computed without those before it.
    """

    def batches(
        self,
        split: str,
        batch_size: int,
        *,
        seeds: tf.Tensor | None = None,
        buffer_mb: int = 0,
        start: int | tf.Tensor = 0,
    ) -> tf.data.Dataset:
        """See ``Source.batches``."""
        del buffer_mb
        first = 0 if split == "train" else self.size_of_all("train") or 0
        count = self.size_of_all(split)

        def numbers(begin):
            places = tf.range(begin, tf.minimum(begin + batch_size, count))
            if seeds is not None:
                places = tf.random.experimental.index_shuffle(places, seeds, count - 1)
            places += first
            return places, places

        if not self.passed_over.get(split):
            return tf.data.Dataset.range(start, count, batch_size).map(numbers)
        each = tf.data.Dataset.range(0, count, batch_size).map(numbers).unbatch()
        return self._pass_over(each, split).skip(start).batch(batch_size)


# What TensorFlow raises while it reads a bad record.
FAULTS = (tf.errors.OpError, UnicodeDecodeError)


class BadRecordError(ValueError):
    """One record cannot be used; the message names file, position and reason.

    Attributes:
        many: whether most of the records after it cannot be used either, so that the
            fault is not in the record.
    """

    def __init__(self, message: str, many: bool = False):
        super().__init__(message)
        self.many = many


def fault_of(error: Exception) -> str:
    """What one of ``FAULTS`` says, in a phrase."""
    if isinstance(error, UnicodeDecodeError):
        # TensorFlow puts the record's own bytes into some messages.
        return "cannot be parsed"
    # Without the op's name around it.
    message = error.message.removeprefix("{{function_node __wrapped__")
    message = message.rpartition("}} ")[2].partition(" [Op:")[0]
    reason = message.splitlines()[0].strip()
    lost = isinstance(error, tf.errors.DataLossError)
    return f"corrupted: {reason}" if lost else reason


def decode_image(
    encoded: tf.Tensor, shape: tuple[int | None, int | None, int]
) -> tf.Tensor:
    """Decodes JPEG, PNG, GIF (its first picture), BMP or WebP bytes.

    Args:
        encoded: scalar string.
        shape: (H, W, C) expected, None where it varies. C decides how many channels
            are made of the file's.

    Returns:
        uint8 image [H, W, C]. Another size than expected is an error at run time.
    """
    image = tf.io.decode_image(encoded, channels=shape[-1], expand_animations=False)
    return tf.ensure_shape(image, shape)


def fingerprint(source: Source) -> str:
    """Changes with whatever changes a source's examples, and with its files."""
    facts = [source.name, source.reads, sorted(source.splits.items())]
    facts.append((tuple(source.image_shape), source.num_classes))
    for split in source.splits:
        facts.append([bad.number for bad in source.passed_over.get(split, ())])
        for path in source.files(split):
            facts.append((path, *size_and_time(path)))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def size_and_time(path: str) -> tuple[int, int]:
    """Bytes of a file, and when it was changed; nothing of one that is not there."""
    try:
        stat = tf.io.gfile.stat(path)
    except tf.errors.OpError:
        return 0, 0
    return stat.length, stat.mtime_nsec


def shuffle_all(
    dataset: tf.data.Dataset, size: int, seed: int | tf.Tensor | None
) -> tf.data.Dataset:
    """Shuffles a dataset of small items as a whole; leaves it alone without a seed."""
    if seed is None:
        return dataset
    return dataset.shuffle(max(size, 1), seed=seed, reshuffle_each_iteration=False)


def held_out(names: Collection[str]) -> str | None:
    """The name of the split to evaluate on, or None."""
    return next((name for name in HELD_OUT if name in names), None)
