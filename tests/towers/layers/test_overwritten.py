"""Variables that take their gradient for their value; see also the exact cases."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import multi_gpu_model
from towers.partition import trace


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
    variables = model.trainable_variables
    assert sum(v.overwrite_with_gradient for v in variables) == 12
    assert trace.overwritten_unlike_float8(model) == []


def test_uses_are_told_apart_in_their_sum():
    @tf.function(autograph=False)
    def uses(*values):
        first, *others = values
        return trace.largest_of_each_use(
            tf.add_n([*others, tf.identity(first)]) + first
        )

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
