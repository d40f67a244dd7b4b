"""Cases of whole networks, each fed and trained in some usual ways: data."""

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops, optimizers

from tests.exact import cases
from tests.exact.cases import OUTPUTS, STEPS, UNEVEN

WORDS, SIDE = 12, 6


def _pictures(n):
    return cases._random(n, SIDE, SIDE, 2), cases._labels(n)


def _numbers(n):
    return cases._random(n, cases.FEATURES), cases._random(n, OUTPUTS, seed=1)


def _sequences(n):
    numbers = cases._random(n, STEPS, cases.FEATURES)
    return numbers, cases._random(n, OUTPUTS, seed=1)


def _ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(1, WORDS, shape)


def _answers(n):
    return cases._labels(n).astype("float32")[:, None] % 2


def _texts(n):
    return _ids(n, STEPS), _answers(n)


def _documents(n):
    """Documents of two texts each."""
    return _ids(n, 2, STEPS), _answers(n)


def _pairs(n):
    """Two texts, and whether they belong together."""
    return (_ids(n, STEPS), _ids(n, STEPS, seed=1)), _answers(n)


def _convolutional(*norm):
    """Two convolutions, of which the first is normalized by `norm`, if there is one."""
    return cases._of(
        cases._layer(layers.Conv2D, 4, 3, use_bias=not norm),
        *norm,
        cases._layer(layers.Activation, "tanh"),
        cases._layer(layers.MaxPooling2D),
        cases._layer(layers.Conv2D, 3, 2, activation="tanh"),
        layers.Flatten,
        cases._dense(OUTPUTS, "softmax"),
        shape=(SIDE, SIDE, 2),
    )


# A large epsilon, as in other cases: examples that are nearly equal magnify rounding.
_NORM = {"momentum": 0.8, "epsilon": 0.1, "name": "norm"}


def sizes_of_parts(rows, parts):
    """How many rows of a batch each tower has: the first ones what is left over."""
    return [(rows + parts - 1 - k) // parts for k in range(parts)]


class NormalizedInParts(layers.BatchNormalization):
    """Normalizes the rows of each tower by themselves, on one device.

    The moving statistics follow the mean over the towers, weighted by their rows.
    """

    def __init__(self, parts, **options):
        super().__init__(**options)
        self.parts = parts

    def call(self, x, training=None):
        if not training:
            return super().call(x, training=False)
        rows, axes = ops.shape(x)[0], tuple(range(len(x.shape) - 1))
        sizes = sizes_of_parts(rows, self.parts)
        normal, statistics = [], []
        for part, size in zip(tf.split(x, sizes), sizes, strict=True):
            # A part may have no row.
            pixels = ops.cast(ops.maximum(ops.size(part[..., 0]), 1), x.dtype)
            mean = ops.sum(part, axes) / pixels
            variance = ops.sum(ops.square(part - mean), axes) / pixels
            slope = self.gamma / ops.sqrt(variance + self.epsilon)
            normal.append((part - mean) * slope + self.beta)
            weight = ops.cast(size, x.dtype) / ops.cast(rows, x.dtype)
            statistics.append((weight * mean, weight * variance))
        for moving, new in zip(
            (self.moving_mean, self.moving_variance),
            zip(*statistics, strict=True),
            strict=True,
        ):
            moving.assign(self.momentum * moving + (1 - self.momentum) * sum(new))
        return ops.concatenate(normal)


def _dense(norm):
    hidden = cases._dense(8, use_bias=False)
    return cases._of(
        hidden, norm, cases._layer(layers.Activation, "tanh"), cases._dense(OUTPUTS)
    )


def _normalized_in_parts(network):
    def make(towers):
        return network(cases._layer(NormalizedInParts, towers, **_NORM))()

    return make


def _encoder():
    """A text as four numbers."""
    return keras.Sequential(
        [
            keras.Input((STEPS,), dtype="int32"),
            layers.Embedding(WORDS, 4),
            layers.GlobalAveragePooling1D(),
            # Of two of them the difference hardly knows of a bias: what is left of its
            # gradient would be rounding.
            layers.Dense(4, "tanh", use_bias=False),
        ]
    )


def _siamese(first, second):
    """How near two texts are, which one encoder reads."""
    encoder = _encoder()
    apart = ops.square(encoder(first) - encoder(second))
    return ops.exp(-ops.sum(apart, axis=1, keepdims=True))


def _of_texts(*body, shape=(STEPS,)):
    return cases._of(*body, cases._dense(1, "sigmoid"), shape=shape, dtype="int32")


def _recurrent(kind):
    """Two recurrent layers, of which the second gives its last state."""
    return cases._of(
        cases._layer(kind, 4, return_sequences=True),
        cases._layer(kind, 3),
        cases._dense(OUTPUTS),
        shape=(STEPS, cases.FEATURES),
    )


_CLASSES = {
    "loss": "sparse_categorical_crossentropy",
    "compile": lambda: {"metrics": ["accuracy"]},
}
_YES_OR_NO = {"loss": "binary_crossentropy"}
_BATCH_NORM = layers.BatchNormalization
# Of each network: how it is built, what it is trained on, and further fields.
NETWORKS = {
    "dense": (cases._mlp(), _numbers, {}),
    "dense, subclassed": (cases.Training, _numbers, {}),
    "dense, BatchNormalization of each tower": (
        _dense(cases._layer(_BATCH_NORM, **_NORM)),
        _numbers,
        {"reference": _normalized_in_parts(_dense)},
    ),
    "convolutional": (_convolutional(), _pictures, _CLASSES),
    "convolutional, synchronized BatchNormalization": (
        _convolutional(cases._layer(_BATCH_NORM, synchronized=True, **_NORM)),
        _pictures,
        _CLASSES,
    ),
    "convolutional, BatchNormalization of each tower": (
        _convolutional(cases._layer(_BATCH_NORM, **_NORM)),
        _pictures,
        _CLASSES | {"reference": _normalized_in_parts(_convolutional)},
    ),
    "embedding": (_of_texts(_encoder), _texts, _YES_OR_NO),
    "embedding of each of two texts": (
        _of_texts(
            lambda: layers.TimeDistributed(_encoder()),
            layers.Flatten,
            shape=(2, STEPS),
        ),
        _documents,
        _YES_OR_NO,
    ),
    "siamese": (
        cases._functional(_siamese, (STEPS,), (STEPS,), dtype="int32"),
        _pairs,
        {},
    ),
    "LSTM": (_recurrent(layers.LSTM), _sequences, {}),
    "GRU": (_recurrent(layers.GRU), _sequences, {}),
}


class RateOfEachBatch(keras.callbacks.Callback):
    """Sets another learning rate before each batch."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / (batch + 1)


def _scheduled():
    falling = optimizers.schedules.PolynomialDecay(0.1, 5, 0.01)
    return optimizers.SGD(falling, momentum=0.9)


def _ways(rows):
    """How a network is fed and trained: fields of cases, by name."""
    x, y = rows(sum(UNEVEN))
    return {
        "validation": {"fit": {"validation_data": rows(7), "validation_batch_size": 4}},
        "arrays, of which a part validates": {
            "fit": {"x": x, "y": y, "batch_size": 6, "validation_split": 0.3}
            | {"shuffle": False}
        },
        "a schedule of learning rates": {"optimizer": _scheduled},
        "a learning rate for each batch": {"fit": {"callbacks": [RateOfEachBatch()]}},
    }


def _networks():
    for name, (make, rows, fields) in NETWORKS.items():
        batches = functools.partial(lambda rows: cases._cut(*rows(sum(UNEVEN))), rows)
        for way, further in _ways(rows).items():
            yield cases._case(
                "networks",
                f"{name}, {way}",
                make,
                batches,
                **{"compile": lambda: {"metrics": ["mae"]}} | fields | further,
            )


CASES = [*_networks()]
