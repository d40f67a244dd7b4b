"""Variables that take their gradient for their value; see also the exact cases."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import multi_gpu_model
from towers.collectives import reduce
from towers.layers import overwritten

DEVICES = ["/device:CPU:0", "/device:CPU:1", "/device:CPU:2"]


def _in_float8():
    layers = [
        keras.layers.Dense(3),
        keras.layers.EinsumDense("ab,bc->ac", 2),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.quantize("float8")
    return model


def test_all_of_keras_s_float8_are_known():
    model = _in_float8()
    assert len(overwritten.places(model)) == 12
    assert overwritten.others(model) == []


def _ways(towers):
    """Each way to combine what some of the towers have, on all devices."""
    sources = DEVICES[: len(towers)]
    yield reduce.sum_gradients(towers, {1, 2})
    yield reduce.sum_packed(towers, sources, DEVICES[0], DEVICES[1], {1, 2})
    for algorithm in ("cpu", "device", "ring"):
        yield from reduce.all_reduce(towers, sources, DEVICES, algorithm, {1, 2})


@pytest.mark.parametrize("towers", [1, 3])
def test_the_largest_is_taken_for_each_use(towers):
    """Other gradients are added; a variable that no tower uses has none."""
    of_one = np.float32([[0, 3], [5, 1]]), np.float32([[4, 0], [0, 2]])
    uses = [of_one[0], of_one[1], np.zeros((2, 2), "float32")][:towers]
    expected = [5.0, 4.0] if towers == 1 else [9.0, 5.0]
    parts = [[tf.ones([2]), tf.constant(each), None] for each in uses]
    for added, largest, none in _ways(parts):
        np.testing.assert_array_equal(added, [towers, towers])
        np.testing.assert_array_equal(largest, expected)
        assert none is None


def test_uses_are_told_apart_in_their_sum():
    @tf.function(autograph=False)
    def uses(*values):
        first, *others = values
        return overwritten.each_use(tf.add_n([*others, tf.identity(first)]) + first)

    values = [tf.constant([float(k), 9.0]) for k in range(3)]
    found = sorted(each.numpy().tolist() for each in uses(*values))
    assert found == [[0.0, 9.0], [0.0, 9.0], [1.0, 9.0], [2.0, 9.0]]


class Own(keras.layers.Layer):
    """A user's layer with such a variable."""

    def build(self, shape):
        self.seen = self.add_weight(
            shape=(), name="seen", initializer="ones", overwrite_with_gradient=True
        )

    def call(self, x):
        return x * self.seen


def test_nobody_knows_how_those_of_a_user_combine():
    x = np.ones([4, 2], "float32")

    def trained(**options):
        model = keras.Sequential([keras.Input((2,)), Own(name="own")])
        parallel = multi_gpu_model(model, gpus=2, **options)
        parallel.compile("sgd", "mse")
        parallel.predict_on_batch(x)
        parallel.train_on_batch(x, 0 * x)
        return float(model.layers[-1].seen.value)

    with pytest.raises(ValueError, match="own/seen' that is overwritten"):
        trained()
    # Each tower's is 1, of a gradient of 2.
    assert trained(strict=False) == 1.0
