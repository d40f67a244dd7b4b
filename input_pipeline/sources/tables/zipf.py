"""``zipf:NUMBERS:TABLESxROWS[:COUNT]``: synthetic clicks to recommend by; no files.

As in real logs of clicks, few ids are frequent: the id k of a table comes up about as
often as 1 / (k + 1).
"""

import math
from typing import Any

import tensorflow as tf

from towers.input_pipeline.images import draws
from towers.input_pipeline.sources.base import IndexedSource
from towers.input_pipeline.specs import read_zipf

_DEFAULT_COUNT = 2**16
_TEST_FRACTION = 4  # training examples for each test example
# The first streams of effects and weights, far from those of examples.
_EFFECTS, _WEIGHTS = 2**40, 2**41
# The clarity of labels: the approximate standard deviation of their logits.
_CLEAR = 3.0


def open_zipf(rest: str, seed: int) -> "ZipfSource":
    """Parses a spec after ``zipf:``.

    Raises:
        ValueError: it has another form.
    """
    numbers, tables, rows, count = read_zipf(rest)
    return ZipfSource(numbers, tables, rows, count or _DEFAULT_COUNT, seed)


class ZipfSource(IndexedSource):
    """Columns: numbers in "dense", ids in "table_0" and so on; the label is 0 or 1.

    A hidden logistic model draws the label: each number has a weight, and each id has
    an effect. An example depends only on the seed and its index.

    Args:
        numbers: count of numbers in each example; 0 for none.
        tables: count of columns of ids.
        rows: count of different ids in each.
        count: number of training examples; a quarter as many are held out.
        seed: the seed of all draws.
    """

    encoded = False
    num_classes = 2

    def __init__(
        self,
        numbers: int,
        tables: int,
        rows: int,
        count: int = _DEFAULT_COUNT,
        seed: int = 0,
    ):
        self.name = f"zipf:{numbers}:{tables}x{rows}:{count}"
        self.table_sizes = {f"table_{i}": rows for i in range(tables)}
        self.image_shape = (numbers,)
        self.image_fields = tuple(f"number_{i}" for i in range(numbers))
        sizes = {"train": count, "test": count // _TEST_FRACTION}
        self.splits = {split: size for split, size in sizes.items() if size}
        self._numbers, self._tables, self._rows = numbers, tables, rows
        self._seed = seed

    def parse(self, records: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """Draws examples and labels; see ``Source.parse``."""
        seed = tf.constant(self._seed, tf.int64)
        u = draws.uniform(seed, records, self._numbers + self._tables + 1)
        dense, of_ids, of_label = tf.split(u, [self._numbers, self._tables, 1], axis=1)
        dense = 2 * dense - 1
        # Uniform in the logarithm: the chance of k is log((k + 2) / (k + 1)), scaled.
        most = math.log(self._rows + 1)
        ids = tf.cast(tf.exp(tf.cast(of_ids, tf.float64) * most), tf.int64) - 1
        ids = tf.clip_by_value(ids, 0, self._rows - 1)

        weights = draws.uniform(
            seed, _WEIGHTS + tf.range(self._numbers, dtype=tf.int64), 1
        )
        tables = self._rows * tf.range(self._tables, dtype=tf.int64)
        effects = draws.uniform(seed, tf.reshape(_EFFECTS + tables + ids, [-1]), 1)
        effects = tf.reshape(2 * effects - 1, [-1, self._tables])
        logits = tf.linalg.matvec(dense, 2 * weights[:, 0] - 1)
        logits += tf.reduce_sum(effects, axis=1)
        # A sum of numbers whose squares are 1/9 or 1/3 on average.
        spread = math.sqrt(self._numbers / 9 + self._tables / 3)
        chance = tf.sigmoid(logits * (_CLEAR / spread))
        labels = tf.cast(of_label[:, 0] < chance, tf.int64)

        x: dict[str, Any] = {"dense": dense} if self._numbers else {}
        columns = zip(self.table_sizes, tf.unstack(ids, axis=1), strict=True)
        return x | dict(columns), labels
