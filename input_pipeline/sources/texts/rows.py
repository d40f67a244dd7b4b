"""Rows of different lengths, one behind the other in memory, padded when read."""

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
    """Returns the number of tokens in a row, by default if it is None.

    Raises:
        ValueError: it is none.
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
        """Takes over what is bad, which stands for no row.

        Raises:
            BadRecordError: there is something, and it is not to be left out.
        """
        if faults and not skip_bad:
            raise BadRecordError(str(faults[0]))
        self._faults = faults

    def _keep(
        self,
        ids: np.ndarray,
        lengths: Iterable[int],
        targets: np.ndarray,
        places: Sequence[tuple[str, str]],
        begins: Sequence[int] | None = None,
    ) -> None:
        """Keeps all rows, those for training first.

        Args:
            ids: of all tokens.
            lengths: tokens of each row.
            targets: one of each row, or of each token.
            places: path of each row, and where it is there.
            begins: place of each row's first token; None if rows follow one another.
        """
        lengths = np.fromiter(lengths, np.int64)
        if begins is None:
            begins = np.cumsum(lengths) - lengths
        # No token is where there is none.
        ids = ids if len(ids) else np.zeros([1], ids.dtype)
        self._arrays = ids, np.asarray(begins, np.int64), lengths, targets
        self._places = places

    @functools.cached_property
    def _tensors(self) -> list[tf.Tensor]:
        # Outside the graph that is being traced: a constant in it may not exceed
        # 2 GiB. On the CPU: that is where tf.data runs.
        with tf.init_scope(), tf.device("/CPU:0"):
            return [tf.constant(array) for array in self._arrays]

    def _tokens_of(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The ids of rows, which of these are tokens, and where they are among all."""
        ids, begins, lengths, _ = self._tensors
        columns = tf.range(self.image_shape[0], dtype=tf.int64)
        is_token = columns < tf.gather(lengths, records)[:, None]
        places = tf.where(is_token, tf.gather(begins, records)[:, None] + columns, 0)
        tokens = tf.cast(tf.gather(ids, places), tf.int32)
        return tf.where(is_token, tokens, 0), is_token, places

    def mean_length(self, split: str) -> float:
        """Tokens of a row, padding not among them."""
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
        """As ``batches``; several come at once, each of rows of like length.

        So many batches' rows are taken of the order, and sorted by length. The batches
        of them come in an order of their own.

        Args:
            split: one of `splits`.
            batch_size: rows in a batch.
            groups: batches that are made of rows that follow one another in the order.
            seeds: see ``batches``.
            start: see ``batches``; rows of the order that is the result.
        """
        size, count = batch_size * groups, self.size_of_all(split)

        def numbers(begin):
            found = self._in_order(split, begin, size, seeds)
            lengths = tf.gather(self._tensors[2], found)
            # The longest first: if a batch is short, it is the shortest's.
            order = tf.argsort(lengths, direction="DESCENDING", stable=True)
            if seeds is not None:
                order = _shuffle_batches(order, batch_size, seeds[0] + begin)
            found = tf.gather(found, order)[tf.maximum(start - begin, 0) :]
            return found, found

        start = tf.cast(start, tf.int64)
        # At the end, there is nothing to sort.
        begin = tf.where(start < count, start - start % size, count)
        return tf.data.Dataset.range(begin, count, size).map(numbers)

    def files(self, split: str) -> list[str]:
        """See ``Source.files``; two splits may have parts of the same."""
        return self._files.get(split) or self._files["train"]

    @functools.cached_property
    def _by_path(self) -> Mapping[str, Sequence[Record]]:
        """Of each file, what is bad there and its rows, in order."""
        found = collections.defaultdict(list)
        for record in self._faults:
            found[record.path].append(record)
        for number, (path, place) in enumerate(self._places):
            found[path].append(Record(path, place, number))
        return found

    def is_whole(self, path: str) -> bool:
        """See ``Source.is_whole``: False for a file in which something is bad."""
        return not any(record.fault for record in self._by_path.get(path, ()))

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """The rows of a file, and what is bad there."""
        first = self.splits.get("train", 0)
        for record in self._by_path.get(path, ()):
            own = "train" if record.number < first else "test"
            if record.fault:
                yield record
            elif split in (None, own):
                yield record.with_raw(tf.constant(record.number, tf.int64))


def bad_record(path: str, place: str, fault: str) -> Record:
    """What stands for no row, as it is left out before rows are numbered."""
    return Record(path, place, -1, fault=fault, count=0)


def _shuffle_batches(order: tf.Tensor, batch_size: int, seed: tf.Tensor) -> tf.Tensor:
    """Puts whole batches into another order; a short one stays the last."""
    count = tf.size(order) // batch_size
    keys = draws.uniform(seed, tf.range(tf.cast(count, tf.int64)), 1)[:, 0]
    whole = tf.reshape(order[: count * batch_size], [count, batch_size])
    whole = tf.gather(whole, tf.argsort(keys, stable=True))
    return tf.concat([tf.reshape(whole, [-1]), order[count * batch_size :]], 0)
