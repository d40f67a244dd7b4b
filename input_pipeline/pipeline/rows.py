"""The rows of each batch that one of several hosts computes, and needs to read.

All hosts know which records a batch has, by their numbers. What costs something, such
as decoding, is done only for the rows that a host needs.

Raw records are made batches of as on one host, and a host keeps its own places. A row
that nobody needs stands for a batch of which a host has none. The digest of a batch is
that of its records' numbers.
"""

import dataclasses
import functools
from typing import Any, Protocol

import tensorflow as tf

# Below it are numbers that tell batches apart: floats hold them exactly.
_PRIME, _FACTOR = 65521, 40503
# What stands beside each row: the first one's place in its batch, how many rows the
# batch has, what tells it from others, and which of the rows beside it to take.
_FIRST, _TOTAL, _MARK, _BEGIN, _COUNT = range(5)


class Share(Protocol):
    """What a host computes of each batch."""

    def bounds(self, total: Any) -> tuple[Any, Any]:
        """Returns its first row of a batch of `total`, and that behind its last."""

    def of_batch(self, x: Any, first: Any, total: Any, mark: Any) -> Any:
        """Returns what stands for x in a batch that has some rows only.

        Args:
            x: the rows.
            first: place of the first one in the batch.
            total: rows of the batch.
            mark: tells batches apart, at least 0 and less than 65521.
        """


@dataclasses.dataclass(frozen=True)
class Rows:
    """Takes a host's rows of batches.

    Attributes:
        share: which they are.
        batch_size: rows of all batches but the last one of an epoch.
    """

    share: Share
    batch_size: int

    @functools.cached_property
    def count(self) -> int:
        """How many are read of each batch but the last.

        At least one, so that there is something to make a batch of, and as many as the
        last one can have.
        """
        sizes = (self.share.bounds(total) for total in range(self.batch_size + 1))
        return max(1, *(end - first for first, end in sizes))

    def __call__(self, numbers: tf.Tensor, records: Any) -> tuple[tf.Tensor, Any, Any]:
        """Takes the rows of raw records, before anything is made of them.

        Args:
            numbers: of the records of one batch, or of several that follow one another.
            records: with as many rows.

        Returns:
            Their numbers, the records, and what `say` has to know of each.
        """
        places = tf.range(tf.size(numbers, tf.int64))
        size = tf.constant(self.batch_size, tf.int64)
        batch, place = places // size, places % size
        rest = tf.size(numbers, tf.int64) % size
        is_whole = places < tf.size(numbers, tf.int64) - rest
        total = tf.where(is_whole, size, rest)
        bounds = zip(
            self.share.bounds(self.batch_size), self.share.bounds(rest), strict=True
        )
        first, end = (
            tf.where(is_whole, tf.constant(whole, tf.int64), last)
            for whole, last in bounds
        )
        # All batches but the last have to have as many, so some may be read in vain.
        count = tf.constant(self.count, tf.int64)
        count = tf.where(is_whole, count, tf.maximum(end - first, 1))
        begin = tf.minimum(first, total - count)
        mine = (place >= begin) & (place < begin + count)
        mark = tf.math.segment_sum(_hashed(numbers, place), batch) % _PRIME
        beside = first, total, tf.gather(mark, batch), first - begin, end - first
        beside = tf.boolean_mask(tf.stack(beside, axis=1), mine)
        mine = tf.where(mine)[:, 0]
        records = tf.nest.map_structure(lambda each: tf.gather(each, mine), records)
        return tf.gather(numbers, mine), records, beside

    def say(self, *batch: Any) -> Any:
        """Says in a batch which rows it has.

        Args:
            batch: x, targets, weights if there are some, and what a call gives of each.
        """
        *batch, beside = batch
        about = beside[0]
        begin, end = about[_BEGIN], about[_BEGIN] + about[_COUNT]
        x, *others = tf.nest.map_structure(lambda each: each[begin:end], batch)
        about = about[_FIRST], about[_TOTAL], about[_MARK]
        return self.share.of_batch(x, *about), *others

    def of_whole(self, *batch: Any) -> Any:
        """Takes the rows of a batch that is made already."""
        numbers = tf.cast(tf.reshape(tf.nest.flatten(batch)[0], [-1]), tf.int64)
        mark = tf.reduce_sum(_hashed(numbers, tf.range(tf.size(numbers, tf.int64))))
        total = tf.shape(batch[1])[0]
        first, end = self.share.bounds(total)
        x, *others = tf.nest.map_structure(lambda each: each[first:end], batch)
        return self.share.of_batch(x, first, total, mark % _PRIME), *others


def _hashed(numbers: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Numbers that tell what is at which place, scattered also for small ones."""
    mixed = (numbers % _PRIME + numbers // _PRIME + places % _PRIME * _FACTOR) % _PRIME
    return mixed * mixed % _PRIME * mixed % _PRIME
