"""One pass over a dataset is one epoch, with seeds of its own.

Python counts epochs, because tf.data's reshuffling begins at epoch 0 in each run. The
next epoch begins while the last is read. Nothing uses `Dataset.from_generator`: it
fixes malloc's threshold for the whole process, and a small model's step becomes 8%
slower.
"""

import itertools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from towers.input_pipeline.images import draws
from towers.program.python_calls import until_exit


def in_turn(
    build: Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset],
    *,
    seed: int,
    start_epoch: int,
    start_record: int,
    training: bool,
    repeat: bool,
    alone: bool = False,
) -> tf.data.Dataset:
    """A dataset that is the next epoch at each iteration.

    tf.data's own ``reshuffle_each_iteration`` always begins at epoch 0, so a resumed
    run would see epoch 0's order again; here Python counts the epochs.

    Args:
        build: makes an epoch's dataset of its seeds (int64 [4]: two of the order, one
            of the augmentation, the epoch's number) and of the record to start at.
        seed: of all epochs.
        start_epoch: number of the first one.
        start_record: records that the first one passes over.
        training: False gives epoch 0 each time.
        repeat: whether an iteration goes on with the next epoch, without a gap.
        alone: whether one begins only once the one before has been read to its end.
    """
    epochs = itertools.count(start_epoch)

    @until_exit
    def next_epoch():
        epoch = next(epochs) if training else 0
        start = start_record if epoch == start_epoch else 0
        seeds = [*draws.epoch_seeds(seed, epoch), epoch]
        return np.array(seeds, np.int64), np.int64(start)

    @tf.autograph.experimental.do_not_convert
    def count(_):
        # Not by `Dataset.from_generator`; see above.
        seeds, start = tf.numpy_function(next_epoch, [], [tf.int64, tf.int64])
        return tf.ensure_shape(seeds, [4]), tf.ensure_shape(start, [])

    @tf.autograph.experimental.do_not_convert
    def epoch(seeds, start):
        # The seed of this function's graph alone: the program's global seed would
        # otherwise be mixed into the order (and 0 with a tensor seed fails).
        tf.random.set_seed(1)
        return build(seeds, start)

    dataset = tf.data.Dataset.from_tensors(0)
    dataset = (dataset.repeat() if repeat else dataset).map(count)
    if alone or not repeat:
        return dataset.flat_map(epoch)
    # In parallel, it begins the next epochs while one is still read.
    return dataset.interleave(
        epoch, cycle_length=1, num_parallel_calls=1, deterministic=True
    )
