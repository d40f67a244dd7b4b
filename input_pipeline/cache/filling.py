"""The stages by which examples come into memory."""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from towers.input_pipeline.cache.store import Store
from towers.input_pipeline.pipeline.stages import Stages


@dataclasses.dataclass(frozen=True)
class Filling(Stages):
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

        def with_seed(rows, records, *beside):
            # Nothing is drawn.
            return tf.constant(0, tf.int64), rows, records, rows, *beside

        return self.behind(batches.map(with_seed))[-1][1]

    def _one(self) -> Callable:
        decode = super()._one() if self.decodes else self._load

        @tf.autograph.experimental.do_not_convert
        def one(image, u, label, row, *beside):
            def new():
                x, _, y = decode(image, u, label)
                return self.store.as_kept(x, y)

            x, y = tf.cond(self.store.is_filled(row), lambda: self.store.at(row), new)
            return x, u, y, row, *beside

        return one

    def _many(self) -> Callable:
        finish = super()._many() if self.decodes else None

        @tf.autograph.experimental.do_not_convert
        def put(images, u, labels, rows, *beside):
            if finish is not None:
                images, labels, *_ = finish(images, u, labels)
            rows = self.store.put(rows, images, labels)
            return rows, rows, *beside

        return put
