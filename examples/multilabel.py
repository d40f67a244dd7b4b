"""Multilabel classification: what is true of a handwritten digit?

    towers train --model=examples/multilabel.py --task=multilabel

Several labels may hold: it is even, it is a prime number, it has a loop. Each label is
a column of 0 and 1.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

# Of the digits 0 to 9.
_EVEN = [1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
_PRIME = [0, 0, 1, 1, 0, 1, 0, 1, 0, 0]
_LOOP = [1, 0, 0, 0, 0, 0, 1, 0, 1, 1]


def build(input_shape, num_outputs):
    """A small network of convolutions, with a value for each label."""
    return keras.Sequential(
        [
            keras.Input(input_shape),
            keras.layers.Conv2D(16, 3, activation="relu", padding="same"),
            keras.layers.Conv2D(32, 3, activation="relu", strides=2),
            keras.layers.Flatten(),
            keras.layers.Dense(num_outputs),
        ]
    )


def preprocess(x, y):
    """Runs on each tower: pictures travel as bytes, and become floats there."""
    return keras.ops.cast(x, "float32") / 8 - 1, y


def _data():
    digits = load_digits()
    labels = np.array([_EVEN, _PRIME, _LOOP], "float32").T
    return digits.images[..., None].astype("uint8"), labels[digits.target]


def train_data():
    """The first 1,500 digits, as bytes from 0 to 16."""
    x, y = _data()
    return x[:1500], y[:1500]


def eval_data():
    """The other 297."""
    x, y = _data()
    return x[1500:], y[1500:]
