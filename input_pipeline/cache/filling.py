"""The stages by which examples come into memory."""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from towers.input_pipeline.cache.store import Store
from towers.input_pipeline.pipeline.stages import RecordStages


@dataclasses.dataclass(frozen=True)
class Filling(RecordStages):
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
