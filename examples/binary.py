"""Binary classification: is a tumour benign?

    towers train --model=examples/binary.py --task=binary --monitor=val_auc

The model returns one value: how likely the second class is. Labels are 0 and 1.
"""

import keras
from sklearn.datasets import load_breast_cancer


def build(input_shape, num_outputs):
    """Logistic regression; num_outputs is 1."""
    return keras.Sequential(
        [
            keras.Input(input_shape),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(num_outputs, activation="sigmoid"),
        ]
    )


def _data():
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x[:450].mean(axis=0)) / x[:450].std(axis=0)
    return x.astype("float32"), y


def train_data():
    """450 tumours, and weights: of those that are not benign, there are fewer."""
    x, y = _data()
    weights = 1.0 + (y == 0) * 0.5
    return x[:450], y[:450], weights[:450].astype("float32")


def eval_data():
    """The other 119."""
    x, y = _data()
    return x[450:], y[450:]
