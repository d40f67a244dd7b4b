"""What cannot be read is compared on the first batch: an error, or a line."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests import oracle
from tests.variants import slow
from towers import multi_gpu_model
from towers.tower import compare

pytestmark = pytest.mark.quick_one_in(2)

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
Y = X[:, :3]


def _model(between):
    """A model with a function between two layers of Keras's."""
    inputs = keras.Input((6,))
    hidden = between(layers.Dense(4, name="before")(inputs))
    return keras.Model(inputs, layers.Dense(3, name="after")(hidden))


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
def test_examples_that_meet_are_refused(name):
    parallel = multi_gpu_model(_model(MEET[name]), gpus=2)
    with pytest.raises(ValueError, match="example's output depend on other") as error:
        parallel.predict_on_batch(X)
    assert "operation '" in str(error.value)


def test_rows_of_other_towers_are_compared():
    # The first rows are zero, which the mask leaves out: a share shows nothing.
    meet = layers.Lambda(lambda h: h + ops.sum(tf.boolean_mask(h, h[:, 0] != 0)))
    model = _model(meet)
    parallel = multi_gpu_model(model, gpus=4)
    with pytest.raises(ValueError, match="differ from those of the whole"):
        parallel.predict_on_batch(X * (np.arange(8) > 3)[:, None])


def test_a_batch_that_one_device_has_no_room_for(caplog, monkeypatch):
    trace, rows = compare._trace, []

    def small(model, training, values, x):
        rows.append(len(x))
        if len(x) > 4:
            raise tf.errors.ResourceExhaustedError(None, None, "no room")
        return trace(model, training, values, x)

    monkeypatch.setattr(compare, "_trace", small)
    parallel = multi_gpu_model(_model(Mapped()), gpus=2)
    parallel.predict_on_batch(X)
    assert rows == [8, 4]
    assert "compared on 4 rows of the first batch" in caplog.text


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


def test_rows_that_are_kept_apart_are_proved(caplog):
    # Each in a layer of a user's own, side by side.
    each = [*map(Between, APART.values()), Noise()]
    model = _model(lambda h: layers.Concatenate()([layer(h) for layer in each]))
    ours = multi_gpu_model(model, gpus=2).predict_on_batch(X)
    # TensorFlow may warn of what was traced in tests before.
    assert not [r for r in caplog.records if r.name == "towers"]
    np.testing.assert_allclose(ours, model(X), rtol=1e-5, atol=1e-6)


class Mapped(layers.Layer):
    """It cannot be read, and keeps rows apart; where asked for, not in training."""

    def __init__(self, meets=False, **options):
        super().__init__(**options)
        self.meets = meets

    def call(self, x, training=False):
        rows = tf.map_fn(lambda row: 2 * row, x)
        return ops.cumsum(rows, axis=0) if self.meets and training else rows


class Guarded(Mapped):
    def call(self, x, training=False):
        tf.debugging.assert_greater(tf.shape(x)[0], 7, "Too few rows.")
        return super().call(x)


class Drawn(Mapped):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        return super().call(x) + keras.random.normal(ops.shape(x), seed=self.seed)


def test_a_part_that_cannot_be_computed_is_refused():
    parallel = multi_gpu_model(_model(Guarded()), gpus=2)
    said = r"a part of the rows cannot be computed \(.*Too few rows"
    with pytest.raises(ValueError, match=said):
        parallel.predict_on_batch(X)


def test_random_numbers_cannot_be_compared(caplog):
    parallel = multi_gpu_model(_model(Drawn()), gpus=2)
    parallel.compile("sgd", "mse")
    parallel.train_on_batch(X, Y)
    assert "it draws random numbers, so nothing could be compared" in caplog.text


@pytest.mark.quick_one_in(1)
@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        ([1.0, np.nan, np.inf], [1.0, np.nan, np.inf], 0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([1.0], [1.0, 2.0], np.inf),
        ([np.nan, 1.0], [1.0, np.nan], np.inf),
        ([np.inf, 1.0], [2.0, 1.0], np.inf),
        ([1, 2], [1, 3], np.inf),
    ],
)
def test_the_difference_of_arrays(ours, theirs, difference):
    assert compare._of_arrays(np.array(ours), np.array(theirs)) == difference


def _unread(layer):
    keras.utils.set_random_seed(7)
    return _model(lambda h: layers.Dropout(0.5)(layers.BatchNormalization()(layer(h))))


def test_what_is_equal_is_said_and_changes_nothing(caplog):
    model = _unread(Mapped(name="mapped"))
    before = [np.array(v) for v in model.variables]
    parallel = multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", "mse")
    wanted = parallel.predict_on_batch(X)
    for was, now in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(was, now)
    np.testing.assert_allclose(wanted, model(X), rtol=1e-5)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    parallel.fit(data, epochs=2, shuffle=False, verbose=0)
    # No batch of the first call is lost, and none is trained on twice.
    assert int(model.optimizer.iterations) == 4
    parallel.test_on_batch(X, Y)
    said = [r.getMessage() for r in caplog.records if "cannot be" in r.getMessage()]
    assert len(said) == 1
    assert "layer 'mapped' (Mapped), operation" in said[0]
    assert "rows of a part equal those of the whole" in said[0]


def test_a_guard_by_the_number_of_examples_is_compared(caplog):
    guard = layers.Lambda(
        lambda h: ops.cond(
            ops.cast(ops.shape(h)[0], "float32") > 0, lambda: h * 2, lambda: h
        )
    )
    multi_gpu_model(_model(guard), gpus=2).predict_on_batch(X)
    assert "compared on 8 rows of the first batch" in caplog.text


@pytest.mark.slow
def test_what_meets_in_training_only():
    parallel = multi_gpu_model(_unread(Mapped(meets=True, name="mapped")), gpus=2)
    parallel.compile("sgd", "mse")
    parallel.predict_on_batch(X)
    before = [np.array(v) for v in parallel.variables]
    with pytest.raises(ValueError, match=r"layer 'mapped' \(Mapped\)"):
        parallel.train_on_batch(X, Y)
    for was, now in zip(before, parallel.variables, strict=True):
        np.testing.assert_array_equal(was, now)


class Clipped(layers.Layer):
    """Its gradient lets examples meet."""

    def call(self, x):
        @tf.custom_gradient
        def clip(x):
            return x, lambda g: tf.clip_by_norm(g, 0.1)

        return clip(x)


def test_gradients_are_compared():
    parallel = multi_gpu_model(_model(Clipped()), gpus=2)
    parallel.compile("sgd", "mse")
    with pytest.raises(ValueError, match="differ"):
        parallel.train_on_batch(X, Y)


def test_one_row_cannot_be_compared_but_the_next_batch_can(caplog):
    parallel = multi_gpu_model(_model(MEET["softmax"]), gpus=2)
    parallel.predict_on_batch(X[:1])
    assert "too few rows to compare" in caplog.text
    with pytest.raises(ValueError, match="differ"):
        parallel.predict_on_batch(X)


@pytest.mark.quick_one_in(1)
@pytest.mark.parametrize(
    "options", [{"run_eagerly": True}, {"steps_per_execution": 2}], ids=str
)
def test_nothing_is_trained_before(options):
    model = _model(MEET["sort"])
    before = [np.array(v) for v in model.variables]
    parallel = multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", "mse", **options)
    with pytest.raises(ValueError, match="differ"):
        parallel.fit(X, Y, batch_size=4, verbose=0)
    with pytest.raises(ValueError, match="differ"):
        parallel.evaluate(X, Y, batch_size=4, verbose=0)
    for was, now in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(was, now)


def test_a_graph_of_the_users_own():
    parallel = multi_gpu_model(_model(MEET["sort"]), gpus=2)
    with pytest.raises(Exception, match="graph of your own has no numbers"):
        tf.function(lambda x: parallel.predict_step((x,)))(tf.constant(X))


def test_not_strict(caplog):
    parallel = multi_gpu_model(_model(MEET["sort"]), gpus=2, strict=False)
    parallel.predict_on_batch(X)
    assert "nothing is compared with strict=False" in caplog.text


@pytest.mark.parametrize("dtype", [slow("float32"), "mixed_float16"])
def test_tolerance(dtype):
    keras.config.set_dtype_policy(dtype)
    model = _model(lambda h: Mapped(dtype="float32")(h))
    x = np.where(np.arange(8)[:, None] == 3, np.nan, 1e3 * X)
    ours = multi_gpu_model(model, gpus=2).predict_on_batch(x)
    assert (
        oracle.largest_difference([np.nan_to_num(ours)], [np.nan_to_num(model(x))])
        < 1e-2
    )


def test_logits_are_as_well_known_as_their_layer(caplog):
    # Of a sequence, Keras makes them by operations that cannot be read.
    model = keras.Sequential([keras.Input((2, 3)), layers.Dense(3, "sigmoid")])
    parallel = multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", "binary_crossentropy")
    x = X.reshape(8, 2, 3)
    parallel.train_on_batch(x, x > 0)
    assert parallel.loss_placement == "tower"
    # TensorFlow may warn of what was traced in tests before.
    assert not [r for r in caplog.records if r.name == "towers"]
