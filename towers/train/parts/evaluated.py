"""How much is evaluated, and data that end after their first batches."""

import math

import keras
import tensorflow as tf

from towers.train.settings import Settings

MOST_TRAINING_EXAMPLES = 10_000
"""Without validation data, no more of the training data than that is evaluated."""


def most_batches(
    settings: Settings, examples: int | None, has_held_out: bool
) -> int | None:
    """Returns how many batches are evaluated at most; `None` if all are.

    Args:
        settings: --eval_steps counts, if it is given.
        examples: How many there are to train on, if that is known.
        has_held_out: Whether there is validation data, of which all is evaluated.
    """
    if settings.eval_steps is not None or has_held_out:
        return settings.eval_steps
    if examples is not None and examples <= MOST_TRAINING_EXAMPLES:
        return None
    return math.ceil(MOST_TRAINING_EXAMPLES / settings.batch_size)


def first(
    data: tf.data.Dataset | keras.utils.PyDataset, batches: int | None
) -> tf.data.Dataset | keras.utils.PyDataset:
    """Returns data that end after as many batches; `None` leaves them as they are."""
    if batches is None:
        return data
    if isinstance(data, keras.utils.PyDataset):
        return _FirstBatches(data, batches)
    return data.take(batches)


class _FirstBatches(keras.utils.PyDataset):
    """The first batches of another one."""

    def __init__(self, data: keras.utils.PyDataset, batches: int):
        super().__init__(
            workers=data.workers,
            use_multiprocessing=data.use_multiprocessing,
            max_queue_size=data.max_queue_size,
        )
        self._data, self._batches = data, batches

    @property
    def num_batches(self):
        known = self._data.num_batches
        return self._batches if known is None else min(known, self._batches)

    def __getitem__(self, index):
        return self._data[index]

    def on_epoch_begin(self):
        self._data.on_epoch_begin()

    def on_epoch_end(self):
        self._data.on_epoch_end()
