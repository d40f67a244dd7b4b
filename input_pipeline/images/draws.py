"""Draws random numbers that depend only on (seed, epoch, record).

A counter-based generator: a hash of the record's number is the random number. So a
record's augmentation is the same in every batch, thread, tower or resumed run, and a
whole batch draws at once.
"""

import numpy as np
import tensorflow as tf

# 2^64 over the golden ratio: its multiples are spread evenly.
_GOLDEN = 0x9E3779B97F4A7C15


def epoch_seeds(seed: int, epoch: int) -> np.ndarray:
    """Makes the seeds of one epoch.

    They are hashed, so that (seed 0, epoch 1) and (seed 1, epoch 0) have nothing in
    common, and neither have orders and augmentation.

    Args:
        seed: The seed of the run, at least 0.
        epoch: The number of the epoch, at least 0.

    Returns:
        Int64 [3]: two for the order, one for the augmentation.
    """
    words = np.random.SeedSequence((seed, epoch)).generate_state(3, np.uint64)
    # tf.data accepts no negative ones.
    return (words >> np.uint64(1)).astype(np.int64)


def uniform(seed: tf.Tensor, records: tf.Tensor, count: int) -> tf.Tensor:
    """Draws numbers for each record.

    The hash is the finalizer of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable
    pseudorandom number generators"), applied to the record and then to the draw.

    Args:
        seed: Int64 scalar.
        records: Int64 [...], the numbers of records.
        count: How many numbers each record gets.

    Returns:
        Float32 [..., count], uniform in [0, 1).
    """
    base = tf.bitcast(records, tf.uint64) * _uint64(_GOLDEN)
    state = _mix(base + tf.bitcast(seed, tf.uint64))
    # An array, as a graph would convert a list by way of doubles.
    steps = np.array([_GOLDEN * (draw + 1) % 2**64 for draw in range(count)], np.uint64)
    hashed = _mix(state[..., None] + tf.constant(steps))
    # As many bits as a float32 holds.
    return tf.cast(tf.bitwise.right_shift(hashed, _uint64(40)), tf.float32) * 2.0**-24


def _mix(z: tf.Tensor) -> tf.Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = _xor_shift(z, shift) * _uint64(factor)
    return _xor_shift(z, 31)


def _xor_shift(z: tf.Tensor, shift: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(z, tf.bitwise.right_shift(z, _uint64(shift)))


def _uint64(value: int) -> tf.Tensor:
    return tf.constant(np.uint64(value))
