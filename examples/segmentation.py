"""Segmentation: which pixels are ink, and is it the ink of an even or an odd digit?

    towers train --model=examples/segmentation.py --task=segmentation --train_epochs=10

A mask has a class for each pixel: 0 is paper, 1 ink of an even digit, 2 of an odd one.
The model returns values of shape (height, width, classes).
"""

import keras
import numpy as np
from sklearn.datasets import load_digits


def build(input_shape, num_outputs):
    """A tiny U-Net: fine pixels, and what a coarse look at the whole tells of them."""
    inputs = keras.Input(input_shape)
    fine = _conv(inputs, 16)
    coarse = _conv(keras.layers.MaxPooling2D()(fine), 32)
    coarse = _conv(keras.layers.MaxPooling2D()(coarse), 64)
    coarse = keras.layers.UpSampling2D(4)(coarse)
    both = _conv(keras.layers.Concatenate()([fine, coarse]), 16)
    return keras.Model(inputs, keras.layers.Conv2D(num_outputs, 1)(both))


def _conv(x, filters):
    return keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)


def _data():
    digits = load_digits()
    odd = (digits.target % 2)[:, None, None]
    masks = np.where(digits.images > 6, 1 + odd, 0)
    return (digits.images[..., None] / 8 - 1).astype("float32"), masks


def train_data():
    """The first 1,500 digits and their masks."""
    x, y = _data()
    return x[:1500], y[:1500]


def eval_data():
    """The other 297."""
    x, y = _data()
    return x[1500:], y[1500:]
