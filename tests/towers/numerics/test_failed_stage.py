"""A stage that fails says how, though TensorFlow says only that it was cancelled."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.variants import slow
from towers import Stages, multi_gpu_model
from towers.layers import variables
from towers.numerics import failed_stage
from towers.tower.errors import ModelError, StageError

X = np.ones([8, 6], "float32")


def check(x):
    """Fails for what is not finite."""
    fine = tf.debugging.assert_less(tf.abs(x), np.inf, message="It is not finite.")
    with tf.control_dependencies([fine]):
        return tf.identity(x)


@tf.custom_gradient
def checked_on_the_way_back(x):
    """Fails for a gradient of what is not finite; forward, it looks at nothing."""
    return tf.zeros_like(x), lambda dy: check(x) * dy


class Calls(layers.Layer):
    """Calls a function, and has a weight."""

    def __init__(self, function=tf.identity, **options):
        super().__init__(**options)
        self._function = function

    def build(self, shape):
        self.scale = self.add_weight(shape=[shape[-1]], initializer="ones")

    def call(self, x):
        return self._function(x * self.scale)


def parallel(stage=None, function=check, loss="mse", **options):
    """A model in two stages, of which one calls a function."""
    functions = [function if stage == k else tf.identity for k in range(2)]
    every = [Calls(each, name=f"s{k}") for k, each in enumerate(functions)]
    model = keras.Sequential([keras.Input([6]), *every], name="model")
    made = multi_gpu_model(
        *(model, 2, "replicated"),
        stages=Stages(2, {"s0": 0, "s1": 1}),
        micro_batches=2,
        strict=False,
    )
    made.compile("adam", loss, **options)
    return made


def loss_that_checks(y, outputs):
    return tf.reduce_mean(check(outputs) - y, axis=-1)


# TensorFlow itself says it now and then: whichever it hears first.
ERRORS = ModelError, tf.errors.InvalidArgumentError
SENTENCE = (
    r"assertion failed: \[It is not finite|"
    r"A stage of model 'model' has failed: InvalidArgumentError: .*It is not finite.*"
    r"\. The batch was computed again to find that out, op by op, on the host, "
    r"which changes no variable\."
)


@pytest.mark.parametrize(
    "options",
    [
        slow({"stage": 1}),
        slow({"stage": 0}),
        {"stage": 0, "function": checked_on_the_way_back},
        slow({"stage": 1, "function": checked_on_the_way_back}),
        slow({"loss": loss_that_checks}),
        slow({"stage": 1, "steps_per_execution": 2}),
    ],
    ids=lambda options: "-".join(options),
)
def test_training_says_how_a_stage_has_failed(monkeypatch, options):
    values, finds = [], failed_stage.reason

    def reason(builder, step):
        values.append(variables.values(model.__wrapped__))
        try:
            return finds(builder, step)
        finally:
            values.append(variables.values(model.__wrapped__))

    monkeypatch.setattr(failed_stage, "reason", reason)
    model = parallel(**options)
    model.fit(X, X, batch_size=4, verbose=0)
    with pytest.raises(ERRORS, match=SENTENCE):
        model.fit(X * np.inf, X, batch_size=4, verbose=0, shuffle=False)
    # Nothing changes by computing again. The step itself may have counted.
    for before, after in zip(values[::2], values[1::2], strict=True):
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)
    # It goes on with what is fine.
    model.fit(X, X, batch_size=4, verbose=0)


@pytest.mark.parametrize(
    ("step", "options", "fails"),
    [
        ("train", {}, False),
        ("predict", {}, False),
        *((step, {"stage": 1}, True) for step in ("train", "test", "predict")),
        ("train", {"stage": 0, "function": checked_on_the_way_back}, True),
        # Nothing goes back there.
        ("test", {"stage": 0, "function": checked_on_the_way_back}, False),
        ("test", {"loss": loss_that_checks}, True),
        ("predict", {"loss": loss_that_checks}, False),
    ],
)
def test_a_batch_is_computed_again_as_far_as_its_step_goes(step, options, fails):
    builder = parallel(**options).builder
    x = tf.constant(X * np.inf)
    data = x if step == "predict" else (x, tf.constant(X))
    builder.context.last_batch.take = lambda step: [data]
    error = failed_stage.reason(builder, step)
    assert ("It is not finite" in str(error)) == fails
    assert (error is None) != fails


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_evaluation_and_prediction_say_how_a_stage_has_failed(stage):
    model = parallel(stage)
    model.fit(X, X, verbose=0)
    for call in (
        lambda: model.evaluate(X * np.inf, X, verbose=0),
        lambda: model.predict(X * np.inf, verbose=0),
        lambda: model.train_on_batch(X * np.inf, X),
    ):
        with pytest.raises(ERRORS, match=SENTENCE):
            call()


@pytest.mark.slow
def test_it_is_the_batch_that_failed_which_is_computed_again():
    """Of the last batch, smaller and of another shape, too."""
    model = parallel(1)
    data = np.ones([10, 6], "float32")
    data[9] = np.inf
    with pytest.raises(ERRORS, match=SENTENCE):
        model.fit(data, data, batch_size=4, shuffle=False, verbose=0)


@pytest.mark.slow
def test_what_fails_once_is_said_to():
    """As where a device runs out of memory."""
    fails = [False]

    def sometimes(x):
        if fails[0] and x.dtype == np.float32:
            fails[0] = False
            raise RuntimeError("Once.")
        return x

    def function(x):
        found = tf.numpy_function(sometimes, [x], x.dtype)
        return x + 0 * tf.stop_gradient(tf.ensure_shape(found, x.shape))

    model = parallel(1, function)
    model.fit(X, X, verbose=0)
    fails[0] = True
    said = "computed again op by op, on the host, the batch does not fail|Once"
    with pytest.raises((StageError, tf.errors.UnknownError), match=said):
        model.fit(X, X, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"shard_embeddings": "rows"}, {"preprocess": lambda x, y, training: (x, y)}],
    ids=["plain", "rows", "preprocess"],
)
def test_what_is_no_row_of_a_table_is_named(options):
    every = [layers.Embedding(64, 8), layers.Flatten(), layers.Dense(6)]
    model = keras.Sequential([keras.Input([5]), *every], name="model")
    made = multi_gpu_model(model, 4, stages=2, micro_batches=2, **options)
    made.compile("adam", "mse")
    check_no_row(made)


def check_no_row(model):
    ids = np.zeros([8, 5], "int32")
    model.fit(ids, X, verbose=0)
    ids[5, 2] = 9999
    # The sentence says how many rows the whole table has.
    said = (
        r"indices\[.*\] = 9999 is not in \[0, 64\)|"
        "Received id 9999 for table '.*/embeddings', whose 64 rows lie on several"
    )
    for _ in range(3):
        with pytest.raises(ERRORS, match=said):
            model.fit(ids, X, verbose=0)


def test_what_is_no_row_of_a_shard_is_named():
    every = [layers.Embedding(64, 8), layers.Flatten(), layers.Dense(6)]
    model = keras.Sequential([keras.Input([5]), *every], name="model")
    made = multi_gpu_model(model, 2, shard_embeddings="rows")
    made.compile("adam", "mse")
    check_no_row(made)
