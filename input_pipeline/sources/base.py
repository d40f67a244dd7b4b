"""What every source offers, and what sources that read files share."""

import abc
import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import tensorflow as tf

# The split to evaluate on while training, in order of preference. "test" is last
# where there are several: the labels of a test set are often withheld (ImageNet).
HELD_OUT = ("validation", "valid", "val", "test")


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
        reads: what besides its files decides what a source reads, such as the names
            of fields.
        note: what else is to be known, a phrase; may be empty.
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
    reads: tuple = ()
    note: str = ""

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
        batch = tf.nest.map_structure(lambda part: tf.expand_dims(part, 0), record)
        images, labels = self.parse(batch)
        if self.encoded:
            return decode_image(self.load(images[0]), self.image_shape), labels[0]
        return images[0], labels[0]

    @property
    def origin(self) -> "Source":
        """Where the records were read first; the source itself, mostly."""
        return self

    def files(self, split: str) -> list[str]:
        """Paths of one split's files; none where the data is in memory."""
        del split
        return []

    def walk(self, path: str) -> Iterator[tuple[str, Any]]:
        """Goes over one file's records eagerly.

        Yields:
            (where, record): where is a phrase that names file and position.

        Raises:
            BadRecordError: the file cannot be read on from here.
        """
        raise NotImplementedError(f"{self.name} has no file {path}")

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
            buffer = min(buffer, self.splits[split] or buffer)
            records = records.shuffle(
                max(buffer, 1), seed=seeds[1], reshuffle_each_iteration=False
            )
        return records.skip(start).batch(batch_size)


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
        first = 0 if split == "train" else self.splits.get("train", 0)
        count = self.splits[split]

        def numbers(begin):
            places = tf.range(begin, tf.minimum(begin + batch_size, count))
            if seeds is not None:
                places = tf.random.experimental.index_shuffle(places, seeds, count - 1)
            places += first
            return places, places

        return tf.data.Dataset.range(start, count, batch_size).map(numbers)


class BadRecordError(ValueError):
    """One record cannot be used; the message names file, position and reason."""


@contextlib.contextmanager
def blame(where: str) -> Iterator[None]:
    """Turns TensorFlow's errors into a ``BadRecordError`` that says where."""
    try:
        yield
    except tf.errors.DataLossError as error:
        raise BadRecordError(f"{where}: corrupted: {_reason(error)}") from error
    except tf.errors.OpError as error:
        raise BadRecordError(f"{where}: {_reason(error)}") from error
    except UnicodeDecodeError as error:
        # TensorFlow puts the record's own bytes into some messages.
        raise BadRecordError(f"{where}: cannot be parsed") from error


def _reason(error: tf.errors.OpError) -> str:
    """TensorFlow's message without the op's name around it."""
    message = error.message.removeprefix("{{function_node __wrapped__")
    message = message.rpartition("}} ")[2].partition(" [Op:")[0]
    return message.splitlines()[0].strip()


def walk_tfrecord(
    path: str, parse: Callable[[tf.Tensor], Any] = lambda record: record
) -> Iterator[tuple[str, Any]]:
    """``Source.walk`` for TFRecord files.

    Args:
        path: of a TFRecord file.
        parse: from serialized to raw record.

    Yields:
        (where, record).

    Raises:
        BadRecordError: at the first record whose checksum or length is wrong, or
            which ``parse`` refuses.
    """
    records = iter(tf.data.TFRecordDataset(path))
    offset = 0
    for index in itertools.count():
        where = f"{path}: record {index} (byte offset {offset})"
        with blame(where):
            serialized = next(records, None)
            if serialized is None:
                break
            record = parse(serialized)
        yield where, record
        # Around the data: its length (8 bytes) and two checksums (4 bytes each).
        offset += len(serialized.numpy()) + 16
    # TensorFlow takes the first bytes of a cut-off record for the end of the file.
    if surplus := tf.io.gfile.stat(path).length - offset:
        raise BadRecordError(f"{where}: corrupted: truncated after {surplus} bytes")


def decode_image(
    encoded: tf.Tensor, shape: tuple[int | None, int | None, int]
) -> tf.Tensor:
    """Decodes JPEG or PNG bytes.

    Args:
        encoded: scalar string.
        shape: (H, W, C) expected, None where it varies. C decides how many channels
            are made of the file's.

    Returns:
        uint8 image [H, W, C]. Another size than expected is an error at run time.
    """
    image = tf.io.decode_image(encoded, channels=shape[-1], expand_animations=False)
    return tf.ensure_shape(image, shape)


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
