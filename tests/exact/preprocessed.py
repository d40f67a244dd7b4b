"""Cases of `preprocess`, beside one device whose model does the same itself: data."""

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.exact import cases
from tests.exact.cases import OUTPUTS, UNEVEN
from tests.exact.networks import sizes_of_parts

GROUP = "preprocessed"
SHAPE = 3, 3, 1


class Preprocesses(keras.Model):
    """Does with each part of a batch what towers do: metrics get the targets as given.

    Args:
        model: What gets the examples then.
        function: What becomes of x and y.
        parts: How many parts of a batch see nothing of one another.
    """

    def __init__(self, model, function, parts):
        super().__init__()
        self.model, self.function, self.parts = model, function, parts
        # Keras names the losses of several outputs by them.
        self.output_names = getattr(model, "output_names", None)

    def call(self, x, training=False):
        return self.model(self._preprocessed(x, None, training)[0], training=training)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        y = self._preprocessed(x, y, training)[1]
        return super().compute_loss(x, y, y_pred, sample_weight)

    def _preprocessed(self, x, y, training):
        sizes = sizes_of_parts(tf.shape(x)[0], self.parts)
        targets = [None] * self.parts if y is None else tf.split(y, sizes)
        pairs = [
            self.function(*pair, training)
            for pair in zip(tf.split(x, sizes), targets, strict=True)
        ]
        return tuple(
            keras.tree.map_structure(
                lambda *a: None if a[0] is None else tf.concat(a, 0), *each
            )
            for each in zip(*pairs, strict=True)
        )


def scale(x, y, training):
    """From bytes and labels to what the model and its loss take."""
    x = tf.cast(x, tf.float32) / 127.5 - 1 + (0.25 if training else 0)
    return x, None if y is None else tf.one_hot(tf.cast(y, tf.int32), OUTPUTS)


def twice(x, y, training):
    """A target for each of two outputs."""
    x, y = scale(x, y, training)
    return x, (y, y)


def mixed(x, y, training):
    """Half of each example, and half of another of the batch, on one device."""
    x, y = scale(x, y, training)
    if training:
        x = (x + x[::-1]) / 2
        y = None if y is None else (y + y[::-1]) / 2
    return x, y


def signs(x, y, training):
    """Turns some examples round, targets too: to a linear model that is the same."""
    drawn = tf.random.uniform(tf.shape(x)[:1], -1, 1) if training else [1.0]
    drawn = tf.reshape(tf.sign(drawn), [-1, 1])
    return x * drawn, y if y is None else y * drawn


def _model(*norm):
    return cases._of(
        layers.Flatten,
        cases._dense(8, "tanh"),
        *norm,
        cases._dense(OUTPUTS, "softmax"),
        shape=SHAPE,
    )


def _two_outputs():
    inputs = keras.Input(SHAPE)
    flat = layers.Flatten()(inputs)
    return keras.Model(
        inputs, [layers.Dense(OUTPUTS, "softmax", name=name)(flat) for name in "ab"]
    )


def _bytes(sizes, weighted=False):
    def batches():
        n = sum(sizes)
        x = np.random.default_rng(0).integers(0, 256, (n, *SHAPE)).astype("uint8")
        weights = [cases._weights(n)] * weighted
        return cases._cut(x, cases._labels(n), *weights, sizes=sizes)

    return batches


def _case(
    name,
    sizes=(12, 12, 1),
    weighted=False,
    make=None,
    function=scale,
    further=None,
    options=None,
    **fields,
):
    """A case of pictures in bytes, whose last batch leaves towers idle.

    Args:
        name: What is special about it.
        sizes: Of the batches.
        weighted: Whether there are sample weights.
        make: Builds the model.
        function: What preprocesses.
        further: Further arguments of `compile`.
        options: Further arguments of `multi_gpu_model`.
        **fields: Of the case.
    """
    make = make or _model()
    metrics = {
        "weighted_metrics" if weighted else "metrics": ["sparse_categorical_accuracy"]
    }
    fields = {
        "loss": "categorical_crossentropy",
        "compile": lambda: metrics | (further or {}),
        "reference": lambda parts: Preprocesses(make(), function, parts),
    } | fields
    return cases._case(
        GROUP,
        name,
        make,
        _bytes(sizes, weighted),
        options={"preprocess": function} | (options or {}),
        **fields,
    )


def _cases():
    yield _case(
        "validation",
        fit={"validation_data": _bytes((7,))()[0], "validation_batch_size": 4},
    )
    yield _case("sample weights", weighted=True)
    yield _case("4 towers", towers=4)
    ahead = {"packed": True, "prefetch": 2}
    yield _case("shares (3, 1)", towers=2, options={"split_ratios": (3, 1)} | ahead)
    gathered = {"loss_placement": "gathered"}
    yield _case(
        "gathered, steps_per_execution",
        options=gathered,
        further={"steps_per_execution": 2},
    )
    for name, options in {"": {}, ", gathered": gathered}.items():
        for way in ("run_eagerly", "jit_compile"):
            yield _case(f"{way}{name}", options=options, further={way: True})
    # Of 12 rows, the second tower gets none. Eager towers know that beforehand.
    yield _case(
        "run_eagerly, a tower between others is idle",
        options={"split_ratios": (1, 1, 24), "loss_placement": "tower"},
        further={"run_eagerly": True},
    )
    norm = cases._layer(
        layers.BatchNormalization, synchronized=True, momentum=0.8, epsilon=0.1
    )
    for name, further in {"": {}, ", run_eagerly": {"run_eagerly": True}}.items():
        yield _case(
            f"BatchNormalization(synchronized=True){name}",
            UNEVEN,
            make=_model(norm),
            further=further,
        )
    yield _case(
        "two outputs",
        make=_two_outputs,
        function=twice,
        loss=["categorical_crossentropy", "mse"],
        compile=dict,
    )
    for name, options in {"": {}, ", gathered": gathered}.items():
        yield _case(
            f"examples are mixed{name}",
            function=mixed,
            options=options,
            reference=lambda parts: Preprocesses(_model()(), mixed, 1),
        )
    linear = cases._of(cases._dense(OUTPUTS, use_bias=False))
    for placement in ("tower", "gathered"):
        for further in ({}, {"run_eagerly": True}):
            yield cases._case(
                GROUP,
                ", ".join(["examples are turned at random", placement, *further]),
                linear,
                cases._numbers((12, 12, 1)),
                compile=functools.partial(dict, **further),
                options={"preprocess": signs, "loss_placement": placement},
                reference=lambda parts: linear(),
            )


CASES = [*_cases()]
