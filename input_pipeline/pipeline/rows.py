"""Takes the rows of each batch that one of several hosts computes.

All hosts know which records a batch has, by their numbers. Costly work, such as
decoding, is done only for the rows that a host needs.

Batches of raw records are the same as on one host, and a host keeps its own positions.
If a host has no row of a batch, it keeps one unneeded row. The digest of a batch is
computed from its records' numbers.
"""

import dataclasses
import functools
from typing import Any, Protocol

import tensorflow as tf

# Numbers that identify batches are below this: floats hold them exactly.
_PRIME, _FACTOR = 65521, 40503
# The columns beside each row: the first row's position in its batch, the number of rows
# in the batch, the batch's mark, and which rows to take.
_FIRST, _TOTAL, _MARK, _BEGIN, _COUNT = range(5)


class Share(Protocol):
    """The part of each batch that a host computes."""

    def bounds(self, total: Any) -> tuple[Any, Any]:
        """Returns its first row in a batch of `total`, and the one after its last."""

    def of_batch(self, x: Any, first: Any, total: Any, mark: Any) -> Any:
        """Returns a replacement of x in a batch that has only some rows.

        Args:
            x: the rows.
            first: position of the first one in the batch.
            total: number of rows of the batch.
            mark: distinguishes batches, at least 0 and less than 65521.
        """


@dataclasses.dataclass(frozen=True)
class Rows:
    """Takes a host's rows of batches.

    Attributes:
        share: the host's part.
        batch_size: number of rows of all batches but an epoch's last one.
    """

    share: Share
    batch_size: int

    @functools.cached_property
    def count(self) -> int:
        """The number of rows read of each batch but the last.

        At least one, so that a batch can be made, and as many as the last batch can
        have.
        """
        sizes = (self.share.bounds(total) for total in range(self.batch_size + 1))
        return max(1, *(end - first for first, end in sizes))

    def __call__(self, numbers: tf.Tensor, records: Any) -> tuple[tf.Tensor, Any, Any]:
        """Takes the host's rows of raw records, before anything is made of them.

        Args:
            numbers: the numbers of the records of one or several consecutive batches.
            records: the records, with as many rows.

        Returns:
            Their numbers, the records, and the columns that `say` needs.
        """
        indices = tf.range(tf.size(numbers, tf.int64))
        size = tf.constant(self.batch_size, tf.int64)
        batch, position = indices // size, indices % size
        rest = tf.size(numbers, tf.int64) % size
        is_whole = indices < tf.size(numbers, tf.int64) - rest
        total = tf.where(is_whole, size, rest)
        bounds = zip(
            self.share.bounds(self.batch_size), self.share.bounds(rest), strict=True
        )
        first, end = (
            tf.where(is_whole, tf.constant(whole, tf.int64), last)
            for whole, last in bounds
        )
        # All batches but the last must have the same size, so some rows are read in
        # vain.
        count = tf.constant(self.count, tf.int64)
        count = tf.where(is_whole, count, tf.maximum(end - first, 1))
        begin = tf.minimum(first, total - count)
        is_own = (position >= begin) & (position < begin + count)
        mark = tf.math.segment_sum(_hashed(numbers, position), batch) % _PRIME
        beside = first, total, tf.gather(mark, batch), first - begin, end - first
        beside = tf.boolean_mask(tf.stack(beside, axis=1), is_own)
        is_own = tf.where(is_own)[:, 0]
        records = tf.nest.map_structure(lambda t: tf.gather(t, is_own), records)
        return tf.gather(numbers, is_own), records, beside

    def say(self, *batch: Any) -> Any:
        """Adds to a batch which of its rows it has.

        Args:
            batch: x, targets, weights if any, and the columns that a call returns.
        """
        *batch, beside = batch
        about = beside[0]
        begin, end = about[_BEGIN], about[_BEGIN] + about[_COUNT]
        x, *others = tf.nest.map_structure(lambda t: t[begin:end], batch)
        about = about[_FIRST], about[_TOTAL], about[_MARK]
        return self.share.of_batch(x, *about), *others

    def of_whole(self, *batch: Any) -> Any:
        """Takes the rows of a finished batch."""
        numbers = tf.cast(tf.reshape(tf.nest.flatten(batch)[0], [-1]), tf.int64)
        mark = tf.reduce_sum(_hashed(numbers, tf.range(tf.size(numbers, tf.int64))))
        total = tf.shape(batch[1])[0]
        first, end = self.share.bounds(total)
        x, *others = tf.nest.map_structure(lambda t: t[first:end], batch)
        return self.share.of_batch(x, first, total, mark % _PRIME), *others


def _hashed(numbers: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Returns numbers that depend on values and positions, well scattered."""
    mixed = (
        numbers % _PRIME + numbers // _PRIME + positions % _PRIME * _FACTOR
    ) % _PRIME
    return mixed * mixed % _PRIME * mixed % _PRIME
