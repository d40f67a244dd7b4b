"""Cases in float64, which keep all digits, however uneven the towers' parts are."""

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops, regularizers

from tests.exact.case import Case
from tests.exact.cases import AddLoss

GROUP = "float64"
# Of three towers: parts of 3, 2 and 2 examples, and of 1, 1 and none.
SIZES = 7, 8, 5, 2
ROWS = sum(SIZES)
# The last digit of a number of 64 bits, and what a few steps make of it.
LIMIT = 1e-14
# On replicas, Keras subtracts a mean's square from that of squares.
SYNCHRONIZED_LIMIT = 1e-13
FEATURES = 6


def _dense(*more):
    inputs = keras.Input((FEATURES,))
    x = layers.Dense(8, "tanh")(inputs)
    for layer in more:
        x = layer(x)
    return keras.Model(inputs, layers.Dense(3)(x))


class OwnStep(keras.Model):
    """Has two losses, the one a mean and the other a ratio of sums."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, "tanh")
        self.last = layers.Dense(3)
        self.tracker = keras.metrics.Mean(name="own")

    def call(self, x):
        return self.last(self.hidden(x))

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            squares = ops.mean(ops.square(self(x, training=True) - y), axis=-1)
            loss = ops.mean(squares)
            if weights is not None:
                loss += ops.sum(weights * squares) / ops.sum(weights)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"own": self.tracker.result()}


def _embedded():
    inputs = keras.Input((FEATURES,), dtype="int64")
    return inputs, layers.Embedding(9, 4, mask_zero=True)(inputs)


def _last_state():
    inputs, x = _embedded()
    return keras.Model(inputs, layers.Dense(3)(layers.LSTM(5)(x)))


def _of_tokens():
    inputs, x = _embedded()
    return keras.Model(inputs, layers.Dense(1)(layers.GRU(5, return_sequences=True)(x)))


def _ratio(y, outputs):
    return ops.sum(ops.abs(y - outputs)) / ops.sum(ops.abs(outputs))


def _frozen():
    model = _dense(layers.BatchNormalization(trainable=False))
    model.layers[1].trainable = False
    return model


def _regularized():
    penalty = regularizers.L2(0.01)
    added = AddLoss(lambda x: 0.1 * ops.mean(ops.square(x)))
    return _dense(layers.Dense(4, kernel_regularizer=penalty), added)


def _images():
    inputs = keras.Input((FEATURES, FEATURES, 2))
    x = layers.Conv2D(3, 3)(inputs)
    x = layers.GlobalAveragePooling2D()(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Dense(3)(x))


def _batches(inputs, weighted, of_tokens=False):
    """Batches of normal targets; of tokens, with a target and a weight for each."""
    random = np.random.default_rng(3)
    x = inputs(random)
    arrays = [x, random.normal(size=(ROWS, 3))]
    if weighted:
        arrays.append(random.uniform(0.5, 2, ROWS))
    if of_tokens:
        # Keras takes no weight of a row beside a mask.
        arrays[1] = np.tile(arrays[1][..., None], (1, 2, 1))
        arrays[2:] = [np.tile(a[:, None], (1, FEATURES)) for a in arrays[2:]]
    ends = np.cumsum(SIZES)
    return [
        tuple(a[end - n : end] for a in arrays)
        for n, end in zip(SIZES, ends, strict=True)
    ]


def _numbers(random):
    return random.normal(size=(ROWS, FEATURES))


def _ids(random):
    return random.integers(0, 9, (ROWS, FEATURES))


def _pictures(random):
    return random.normal(size=(ROWS, FEATURES, FEATURES, 2))


def _adam():
    return keras.optimizers.Adam(epsilon=1e-3)


def _accumulating():
    return keras.optimizers.SGD(gradient_accumulation_steps=2)


def _case(
    name, make=_dense, inputs=_numbers, loss=lambda: "mse", optimizer=_adam, **fields
):
    """A case without weights, and one with them."""
    metrics = fields.pop("metrics", {})
    fields = {"within": LIMIT, "later": ("evaluate",)} | fields
    for weighted in (False, True):
        yield Case(
            GROUP,
            f"{name}, weights" if weighted else name,
            make,
            functools.partial(_batches, inputs, weighted, make is _of_tokens),
            optimizer=optimizer,
            # A loss has the type that is Keras's as it is made.
            compile=lambda: {"loss": loss(), **metrics},
            policy="float64",
            **fields,
        )


def _cases():
    yield from _case("mean")
    yield from _case("sum", loss=lambda: losses.MeanSquaredError("sum"))
    yield from _case(
        "weighted mean",
        loss=lambda: losses.MeanAbsoluteError("mean_with_sample_weight"),
    )
    metrics = {"metrics": ["mae", "cosine_similarity"], "weighted_metrics": ["mse"]}
    yield from _case("metrics", metrics=metrics)
    yield from _case("gathered loss", loss=lambda: _ratio)
    yield from _case("losses of layers", _regularized)
    yield from _case("frozen", _frozen)
    yield from _case(
        "BatchNormalization, synchronized",
        lambda: _dense(layers.BatchNormalization(synchronized=True)),
        within=SYNCHRONIZED_LIMIT,
    )
    yield from _case("masks", _last_state, _ids)
    yield from _case("masks of outputs", _of_tokens, _ids)
    yield from _case("accumulated", optimizer=_accumulating)
    # Towers normalise by their own parts, so one tower is compared with one device.
    yield from _case("BatchNormalization", _images, _pictures, towers=1)


CASES = [*_cases()]
OWN_STEPS = [*_case("own step", OwnStep, later=())]
