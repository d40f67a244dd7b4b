"""Regression: how far will a patient's diabetes have gone in a year?

    towers train --model=examples/regression.py --train_epochs=60

The loss and the metrics are the file's own. With --task=regression instead, they would
be the mean squared error, mae and rmse.
"""

import keras
from sklearn.datasets import load_diabetes

# Huber's loss does not let a few patients count most.
loss = keras.losses.Huber(delta=50.0)
metrics = [keras.metrics.MeanAbsoluteError(name="mae")]


def build(input_shape):
    """A network that returns one number."""
    return keras.Sequential(
        [
            keras.Input(input_shape),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(1, bias_initializer=keras.initializers.Constant(150)),
        ]
    )


def optimizer(learning_rate):
    """An optimizer of one's own, for which --learning_rate still counts."""
    return keras.optimizers.Nadam(10 * learning_rate)


def _data():
    x, y = load_diabetes(return_X_y=True)
    return (20 * x).astype("float32"), y.astype("float32")


def train_data():
    """The first 350 patients."""
    x, y = _data()
    return x[:350], y[:350]


def eval_data():
    """The other 92."""
    x, y = _data()
    return x[350:], y[350:]
