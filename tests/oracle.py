"""The independent oracle: one device, plain Keras, none of our code."""

import keras
import numpy as np
import tensorflow as tf


def train(model, optimizer, loss, batches):
    """Trains on batches of (x, y) or (x, y, sample_weight), one step each.

    Returns the loss of each step.
    """
    losses = []
    for batch in batches:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True), sample_weight=sample_weight)
            total = tf.add_n([value, *model.losses])
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(total, variables), variables)
        losses.append(float(total))
    return losses


def batches(size, *arrays, epochs=1):
    """Cuts arrays into batches of `size`, the last of an epoch short, in order."""
    rows = len(arrays[0])
    return [
        tuple(array[start : start + size] for array in arrays)
        for _ in range(epochs)
        for start in range(0, rows, size)
    ]


def largest_difference(ours, theirs):
    """The largest difference of two lists of arrays, relative to each array's size."""
    return max(
        np.max(np.abs(np.asarray(a) - np.asarray(b)))
        / max(np.max(np.abs(np.asarray(b))), 1e-30)
        for a, b in zip(ours, theirs, strict=True)
    )
