"""Several outputs: which digit is it, and how much ink is on the paper?

    towers train --model=examples/several_outputs.py --monitor=val_digit_accuracy

Each output has a loss and metrics of its own, by its name. As the loss is the file's,
the command needs no --task.
"""

import keras
from sklearn.datasets import load_digits

loss = {
    "digit": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "ink": "mse",
}
metrics = {"digit": ["accuracy"], "ink": ["mae"]}


def build(input_shape):
    """One body and two heads."""
    inputs = keras.Input(input_shape)
    x = keras.layers.Flatten()(inputs)
    x = keras.layers.Dense(64, activation="relu")(x)
    return keras.Model(
        inputs,
        {
            "digit": keras.layers.Dense(10, name="digit")(x),
            "ink": keras.layers.Dense(1, name="ink")(x),
        },
    )


def callbacks():
    """Stops where nothing has improved for three epochs."""
    return [keras.callbacks.EarlyStopping("val_loss", patience=3)]


def _data(part):
    digits = load_digits()
    x = (digits.images[part, ..., None] / 16).astype("float32")
    ink = x.mean(axis=(1, 2))
    return x, {"digit": digits.target[part], "ink": ink}


def train_data():
    """The first 1,500 digits."""
    return _data(slice(1500))


def eval_data():
    """The other 297."""
    return _data(slice(1500, None))
