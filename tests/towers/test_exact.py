"""Towers against the oracle: K towers give what one device gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import oracle
from towers import multi_gpu_model

CLASSES = 5
# Seven batches of 50 and one of 20, which leaves shares of 7 and 6 on 3 towers.
ROWS = 370


def _data(rows=ROWS, seed=0):
    random = np.random.default_rng(seed)
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


def _sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def _cross_entropy(**kwargs):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def _coupled(y, outputs):
    """A loss that sees how examples relate to one another."""
    y = tf.cast(tf.reshape(y, [-1, 1]), tf.float32)
    same = tf.cast(tf.equal(y, tf.transpose(y)), tf.float32)
    near = tf.matmul(outputs, outputs, transpose_b=True) / 10
    return tf.reduce_mean(tf.square(near - same))


def _trained(towers, loss, arrays, make=_mlp, optimizer=None, epochs=3, **options):
    """Fits a new model, by plain Keras where `towers` is 0, and returns what came."""
    model = make()
    trained = multi_gpu_model(model, gpus=towers) if towers else model
    trained.compile(optimizer() if optimizer else _sgd(), loss, **options)
    x, y, *weights = arrays
    history = trained.fit(
        x,
        y,
        batch_size=50,
        epochs=epochs,
        sample_weight=weights[0] if weights else None,
        shuffle=False,
        verbose=0,
    )
    return model, history.history, trained


@pytest.mark.parametrize("towers", [1, 2, 3, 4])
def test_twenty_steps_of_momentum_equal_the_oracle(towers):
    # 120 rows in batches of 50 are steps of 50, 50 and 20: 7 epochs less one step.
    x, y, _ = _data(120)
    expected, model = _mlp(), _mlp()
    batches = oracle.batches(50, x, y, epochs=7)[:20]
    losses = oracle.train(expected, _sgd(), _cross_entropy(), batches)
    parallel = multi_gpu_model(model, gpus=towers)
    parallel.compile(_sgd(), _cross_entropy())
    ours = [parallel.train_on_batch(*batch) for batch in batches]
    difference = oracle.largest_difference(model.get_weights(), expected.get_weights())
    print(f"{towers} towers: largest relative difference {difference:.1e}")
    assert difference <= 1e-5
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    assert int(model.optimizer.iterations) == 20


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("towers", [2, 3, 4])
@pytest.mark.parametrize(
    ("loss", "rate"),
    [
        (_cross_entropy(), 0.05),
        (_cross_entropy(reduction="sum"), 0.001),
        (_cross_entropy(reduction="mean_with_sample_weight"), 0.05),
        (_cross_entropy(ignore_class=2), 0.05),
        (_coupled, 0.05),
    ],
    ids=["mean", "sum", "mean_with_sample_weight", "ignore_class", "coupled"],
)
def test_losses_equal_one_device(loss, rate, towers, weighted):
    x, y, weights = _data(70)
    weights[:30] = 0  # a whole tower's share
    arrays = (x, y, weights) if weighted else (x, y)
    options = {
        "optimizer": lambda: keras.optimizers.SGD(rate, momentum=0.9),
        "metrics": ["accuracy"],
        "weighted_metrics": ["accuracy"] if weighted else None,
    }
    expected, history, _ = _trained(0, loss, arrays, **options)
    model, ours, _ = _trained(towers, loss, arrays, **options)
    difference = oracle.largest_difference(model.get_weights(), expected.get_weights())
    assert difference <= 1e-5
    assert ours.keys() == history.keys()
    for name, values in history.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("options", [{"steps_per_execution": 3}, {"run_eagerly": True}])
@pytest.mark.parametrize("rows", [2, 3, 120, 370])
def test_any_batch_in_any_mode(rows, options):
    arrays = _data(rows)[:2]
    expected, _, plain = _trained(0, _cross_entropy(), arrays)
    model, _, parallel = _trained(4, _cross_entropy(), arrays, **options)
    assert (
        oracle.largest_difference(model.get_weights(), expected.get_weights()) <= 1e-5
    )
    np.testing.assert_allclose(
        parallel.predict(arrays[0], batch_size=50, verbose=0),
        plain.predict(arrays[0], batch_size=50, verbose=0),
        rtol=1e-4,
        atol=1e-6,
    )
    np.testing.assert_allclose(
        parallel.evaluate(*arrays, batch_size=50, verbose=0),
        plain.evaluate(*arrays, batch_size=50, verbose=0),
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.01),
        lambda: keras.optimizers.SGD(0.05, clipvalue=0.001),
        # A larger epsilon, or rounding in gradients near zero would count in full.
        lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1, epsilon=1e-3),
        lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
        lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=2),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 6)),
    ],
    ids=["global_clipnorm", "clipvalue", "adamw", "accumulation", "ema", "schedule"],
)
def test_optimizers_see_the_whole_gradient(optimizer):
    arrays = _data(120)[:2]
    options = {"make": _mlp, "optimizer": optimizer}
    expected, _, _ = _trained(0, _cross_entropy(), arrays, **options)
    model, _, _ = _trained(3, _cross_entropy(), arrays, **options)
    assert (
        oracle.largest_difference(model.get_weights(), expected.get_weights()) <= 1e-5
    )


def test_class_weights():
    x, y, _ = _data(120)
    weights = {c: 0.5 + c for c in range(CLASSES)}
    models = []
    for towers in (0, 3):
        model = _mlp()
        trained = multi_gpu_model(model, gpus=towers) if towers else model
        trained.compile(_sgd(), _cross_entropy())
        trained.fit(
            x,
            y,
            batch_size=50,
            epochs=2,
            class_weight=weights,
            shuffle=False,
            verbose=0,
        )
        models.append(model.get_weights())
    assert oracle.largest_difference(models[1], models[0]) <= 1e-5


def _two_outputs():
    keras.utils.set_random_seed(7)
    a, b = keras.Input((12,), name="a"), keras.Input((12,), name="b")
    shared = keras.layers.Dense(8, activation="relu")
    both = keras.layers.Concatenate()([shared(a), shared(b)])
    return keras.Model(
        {"a": a, "b": b},
        {
            "kind": keras.layers.Dense(CLASSES, name="kind")(both),
            "size": keras.layers.Dense(1, name="size")(both),
        },
    )


def test_several_inputs_and_outputs():
    x, y, weights = _data(120)
    data = tf.data.Dataset.from_tensor_slices(
        ({"a": x, "b": x[::-1]}, {"kind": y, "size": weights[:, None]})
    ).batch(50)
    results = []
    for towers in (0, 4):
        model = _two_outputs()
        trained = multi_gpu_model(model, gpus=towers) if towers else model
        trained.compile(
            _sgd(),
            {"kind": _cross_entropy(), "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.3},
            metrics={"kind": "accuracy", "size": "mae"},
        )
        history = trained.fit(data, epochs=3, verbose=0).history
        results.append(
            (model.get_weights(), history, trained.evaluate(data, verbose=0))
        )
    (expected, expected_history, evaluated), (ours, history, our_evaluated) = results
    assert oracle.largest_difference(ours, expected) <= 1e-5
    assert history.keys() == expected_history.keys()
    for name, values in expected_history.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(our_evaluated, evaluated, rtol=1e-5)


def test_masked_sequences():
    random = np.random.default_rng(0)
    ids = random.integers(1, 20, (70, 6))
    for row, length in enumerate(random.integers(1, 6, 70)):
        ids[row, length:] = 0
    targets = random.normal(size=(70, 6, 1)).astype("float32")

    def make():
        keras.utils.set_random_seed(7)
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(20, 8, mask_zero=True),
                keras.layers.LSTM(8, return_sequences=True),
                keras.layers.Dense(1),
            ]
        )

    options = {"make": make, "metrics": ["mae"]}
    expected, history, _ = _trained(0, "mse", (ids, targets), **options)
    model, ours, _ = _trained(3, "mse", (ids, targets), **options)
    assert (
        oracle.largest_difference(model.get_weights(), expected.get_weights()) <= 1e-5
    )
    for name, values in history.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("tower", [0, 1])
def test_an_overflow_on_any_tower_skips_the_step(tower):
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    parallel = multi_gpu_model(model, gpus=2)
    parallel.compile(_sgd(), "mse")
    x, y = np.ones((50, 4), "float32"), np.zeros((50, 1), "float32")
    parallel.train_on_batch(x, y)
    before = model.get_weights()
    scale = float(model.optimizer.dynamic_scale)
    # Times the loss scale, this is more than 16 bits hold.
    x[tower * 25 + 3] = 6e4
    parallel.train_on_batch(x, y)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert float(model.optimizer.dynamic_scale) == scale / 2
    x[tower * 25 + 3] = 1
    parallel.train_on_batch(x, y)
    assert not np.array_equal(model.get_weights()[0], before[0])


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
    one.compile(_sgd(), "mse")
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


def test_dropout_differs_by_tower_and_step_and_repeats_with_the_seed():
    first, second = _dropped(2)
    assert not np.array_equal(first[:10], first[10:])
    assert not np.array_equal(first, second)
    again, _ = _dropped(2)
    np.testing.assert_array_equal(first, again)
    other, _ = _dropped(2, seed=4)
    assert not np.array_equal(first, other)


def test_sparse_gradients_and_frozen_layers():
    random = np.random.default_rng(0)
    ids, targets = random.integers(0, 50, (70, 4)), random.normal(size=(70, 1))

    def make():
        keras.utils.set_random_seed(7)
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(50, 8),
                keras.layers.Flatten(),
                keras.layers.Dense(8),
                keras.layers.Dense(1),
            ]
        )
        model.layers[2].trainable = False
        return model

    expected, _, _ = _trained(0, "mse", (ids, targets), make=make)
    model, _, _ = _trained(3, "mse", (ids, targets), make=make)
    assert (
        oracle.largest_difference(model.get_weights(), expected.get_weights()) <= 1e-5
    )


@pytest.mark.parametrize(
    "body",
    [
        lambda x: keras.layers.MultiHeadAttention(2, 4)(x, x),
        lambda x: keras.layers.GRU(4)(x),
        lambda x: keras.layers.Bidirectional(keras.layers.LSTM(3))(
            keras.layers.Masking()(x)
        ),
    ],
    ids=["attention", "gru", "masked_lstm"],
)
def test_idle_towers_of_sequence_models(body):
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
        trained.compile(_sgd(), "mse")
        trained.fit(x, x[:, 0, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for ours, expected in zip(weights[1], weights[0], strict=True):
        # Attention does not depend on the keys' bias, so its gradient is rounding.
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["mse", "cosine_similarity", "kl_divergence"])
def test_outputs_without_a_second_axis(loss):
    x, _, weights = _data(70)

    def make():
        keras.utils.set_random_seed(7)
        inputs = keras.Input((12,))
        outputs = keras.layers.Dense(1, activation="sigmoid")(inputs)
        return keras.Model(inputs, keras.ops.squeeze(outputs, -1))

    arrays = (x, weights / 2, weights) if loss == "mse" else (x, weights / 2)
    options = {"make": make}
    expected, history, _ = _trained(0, loss, arrays, **options)
    model, ours, _ = _trained(3, loss, arrays, **options)
    for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(ours["loss"], history["loss"], rtol=1e-5)


class Counter(keras.layers.Layer):
    """Counts its calls, in training and out of it."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x):
        self.count.assign(self.count + 1.0)
        return x


def test_state_changes_in_evaluate_and_predict_too():
    x, y, _ = _data(120)
    counts = []
    for towers in (0, 3):
        counter = Counter()
        keras.utils.set_random_seed(7)
        model = keras.Sequential(
            [keras.Input((12,)), counter, keras.layers.Dense(CLASSES)]
        )
        trained = multi_gpu_model(model, gpus=towers) if towers else model
        trained.compile(_sgd(), _cross_entropy())
        trained.evaluate(x, y, batch_size=50, verbose=0)
        trained.predict(x, batch_size=50, verbose=0)
        trained.fit(x, y, batch_size=50, verbose=0)
        counts.append(float(counter.count))
    assert counts[0] == counts[1] > 0


def test_an_empty_batch():
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(CLASSES)])
    parallel = multi_gpu_model(model, gpus=3)
    parallel.compile(_sgd(), _cross_entropy())
    none = np.zeros((0, 12), "float32")
    assert parallel.predict_on_batch(none).shape == (0, CLASSES)
    model.compile(_sgd(), _cross_entropy())
    expected = model.test_on_batch(none, np.zeros((0,), "int32"))
    assert parallel.test_on_batch(none, np.zeros((0,), "int32")) == expected
