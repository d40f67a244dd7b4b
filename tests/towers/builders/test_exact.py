"""K towers give what one device gives: what tests/exact has no row for."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import oracle
from towers import multi_gpu_model

pytestmark = pytest.mark.quick_one_in(2)

CLASSES = 5


def _data(rows):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 12)).astype("float32")
    y = random.integers(0, CLASSES, rows)
    weights = random.uniform(0, 2, rows).astype("float32")
    return x, y, weights


def _mlp():
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(16, activation="tanh", kernel_regularizer="l2"),
            keras.layers.Dense(CLASSES),
        ]
    )


def _batches(size, *data):
    return tf.data.Dataset.from_tensor_slices(data).batch(size)


def _sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def _cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@functools.cache
def _twenty_steps():
    """The batches, and what the oracle makes of them: losses and weights."""
    # 120 rows in batches of 50 are steps of 50, 50 and 20: 7 epochs less one step.
    x, y, _ = _data(120)
    model, batches = _mlp(), oracle.batches(50, x, y, epochs=7)[:20]
    losses = oracle.train(model, _sgd(), _cross_entropy(), batches)
    return batches, losses, model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("towers", [1, 2, 3, 4])
def test_twenty_steps_of_momentum_equal_the_oracle(towers):
    batches, losses, expected = _twenty_steps()
    model = _mlp()
    parallel = multi_gpu_model(model, gpus=towers)
    parallel.compile(_sgd(), _cross_entropy())
    ours = [parallel.train_on_batch(*batch) for batch in batches]
    difference = oracle.largest_difference(model.get_weights(), expected)
    print(f"{towers} towers: largest relative difference {difference:.1e}")
    assert difference <= 1e-5
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    assert int(model.optimizer.iterations) == 20


def test_batch_normalization_follows_the_written_rule():
    def make():
        keras.utils.set_random_seed(7)
        return keras.Sequential(
            [keras.Input((12,)), keras.layers.BatchNormalization(momentum=0.9)]
        )

    x, _, _ = _data(50)
    model = make()
    parallel = multi_gpu_model(model, gpus=3)
    parallel.compile(_sgd(), "mse")
    parallel.train_on_batch(x, x)
    # Shares of 17, 17 and 16, each normalised by itself; statistics weighted by share.
    shares = x[:17], x[17:34], x[34:]
    mean = sum(len(s) / 50 * s.mean(0) for s in shares)
    variance = sum(len(s) / 50 * s.var(0) for s in shares)
    layer = model.layers[-1]
    np.testing.assert_allclose(layer.moving_mean, 0.1 * mean, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(layer.moving_variance, 0.9 + 0.1 * variance, rtol=1e-5)
    one = make()
    one.compile(_sgd(), "mse", run_eagerly=True)
    one.train_on_batch(x, x)
    np.testing.assert_allclose(
        layer.moving_mean, one.layers[-1].moving_mean, rtol=1e-4, atol=1e-7
    )


def _dropped(towers, seed=3):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((100,)), keras.layers.Dropout(0.5)])
    outputs = []

    @keras.saving.register_keras_serializable()
    def keep(_, y_pred):
        outputs.append(y_pred)
        return tf.reduce_mean(y_pred, axis=-1)

    parallel = multi_gpu_model(model, gpus=towers)
    parallel.compile(_sgd(), "mse", metrics=[keep], run_eagerly=True)
    ones = np.ones((20, 100), "float32")
    parallel.train_on_batch(ones, ones)
    parallel.train_on_batch(ones, ones)
    first, second = outputs[-2:]
    return first.numpy(), second.numpy()


@pytest.mark.slow
def test_dropout_differs_by_tower_and_step_and_repeats_with_the_seed():
    first, second = _dropped(2)
    assert not np.array_equal(first[:10], first[10:])
    assert not np.array_equal(first, second)
    again, _ = _dropped(2)
    np.testing.assert_array_equal(first, again)
    other, _ = _dropped(2, seed=4)
    assert not np.array_equal(first, other)


class NeedsExamples(keras.layers.Layer):
    """Fails where there is no example."""

    def call(self, x):
        with tf.control_dependencies([tf.debugging.assert_positive(tf.shape(x)[0])]):
            return tf.identity(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(lambda x: NeedsExamples()(x), id="needs_examples"),
        pytest.param(
            lambda x: keras.layers.MultiHeadAttention(2, 4)(x, x), id="attention"
        ),
        pytest.param(
            lambda x: keras.layers.SimpleRNN(4)(keras.layers.Masking()(x)),
            id="masked_rnn",
        ),
        pytest.param(lambda x: keras.layers.GRU(4)(x), id="gru"),
        pytest.param(
            lambda x: keras.layers.Bidirectional(keras.layers.LSTM(3))(
                keras.layers.Masking()(x)
            ),
            id="masked_lstm",
        ),
    ],
)
def test_idle_towers_compute_nothing(body):
    random = np.random.default_rng(0)
    x = random.normal(size=(5, 7, 6)).astype("float32")

    def make():
        keras.utils.set_random_seed(7)
        inputs = keras.Input((None, 6))
        pooled = keras.layers.GlobalAveragePooling1D()
        outputs = body(inputs)
        outputs = pooled(outputs) if len(outputs.shape) == 3 else outputs
        return keras.Model(inputs, keras.layers.Dense(1)(outputs))

    # Batches of 4 and 1 on 3 towers: the last leaves two of them idle.
    weights = []
    for towers in (0, 3):
        model = make()
        trained = multi_gpu_model(model, gpus=towers) if towers else model
        # Nothing is traced for one device.
        trained.compile(_sgd(), "mse", run_eagerly=not towers)
        data = _batches(4, x, x[:, 0, :1])
        trained.fit(data, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for ours, expected in zip(weights[1], weights[0], strict=True):
        # Attention does not depend on the keys' bias, so its gradient is rounding.
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_an_empty_batch():
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(CLASSES)])
    parallel = multi_gpu_model(model, gpus=3)
    parallel.compile(_sgd(), _cross_entropy())
    none = np.zeros((0, 12), "float32")
    assert parallel.predict_on_batch(none).shape == (0, CLASSES)
    model.compile(_sgd(), _cross_entropy(), run_eagerly=True)
    expected = model.test_on_batch(none, np.zeros((0,), "int32"))
    assert parallel.test_on_batch(none, np.zeros((0,), "int32")) == expected


class OwnLoss(keras.Sequential):
    """Its loss looks at the variables, past the outputs."""

    def compute_loss(self, x, y, y_pred, *others, **more):
        loss = super().compute_loss(x, y, y_pred, *others, **more)
        norms = [keras.ops.sum(v**2) for v in self.trainable_variables]
        return loss + 0.1 * keras.ops.sum(keras.ops.stack(norms))


class CallsAgain(keras.Sequential):
    """Its loss calls the model."""

    def compute_loss(self, x, y, y_pred, *others, **more):
        return keras.ops.mean((self(x) - keras.ops.one_hot(y, CLASSES)) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("make", [OwnLoss, CallsAgain])
def test_gathered_losses_of_variables(make):
    x, y, _ = _data(70)
    found = []
    for towers in (0, 3):
        keras.utils.set_random_seed(7)
        model = make([keras.Input((12,)), keras.layers.Dense(CLASSES)])
        trained = multi_gpu_model(model, gpus=towers) if towers else model
        trained.compile(_sgd(), _cross_entropy(), run_eagerly=not towers)
        trained.fit(_batches(50, x, y), epochs=2, shuffle=False, verbose=0)
        loss = trained.evaluate(_batches(50, x, y), verbose=0)
        found.append([*model.get_weights(), loss])
    assert trained.loss_placement == "gathered"
    assert oracle.largest_difference(*found) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("coupled", [False, True])
def test_outputs_with_several_rows_an_example(coupled):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(70, 5, 4)), random.normal(size=(70, 10))

    def loss(y, outputs):
        error = keras.ops.mean((keras.ops.reshape(y, [-1, 2]) - outputs) ** 2)
        return keras.ops.sqrt(error) if coupled else error

    def make():
        keras.utils.set_random_seed(7)
        inputs = keras.Input((5, 4))
        rows = keras.ops.reshape(keras.layers.Dense(2)(inputs), [-1, 2])
        return keras.Model(inputs, rows)

    found = []
    for towers in (0, 3):
        model = make()
        trained = multi_gpu_model(model, gpus=towers) if towers else model
        trained.compile(_sgd(), loss, run_eagerly=not towers)
        fit = trained.fit(_batches(50, x, y), shuffle=False, verbose=0)
        rows = trained.predict(_batches(50, x), verbose=0)
        found.append([*model.get_weights(), fit.history["loss"], rows])
    assert trained.loss_placement == ("gathered" if coupled else "tower")
    assert oracle.largest_difference(*found) <= 1e-5
