"""Keeps examples in memory, as the first epoch reads them.

They are in variables of TensorFlow, a row for each record, which take memory only where
they are written. Orders are drawn over rows, so they do not depend on which rows are
filled. Only the first epoch of a stream has the stream's order.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.cache.store import Store, constant
from towers.input_pipeline.images import recipes
from towers.input_pipeline.images.decode import ALL_TRICKS
from towers.input_pipeline.pipeline.stages import RecordStages
from towers.input_pipeline.records.checks import ANOTHER_COUNT
from towers.input_pipeline.sources.base import IndexedSource, Source, Take
from towers.input_pipeline.sources.files import in_python
from towers.program.progress import Progress

_AT_ONCE = 256


class KeptSource(IndexedSource):
    """A source in memory: reads and decodes each example once, when it first comes.

    Its numbers are rows in memory, training examples first. Orders are drawn over
    these, whatever is in memory already. Only the first epoch of a stream has the
    stream's own order, as it reads the stream. If rows are missing later, because
    another process has run the first epoch, they are read before the epoch begins.

    Args:
        origin: the source of the examples.
        numbers: the numbers of the records of each split, in the order of rows.
        image_shape: the shape of decoded images; None keeps them encoded.
        note: see ``Source``.
    """

    # Workers of a service cannot see the memory.
    in_graph = False
    # Otherwise the next epoch would read rows that this one is about to read.
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
        """Returns sorted numbers of a stream's records, and the row of each."""
        order = np.argsort(numbers)
        return constant(numbers[order]), constant(self._first(split) + order)

    @property
    def origin(self) -> Source:
        """The source of the examples; see ``Source.origin``."""
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
        """Returns batches of rows, which are then in memory; see ``Source.batches``."""
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
        """Takes examples from memory; encoded images stay rows until `load`."""
        good = tf.reduce_all(self._store.is_filled(records))
        check = tf.debugging.Assert(good, [f"{ANOTHER_COUNT} more records"])
        with tf.control_dependencies([check]):
            records = tf.identity(records)
        x = records if self.encoded else self._store.x(records)
        return x, self._store.y(records)

    def load(self, image: tf.Tensor) -> tf.Tensor:
        """Copies an encoded image just before it is decoded, which is faster."""
        return self._store.x(image)

    def fill(self, split: str) -> None:
        """Reads the rows of a stream's split that are not in memory yet.

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
        """Converts batches of rows to the origin's records: (rows, numbers, ...)."""

        def number(rows, _, *beside):
            return tf.gather(self._numbers, rows), rows, *beside

        def turn(numbers, rows, *beside):
            return rows, numbers, *beside

        numbered = rows.map(number)
        return self.origin.announced(numbered, split, seeds, batch_size).map(turn)

    def _with_rows(self, batches, split):
        """Converts an origin's (numbers, records, ...) to (rows, records, ...)."""

        def rows_of(numbers, records, *beside):
            known, rows = map(tf.convert_to_tensor, self._known[split])
            positions = tf.minimum(tf.searchsorted(known, numbers), known.shape[0] - 1)
            all_known = tf.reduce_all(tf.gather(known, positions) == numbers)
            check = tf.debugging.Assert(all_known, [f"{ANOTHER_COUNT} others"])
            with tf.control_dependencies([check]):
                positions = tf.identity(positions)
            return tf.gather(rows, positions), records, *beside

        return batches.map(rows_of)

    def _filled(self, batches, count):
        """Returns batches of rows that are in memory, from (rows, records, ...)."""
        decodes = not self.encoded
        # If images stay encoded, the operations on pixels do not matter.
        size = self.image_shape[:2] if decodes else (1, 1)
        filling = _Filling(
            *(self.origin, count, self.image_shape),
            recipes.find("none", False, size, None),
            ALL_TRICKS,
            exact=True,
            store=self._store,
            decodes=decodes,
        )
        return filling.of(batches)


@dataclasses.dataclass(frozen=True)
class _Filling(RecordStages):
    """Puts the examples of batches into a store, and hands on their rows.

    Attributes:
        store: where the rows are. What is there is not decoded again.
        decodes: whether pixels are kept, else encoded images.
    """

    _: dataclasses.KW_ONLY
    store: Store
    decodes: bool

    def of(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Batches of rows that are in the store, and of what stood beside them.

        Args:
            batches: of rows, raw records, and anything else.
        """

        @tf.autograph.experimental.do_not_convert
        def with_seed(rows, records, *beside):
            # Asked by the batch: to start an operation for each image takes longer.
            is_there = self.store.is_filled(rows)
            # Nothing is drawn.
            seed = tf.constant(0, tf.int64)
            return seed, rows, records, rows, is_there, *beside

        return self.behind(batches.map(with_seed))[-1][1]

    def _one(self) -> Callable:
        if self.decodes:
            decode = super()._one()
        else:
            # What lies far away is loaded by a stage of its own.
            decode = (lambda *parts: parts) if self.source.is_far else self._load

        @tf.autograph.experimental.do_not_convert
        def one(image, u, label, row, is_there, *beside):
            def new():
                x, _, y = decode(image, u, label)
                return self.store.as_kept(x, y)

            x, y = tf.cond(is_there, self.store.nothing, new)
            return x, u, y, row, is_there, *beside

        return one

    def _many(self) -> Callable:
        finish = super()._many() if self.decodes else None

        @tf.autograph.experimental.do_not_convert
        def put(images, u, labels, rows, is_there, *beside):
            if finish is not None:
                images, labels, *_ = finish(images, u, labels)
            new = tf.nest.map_structure(
                lambda part: tf.boolean_mask(part, ~is_there), (rows, images, labels)
            )
            with tf.control_dependencies([self.store.put(*new)]):
                rows = tf.identity(rows)
            return rows, rows, *beside

        return put


def _either(
    condition: tf.Tensor, first: tf.data.Dataset, second: tf.data.Dataset
) -> tf.data.Dataset:
    """Returns one of two datasets; nothing is read of the other one."""
    all_of_first = tf.where(condition, tf.constant(-1, tf.int64), 0)
    return first.take(all_of_first).concatenate(second.take(-1 - all_of_first))
