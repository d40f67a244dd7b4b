"""The tf.data stages between a source and the training loop.

One pass over the dataset is one epoch. Repeating, splitting a batch over the towers
and copying it to the devices are left to whoever iterates.
"""

import itertools

import numpy as np
import tensorflow as tf

from input_pipeline import augment
from input_pipeline.sources import Source


def make_dataset(
    source: Source,
    split: str,
    *,
    batch_size: int,
    image_shape: tuple[int, int, int],
    training: bool,
    seed: int = 0,
    deterministic: bool = True,
    shuffle_buffer: int = 10_000,
    start_epoch: int = 0,
) -> tf.data.Dataset:
    """Builds the input pipeline of one split.

    Each iteration over a training dataset is the next epoch and has an order of its
    own, which depends only on ``seed`` and the epoch's number (and, with
    ``deterministic=False``, on which thread was faster). An iteration counts as an
    epoch as soon as its first batch is asked for.

    Args:
        source: where the records are.
        split: one of ``source.splits``.
        batch_size: examples in a batch; the last batch of an epoch may be shorter.
        image_shape: (H, W, C) of the images wanted; 1 and 3 channels convert.
        training: True shuffles; False reads in one fixed order.
        seed: of the order; at least 0. ``tf.random.set_seed`` has no influence.
        deterministic: True gives the same order for the same seed; False may hand
            out batches in the order in which they become ready.
        shuffle_buffer: records (still encoded) to draw the next record from.
        start_epoch: number of the first iteration, so that a run resumed at epoch e
            gets epoch e's order.

    Returns:
        A dataset of (float32 images [B, H, W, C] in [-1, 1], int64 labels [B]), with
        a known cardinality where the source knows its size.

    Raises:
        ValueError: no such split, a number too small, or channels that do not convert.
    """
    if split not in source.splits:
        raise ValueError(
            f"{source.name} has no split {split!r}, only "
            f"{', '.join(source.splits) or 'none yet: call prepare() first'}"
        )
    _check_at_least("batch_size", batch_size, 1)
    _check_at_least("shuffle_buffer", shuffle_buffer, 1)
    _check_at_least("seed", seed, 0)
    _check_at_least("start_epoch", start_epoch, 0)
    height, width, channels = image_shape
    size = source.splits[split]

    @tf.autograph.experimental.do_not_convert
    def example(record):
        image, label = source.decode(record)
        _check_label(label, source.num_classes)
        image = augment.convert_channels(image, channels)
        image = augment.resize(image, height, width)
        return augment.normalize(image), label

    # Files are interleaved so that a batch mixes them and reading overlaps; records
    # are shuffled before decoding, since a buffer of encoded ones is far smaller.
    if training:
        buffer = min(shuffle_buffer, size or shuffle_buffer)
        dataset = _shuffled_epochs(source, split, buffer, seed, start_epoch)
    else:
        dataset = source.records(split)
    # Neither interleave nor flat_map knows its length; progress bars want it.
    if size is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(size))
    # Decoding is the costly stage: on all cores.
    dataset = dataset.map(example, num_parallel_calls=tf.data.AUTOTUNE)
    # The short last batch stays: every example is seen once in an epoch.
    dataset = dataset.batch(batch_size, num_parallel_calls=tf.data.AUTOTUNE)
    # The next batches are made while the devices compute.
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.deterministic = deterministic
    return dataset.with_options(options)


def _shuffled_epochs(
    source: Source, split: str, buffer: int, seed: int, start_epoch: int
) -> tf.data.Dataset:
    """A dataset of raw records that is in the next epoch's order at each iteration.

    tf.data's own ``reshuffle_each_iteration`` always begins at epoch 0, so a resumed
    run would see epoch 0's order again; here Python counts the epochs.
    """
    epochs = itertools.count(start_epoch)

    def next_seeds() -> np.ndarray:
        # Hashed, so that (seed 0, epoch 1) and (seed 1, epoch 0) have nothing in
        # common, and neither have the orders of files and of records.
        state = np.random.SeedSequence((seed, next(epochs))).generate_state(2)
        return state.astype(np.int64)

    @tf.autograph.experimental.do_not_convert
    def epoch(_: tf.Tensor) -> tf.data.Dataset:
        # Not by `Dataset.from_generator`; ARCHITECTURE.md says why.
        seeds = tf.numpy_function(next_seeds, [], tf.int64)
        # Sets the seed of this function's graph alone: the program's global seed
        # would otherwise be mixed into both orders (and 0 with a tensor seed fails).
        tf.random.set_seed(1)
        files_seed, records_seed = tf.unstack(seeds, num=2)
        records = source.records(split, shuffle_seed=files_seed)
        return records.shuffle(
            buffer, seed=records_seed, reshuffle_each_iteration=False
        )

    return tf.data.Dataset.from_tensors(0).flat_map(epoch)


def _check_label(label: tf.Tensor, num_classes: int) -> None:
    """Fails at run time on any device.

    On a GPU, a label out of range would silently give a loss of NaN or 0.
    """
    tf.debugging.Assert(
        (label >= 0) & (label < num_classes),
        [f"label outside 0..{num_classes - 1}:", label],
    )


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}, expected at least {least}")
