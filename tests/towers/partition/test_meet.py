"""Where examples meet, or nobody can tell, home computes on the rows of all towers.

The oracle is Keras on one device, eagerly.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests import oracle
from tests.variants import slow
from towers import multi_gpu_model

pytestmark = pytest.mark.quick_one_in(2)

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
Y = X[:, :3]


def _model(between):
    """A model with a function between two layers of Keras's."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input((6,))
    hidden = between(layers.Dense(4, name="before")(inputs))
    return keras.Model(inputs, layers.Dense(3, name="after")(hidden))


def _numbers(make, towers=0, steps=((X, Y), (X[:1], Y[:1])), **compiled):
    """All that training, evaluation and prediction give; on towers if there are any.

    The second batch leaves a tower idle.
    """
    model = make()
    trained = multi_gpu_model(model, gpus=towers) if towers else model
    compiled = compiled or {"run_eagerly": not towers}
    trained.compile(keras.optimizers.SGD(0.01), "mse", **compiled)
    losses = [trained.train_on_batch(x, y) for x, y in steps]
    evaluated = trained.test_on_batch(*steps[0])
    predicted = trained.predict_on_batch(steps[0][0])
    return [*losses, evaluated, predicted, *model.get_weights()]


def _compare(make, towers=2, **options):
    expected = _numbers(make, **options)
    found = _numbers(make, towers, **options)
    for ours, theirs in zip(found, expected, strict=True):
        # A weight whose gradient is zero but for rounding has no size.
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert np.isfinite(expected[0])


def _said(caplog):
    # TensorFlow may warn of what was traced in tests before.
    return [r.getMessage() for r in caplog.records if r.name == "towers"]


AT_HOME = "computes on one device, with the rows of all towers"


def _of_vectors(layer):
    return lambda h: layer(ops.expand_dims(h, 0))[0]


MEET = {
    "softmax": lambda h: ops.softmax(h, axis=0),
    "sort": lambda h: ops.sort(h, axis=0),
    "argsort": lambda h: ops.cast(ops.argsort(h, axis=0), "float32"),
    "median": lambda h: h - ops.median(h, axis=0),
    "quantile": lambda h: h - ops.quantile(h, 0.3, axis=0),
    "top_k": lambda h: h * ops.top_k(ops.transpose(h), 1)[0][0, 0],
    "take": lambda h: h + ops.take(h, 0, axis=0),
    "segment_sum": lambda h: (
        h + ops.segment_sum(h, ops.cast(ops.zeros_like(h[:, 0]), "int32"), 1)
    ),
    "scan": lambda h: ops.scan(lambda c, row: (c + row, c + row), ops.zeros(4), h)[1],
    "transpose and Softmax": lambda h: ops.transpose(
        layers.Softmax()(ops.transpose(h))
    ),
    "LSTM": _of_vectors(lambda h: layers.LSTM(4, return_sequences=True)(h)),
    "Conv1D": _of_vectors(lambda h: layers.Conv1D(4, 3, padding="same")(h)),
    "attention": _of_vectors(lambda h: layers.MultiHeadAttention(1, 2)(h, h)),
    "pooling": lambda h: h + layers.GlobalAveragePooling1D()(ops.expand_dims(h, 0)),
    "einsum": lambda h: h @ ops.einsum("bi,bj->ij", h, h),
    "reshape and cumsum": lambda h: ops.reshape(
        ops.cumsum(ops.reshape(h, (1, -1)), axis=1), (-1, 4)
    ),
    "UnitNormalization": lambda h: layers.UnitNormalization(axis=-2)(h),
    "Softmax": lambda h: layers.Softmax(axis=-2)(h),
    # Of which one batch alone shows nothing.
    "a branch by a sum": layers.Lambda(
        lambda h: ops.cond(ops.sum(h * h) > -1, lambda: h * 2, lambda: h)
    ),
    "a choice by a mean": lambda h: ops.where(ops.mean(h * h) > -1, h * 2, h),
    # Of which the rows of one tower show nothing.
    "a mask": layers.Lambda(lambda h: h + ops.sum(tf.boolean_mask(h, h[:, 0] > 1))),
    "Concatenate": lambda h: ops.split(
        layers.Softmax(axis=0)(layers.Concatenate(axis=-2)([h, h])), 2
    )[0],
}


# Each is read like one of the others, and takes longer.
LIKE_OTHERS = {
    *("argsort", "median", "quantile", "LSTM", "Conv1D", "attention", "pooling"),
    *("Softmax", "Concatenate", "top_k", "scan"),
}


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize(
    "name",
    [slow(name) if name in LIKE_OTHERS else name for name in MEET],
)
def test_examples_that_meet(name, caplog):
    _compare(lambda: _model(MEET[name]))
    assert AT_HOME in "".join(_said(caplog))


APART = {
    "sort": lambda h: ops.sort(h, axis=-1),
    "argsort": lambda h: ops.cast(ops.argsort(h, axis=-1), "float32"),
    "top_k": lambda h: ops.top_k(h, 2)[0],
    "take": lambda h: ops.take(h, [0, -1], axis=-1),
    "inner axes": lambda h: ops.reshape(
        ops.transpose(ops.reshape(h, (-1, 2, 2)), (0, 2, 1)), (-1, 4)
    ),
    "softmax": lambda h: ops.softmax(ops.reshape(h, (-1, 2, 2)), axis=1)[:, 0],
    "slices": lambda h: h[:, 1:3] + h[..., -2:],
    "there and back": lambda h: ops.transpose(2 * ops.transpose(h)),
    "one_hot": lambda h: ops.one_hot(ops.argmax(h, axis=-1), 4),
    "of matrices": lambda h: ops.tril(ops.reshape(h, (-1, 2, 2)))[:, 1],
    "einsum": lambda h: ops.einsum("...i,...i->...i", h, h),
    "broadcast": lambda h: h + ops.broadcast_to(ops.ones((1, 4)), ops.shape(h)),
    "of each row": lambda h: tf.gather(h, tf.argmax(h, -1)[:, None], batch_dims=1),
    "negative axis": lambda h: layers.Softmax(axis=-2)(h[:, :, None])[:, :, 0],
}


class Between(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


class Noise(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + 0 * keras.random.normal(ops.shape(x), seed=self.seed)


class Mapped(layers.Layer):
    """It cannot be read; where asked for, examples meet, but in training only."""

    def __init__(self, meets=False, **options):
        super().__init__(**options)
        self.meets = meets

    def call(self, x, training=False):
        rows = tf.map_fn(lambda row: 2 * row, x)
        return ops.cumsum(rows, axis=0) if self.meets and training else rows


class Guarded(Mapped):
    """A part of the batch would have too few rows."""

    def call(self, x, training=False):
        tf.debugging.assert_greater(tf.shape(x)[0], 7, "Too few rows.")
        return super().call(x)


class Drawn(Mapped):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        return super().call(x) + keras.random.normal(ops.shape(x), seed=self.seed)


class Clipped(layers.Layer):
    """Its gradient lets examples meet."""

    def call(self, x):
        @tf.custom_gradient
        def clip(x):
            return x, lambda g: tf.clip_by_norm(g, 0.1)

        return clip(x)


UNREAD = {
    "mapped": Mapped,
    "in training": lambda: Mapped(meets=True),
    "guarded": Guarded,
    "drawn": Drawn,
    "gradient": Clipped,
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_cannot_be_read(name, caplog):
    steps = [(X, Y), (X, Y)]
    _compare(lambda: _model(lambda h: UNREAD[name]()(h)), steps=steps)
    assert AT_HOME in "".join(_said(caplog))


def test_what_is_said_is_said_once(caplog):
    def unread():
        layer = Mapped(name="mapped")
        return _model(
            lambda h: layers.Dropout(0)(layers.BatchNormalization()(layer(h)))
        )

    _compare(unread, steps=[(X, Y)] * 3)
    said = [line for line in _said(caplog) if AT_HOME in line]
    assert len(said) == len({*said}) == 3
    assert "test_meet.py:" in said[0]


def test_run_eagerly_computes_on_one_device(caplog):
    _compare(lambda: _model(MEET["sort"]), run_eagerly=True)
    assert "eagerly, so one device computes all of each batch" in "".join(_said(caplog))


def test_several_steps_in_a_call():
    found = []
    for towers in 0, 2:
        model = _model(MEET["sort"])
        trained = multi_gpu_model(model, gpus=towers) if towers else model
        trained.compile("sgd", "mse", steps_per_execution=2)
        fit = trained.fit(X, Y, batch_size=3, shuffle=False, verbose=0)
        found.append([fit.history["loss"], *model.get_weights()])
    assert oracle.largest_difference(*found) <= 1e-5


def test_a_graph_of_the_users_own():
    model = _model(MEET["sort"])
    parallel = multi_gpu_model(model, gpus=2)
    ours = tf.function(lambda x: parallel.predict_step((x,)))(tf.constant(X))
    np.testing.assert_allclose(ours, model(X), rtol=1e-5, atol=1e-6)


def test_rows_that_are_kept_apart_are_proved(caplog):
    def apart():
        # Each in a layer of a user's own, side by side.
        each = [*map(Between, APART.values()), Noise()]
        return _model(lambda h: layers.Concatenate()([layer(h) for layer in each]))

    _compare(apart)
    assert not _said(caplog)


def test_logits_are_as_well_known_as_their_layer(caplog):
    # Of a sequence, Keras makes them by operations that cannot be read.
    model = keras.Sequential([keras.Input((2, 3)), layers.Dense(3, "sigmoid")])
    parallel = multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", "binary_crossentropy")
    x = X.reshape(8, 2, 3)
    parallel.train_on_batch(x, x > 0)
    assert parallel.loss_placement == "tower"
    assert not _said(caplog)


@pytest.mark.parametrize(
    "options",
    [
        {"shard_embeddings": "rows"},
        {"shard_embeddings": "rows", "variable_update": "replicated"},
        {"stages": 2},
    ],
    ids=str,
)
def test_a_model_that_predicts_before_it_trains(options):
    """What is traced first reads variables that are moved, or cut, later."""
    random = np.random.default_rng(0)
    x = random.integers(0, 50, [16, 3]).astype("int32")
    y = random.normal(size=[16, 1]).astype("float32")

    def results(wrap):
        keras.utils.set_random_seed(1)
        every = keras.layers.Embedding(50, 4), keras.layers.Flatten()
        model = wrap(keras.Sequential([*every, *map(keras.layers.Dense, [3, 1])]))
        model.compile("adam", "mse", jit_compile=False)
        found = [model.predict(x, verbose=0), model.evaluate(x, y, verbose=0)]
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False)
        return [*found, model.predict(x, verbose=0), model.evaluate(x, y, verbose=0)]

    ours = results(lambda model: multi_gpu_model(model, 2, **options))
    for mine, other in zip(ours, results(lambda model: model), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
