"""Keeps rows of different lengths one after another, and pads them when read."""

import collections
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from towers.input_pipeline.images import draws
from towers.input_pipeline.sources.base import IndexedSource
from towers.input_pipeline.sources.files.record import BadRecordError, Record

_LENGTH = 128


def check_length(sequence_length: int | None) -> int:
    """Returns the number of tokens in a row; None gives the default.

    Raises:
        ValueError: the number is too small.
    """
    length = _LENGTH if sequence_length is None else sequence_length
    if length < 1:
        raise ValueError(f"sequence_length is {length}, expected at least 1")
    return length


class RaggedSource(IndexedSource):
    """Rows of tokens, padded with 0, and a target for each row or token.

    A subclass sets `_files`, the paths of each split, finds rows and faults, and calls
    `_keep`. Two splits may have parts of the same files.
    """

    encoded = False
    has_padding = True
    _files: Mapping[str, list[str]]
    _faults: Sequence[Record] = ()

    def _refuse(self, faults: Sequence[Record], skip_bad: bool) -> None:
        """Takes bad records, which stand for no row.

        Raises:
            BadRecordError: there is one, and it is not left out.
        """
        if faults and not skip_bad:
            raise BadRecordError(str(faults[0]))
        self._faults = faults

    def _keep(
        self,
        ids: np.ndarray,
        lengths: Iterable[int],
        targets: np.ndarray,
        positions: Sequence[tuple[str, str]],
        begins: Sequence[int] | None = None,
    ) -> None:
        """Keeps all rows, those for training first.

        Args:
            ids: the ids of all tokens.
            lengths: the number of tokens of each row.
            targets: a target for each row, or for each token.
            positions: the path of each row, and its position there.
            begins: the index of each row's first token; None if rows follow one
                another.
        """
        lengths = np.fromiter(lengths, np.int64)
        if begins is None:
            begins = np.cumsum(lengths) - lengths
        # A single id stands in if there is no token.
        ids = ids if len(ids) else np.zeros([1], ids.dtype)
        self._arrays = ids, np.asarray(begins, np.int64), lengths, targets
        self._places = positions

    @functools.cached_property
    def _tensors(self) -> list[tf.Tensor]:
        # Outside the graph that is being traced: a constant in a graph is limited to 2
        # GiB. On the CPU, where tf.data runs.
        with tf.init_scope(), tf.device("/CPU:0"):
            return [tf.constant(array) for array in self._arrays]

    def _tokens_of(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the ids of rows, which of these are tokens, and their indices."""
        ids, begins, lengths, _ = self._tensors
        columns = tf.range(self.image_shape[0], dtype=tf.int64)
        is_token = columns < tf.gather(lengths, records)[:, None]
        indices = tf.where(is_token, tf.gather(begins, records)[:, None] + columns, 0)
        tokens = tf.cast(tf.gather(ids, indices), tf.int32)
        return tf.where(is_token, tokens, 0), is_token, indices

    def mean_length(self, split: str) -> float:
        """Returns the mean number of tokens of a row, without padding."""
        first = self.splits.get("train", 0)
        lengths = self._arrays[2]
        return float(np.mean(lengths[:first] if split == "train" else lengths[first:]))

    def batches_by_length(
        self,
        split: str,
        batch_size: int,
        groups: int,
        *,
        seeds: tf.Tensor | None = None,
        start: int | tf.Tensor = 0,
    ) -> tf.data.Dataset:
        """Returns batches as ``batches`` does; several at once, of rows of like length.

        The rows of `groups` batches are taken from the order, and sorted by length. The
        batches made of them are shuffled.

        Args:
            split: one of `splits`.
            batch_size: number of rows in a batch.
            groups: number of batches that are made from consecutive rows of the order.
            seeds: see ``batches``.
            start: see ``batches``; counts rows of the resulting order.
        """
        size, count = batch_size * groups, self.size_of_all(split)

        def numbers(begin):
            rows = self._in_order(split, begin, size, seeds)
            lengths = tf.gather(self._tensors[2], rows)
            # The longest first: so a short batch has the shortest rows.
            order = tf.argsort(lengths, direction="DESCENDING", stable=True)
            if seeds is not None:
                order = _shuffle_batches(order, batch_size, seeds[0] + begin)
            rows = tf.gather(rows, order)[tf.maximum(start - begin, 0) :]
            return rows, rows

        start = tf.cast(start, tf.int64)
        # At the end, there is nothing to sort.
        begin = tf.where(start < count, start - start % size, count)
        return tf.data.Dataset.range(begin, count, size).map(numbers)

    def files(self, split: str) -> list[str]:
        """Returns one split's files; two splits may have parts of the same file."""
        return self._files.get(split) or self._files["train"]

    @functools.cached_property
    def _by_path(self) -> Mapping[str, Sequence[Record]]:
        """The bad records and the rows of each file, in order."""
        records = collections.defaultdict(list)
        for record in self._faults:
            records[record.path].append(record)
        for number, (path, place) in enumerate(self._places):
            records[path].append(Record(path, place, number))
        return records

    def is_whole(self, path: str) -> bool:
        """Tells whether a file has no bad record; see ``Source.is_whole``."""
        return not any(record.fault for record in self._by_path.get(path, ()))

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """Yields the rows of a file, and its bad records."""
        first = self.splits.get("train", 0)
        for record in self._by_path.get(path, ()):
            own = "train" if record.number < first else "test"
            if record.fault:
                yield record
            elif split in (None, own):
                yield record.with_raw(tf.constant(record.number, tf.int64))


def bad_record(path: str, place: str, fault: str) -> Record:
    """Makes a record that stands for no row, as it is left out before numbering."""
    return Record(path, place, -1, fault=fault, count=0)


def _shuffle_batches(order: tf.Tensor, batch_size: int, seed: tf.Tensor) -> tf.Tensor:
    """Shuffles whole batches; a short one stays the last."""
    count = tf.size(order) // batch_size
    keys = draws.uniform(seed, tf.range(tf.cast(count, tf.int64)), 1)[:, 0]
    whole = tf.reshape(order[: count * batch_size], [count, batch_size])
    whole = tf.gather(whole, tf.argsort(keys, stable=True))
    return tf.concat([tf.reshape(whole, [-1]), order[count * batch_size :]], 0)
