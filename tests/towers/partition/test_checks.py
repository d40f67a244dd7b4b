"""Checks of a function: what holds of the batch passes, and all else stops it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.variants import slow

X = np.arange(1, 8, dtype="float32")[:, None]
debugging = tf.debugging


def _in_loop(x, limit):
    def body(k):
        debugging.assert_less(tf.cast(k, x.dtype), limit)
        return (k + 1,)

    tf.while_loop(lambda k: k < 3, body, [tf.constant(0)])


@tf.function
def _in_function(x, limit):
    debugging.assert_less(x, limit)
    return x


# Each takes the rows, which are 1 to 7, and a number. It passes with the first number,
# and fails with the second.
CHECKS = {
    "each row, less": (lambda x, n: debugging.assert_less(x, n), 8, 7),
    "each row, greater": (lambda x, n: debugging.assert_greater(x, n), 0, 3),
    "all": (lambda x, n: debugging.Assert(tf.reduce_all(x < n), [x]), 8, 2),
    "any": (lambda x, n: debugging.Assert(tf.reduce_any(x == n), [x]), 7, 8),
    "not any": (lambda x, n: debugging.Assert(~tf.reduce_any(x == n), [x]), 8, 7),
    "and": (
        lambda x, n: debugging.Assert(
            tf.reduce_any(x == n) & tf.reduce_all(x > 0), [x]
        ),
        *(1, 0),
    ),
    "sum": (lambda x, n: debugging.assert_equal(tf.reduce_sum(x), n), 28, 27),
    "mean": (lambda x, n: debugging.assert_near(tf.reduce_mean(x), n), 4, 3),
    "largest": (lambda x, n: debugging.assert_equal(tf.reduce_max(x), n), 7, 4),
    "smallest": (lambda x, n: debugging.assert_equal(tf.reduce_min(x), n), 1, 4),
    "number of rows": (
        lambda x, n: debugging.assert_equal(tf.shape(x)[0], tf.cast(n, tf.int32)),
        *(7, 3),
    ),
    "rows that meet": (
        lambda x, n: debugging.assert_equal(tf.cumsum(x)[-1, 0], n),
        *(28, 27),
    ),
    "finite": (lambda x, n: debugging.assert_all_finite(x / (x - n), "no"), 8, 3),
    "numerics": (lambda x, n: debugging.check_numerics(x / (x - n), "no"), 8, 3),
    "numerics of a sum": (
        lambda x, n: debugging.check_numerics(1 / (tf.reduce_sum(x) - n), "no"),
        *(27, 28),
    ),
    "a constant": (lambda x, n: debugging.assert_positive(n), 1, -1),
    "in a branch": (
        lambda x, n: tf.cond(
            n > 5, lambda: x, lambda: debugging.check_numerics(x / 0.0, "no")
        ),
        *(6, 5),
    ),
    "in a loop": (_in_loop, 3, 2),
    "in a function": (_in_function, 8, 7),
}


def _outcome(function, *given):
    """What a function returns, or that a check has stopped it."""
    try:
        return function(*given).numpy().tolist()
    except tf.errors.InvalidArgumentError:
        return "stopped"


@pytest.mark.quick_one_in(8)
@pytest.mark.parametrize("number", [0, 1], ids=["holds", "fails"])
@pytest.mark.parametrize("name", CHECKS)
def test_checks_are_those_of_the_batch(name, number):
    check, *numbers = CHECKS[name]

    def function(x, n):
        check(x, n)
        return 2 * x

    given = tf.constant(X), tf.constant(float(numbers[number]))
    wanted = _outcome(tf.function(function), *given)
    assert (wanted == "stopped") == bool(number)
    for gpus in (2, 3):
        assert _outcome(towers.parallelize(function, gpus), *given) == wanted


class Checks(keras.Sequential):
    """Trains if all rows are less than 8."""

    def train_step(self, x):
        """Checks, and trains."""
        debugging.assert_less(x, 8.0, "a row is too large")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(x, training=True) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize(
    "update", ["parameter_server", *map(slow, ["replicated", "asynchronous"])]
)
def test_a_step_is_stopped(update):
    model = Checks([keras.Input((1,)), keras.layers.Dense(1)])
    parallel = towers.multi_gpu_model(model, gpus=2, variable_update=update)
    parallel.compile("sgd")
    parallel.fit(X, batch_size=4, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a row is too large"):
        parallel.fit(X + 1, batch_size=4, verbose=0)
