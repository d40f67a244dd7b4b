"""Classification: which of three wines is it, by 13 numbers of its chemistry?

    towers train --model=examples/classification.py --task=classification

The model returns a value for each class, and labels are their numbers.
"""

import keras
import numpy as np
from sklearn.datasets import load_wine


def build(input_shape, num_outputs):
    """A network with one hidden layer; arrays tell how many classes there are."""
    return keras.Sequential(
        [
            keras.Input(input_shape),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(num_outputs),
        ]
    )


def _data():
    x, y = load_wine(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    # All columns of about the same size, or training takes longer.
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    return x[order].astype("float32"), y[order]


def train_data():
    """The first 140 wines, as arrays: --batch_size makes batches of them."""
    x, y = _data()
    return x[:140], y[:140]


def eval_data():
    """The other 38."""
    x, y = _data()
    return x[140:], y[140:]
