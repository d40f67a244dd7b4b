"""Examples that are kept in memory, as the first epoch reads them.

They lie in variables of TensorFlow, a row for each record, which take memory only where
they are written. Orders are drawn of rows, so they do not depend on what is there. Only
the first epoch of a stream has the stream's order.
"""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.cache.filling import Filling
from towers.input_pipeline.cache.store import Store, constant
from towers.input_pipeline.images import recipes
from towers.input_pipeline.images.decode import ALL_TRICKS
from towers.input_pipeline.records.checks import ANOTHER_COUNT
from towers.input_pipeline.sources.base import IndexedSource, Source, Take
from towers.input_pipeline.sources.files import in_python
from towers.program.progress import Progress

_AT_ONCE = 256


class KeptSource(IndexedSource):
    """A source in memory: each example is read and decoded once, when it first comes.

    Its numbers are rows in memory, those of the training examples first. Orders are
    drawn of these, whatever is in memory already. Only the first epoch of a stream has
    the stream's own order, as it is read on the way. What is missing later, as the
    first epoch was another process's, is read before the epoch begins.

    Args:
        origin: where the examples come from.
        numbers: those of the records of each split, in the order of rows.
        image_shape: to which images are decoded; None keeps them encoded.
        note: see ``Source``.
    """

    # Workers of a service have no part in the memory.
    in_graph = False
    # Otherwise the next epoch would read what this one is about to.
    epochs_alone = True

    def __init__(
        self,
        origin: Source,
        numbers: Mapping[str, np.ndarray],
        image_shape: tuple[int, ...] | None,
        note: str = "",
    ):
        self.name, self.note = origin.name, note
        self._origin = origin
        self._take_target(origin.target)
        self.splits = {split: len(of_split) for split, of_split in numbers.items()}
        self.encoded = image_shape is None
        self.image_shape = tuple(image_shape or origin.image_shape)
        self._store = Store(origin, image_shape, sum(self.splits.values()))
        self.has_buffer = origin.has_buffer
        if not isinstance(origin, IndexedSource):
            self._known = {
                split: self._sort(split, numbers[split]) for split in numbers
            }
        else:
            self._numbers = constant(np.concatenate([*numbers.values()]))
        self._lock = threading.Lock()

    def _sort(self, split, numbers):
        """Sorted numbers of a stream's records, and the row of each."""
        order = np.argsort(numbers)
        return constant(numbers[order]), constant(self._first(split) + order)

    @property
    def origin(self) -> Source:
        """See ``Source.origin``."""
        return self._origin

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
        """See ``Source.batches``: of rows, which are in memory when they come."""
        order = {"seeds": seeds, "start": start, "take": take}
        kept = super().batches(split, batch_size, **order)
        count = batch_size if take is None else take.count
        if isinstance(self.origin, IndexedSource):
            numbers = self._by_number(kept, split, seeds, batch_size)
            read = self._filled(numbers, count)
        else:
            stream = self.origin.batches(
                split, batch_size, buffer_mb=buffer_mb, **order
            )
            read = self._filled(self._with_rows(stream, split), count)
            if seeds is not None:
                whole = tf.data.Dataset.from_tensors(0)
                whole = whole.map(lambda _: self._fill_in_graph(split))
                whole = whole.flat_map(lambda _: kept)
                return _either(tf.equal(epoch, 0), read, whole)
        return _either(self._is_full(split), kept, read)

    def parse(self, records: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """See ``Source.parse``; encoded images stay rows until `load`."""
        good = tf.reduce_all(self._store.is_filled(records))
        check = tf.debugging.Assert(good, [f"{ANOTHER_COUNT} more records"])
        with tf.control_dependencies([check]):
            records = tf.identity(records)
        x = records if self.encoded else self._store.x(records)
        return x, self._store.y(records)

    def load(self, image: tf.Tensor) -> tf.Tensor:
        """See ``Source.load``: copied just before it is decoded, which is faster."""
        return self._store.x(image)

    def fill(self, split: str) -> None:
        """Reads all of a stream's split that is not in memory yet.

        Raises:
            tf.errors.OpError: a record is bad; see ``find_bad_record``.
        """
        with self._lock, tf.device("/CPU:0"):
            if self._is_full(split):
                return
            batches = self.origin.batches(split, _AT_ONCE)
            rows = self._filled(self._with_rows(batches, split), _AT_ONCE)
            what = f"Reading {self.name} into memory"
            with Progress(what, self.splits[split], "examples") as progress:
                for some, *_ in rows.prefetch(1):
                    progress.add(len(some))

    def _fill_in_graph(self, split: str) -> tf.Tensor:
        def fill():
            try:
                self.fill(split)
            except tf.errors.OpError as error:
                raise ValueError(error.message) from error
            return [np.int64(0)]

        return in_python.call(fill, [], [tf.int64])[0]

    def _is_full(self, split: str) -> tf.Tensor:
        rows = tf.range(self._first(split), self._first(split) + self.splits[split])
        return tf.reduce_all(self._store.is_filled(rows))

    def _by_number(self, rows, split, seeds, batch_size):
        """Of batches of rows, makes what the origin has there: (rows, numbers, ...)."""

        def number(rows, _, *beside):
            return tf.gather(self._numbers, rows), rows, *beside

        def turn(numbers, rows, *beside):
            return rows, numbers, *beside

        numbered = rows.map(number)
        return self.origin.announced(numbered, split, seeds, batch_size).map(turn)

    def _with_rows(self, batches, split):
        """Of an origin's (numbers, records, ...), makes (rows, records, ...)."""

        def rows_of(numbers, records, *beside):
            known, rows = map(tf.convert_to_tensor, self._known[split])
            places = tf.minimum(tf.searchsorted(known, numbers), known.shape[0] - 1)
            all_known = tf.reduce_all(tf.gather(known, places) == numbers)
            check = tf.debugging.Assert(all_known, [f"{ANOTHER_COUNT} others"])
            with tf.control_dependencies([check]):
                places = tf.identity(places)
            return tf.gather(rows, places), records, *beside

        return batches.map(rows_of)

    def _filled(self, batches, count):
        """Batches of rows that are in memory, of (rows, records, ...)."""
        decodes = not self.encoded
        # Where images stay encoded, what is done to pixels does not matter.
        size = self.image_shape[:2] if decodes else (1, 1)
        filling = Filling(
            *(self.origin, count, self.image_shape),
            recipes.find("none", False, size, None),
            ALL_TRICKS,
            exact=True,
            store=self._store,
            decodes=decodes,
        )
        return filling.of(batches)


def _either(
    condition: tf.Tensor, first: tf.data.Dataset, second: tf.data.Dataset
) -> tf.data.Dataset:
    """One of two datasets; nothing is read of the other one."""
    all_of_first = tf.where(condition, tf.constant(-1, tf.int64), 0)
    return first.take(all_of_first).concatenate(second.take(-1 - all_of_first))
