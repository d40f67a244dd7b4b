"""Refusals of metrics that a layer or a model updates while it is called.

That all others are those of one device is shown by tests/exact.
"""

import keras
import numpy as np
import pytest
from keras import layers

import towers
from tests.exact.in_calls import LargestOutput
from towers.tower.errors import ModelError

pytestmark = pytest.mark.quick_one_in(2)

ROWS = 23
X = np.random.RandomState(0).normal(size=(ROWS, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Own(keras.Model):
    """Holds a metric itself."""

    def __init__(self, metric):
        super().__init__()
        self.hidden, self.out = layers.Dense(4, "tanh"), layers.Dense(1)
        self.seen = metric

    def call(self, x):
        h = self.hidden(x)
        self.seen.update_state(h, h)
        return self.out(h)


def test_what_cannot_be_put_together_is_said_with_what_to_do():
    parallel = towers.multi_gpu_model(Own(LargestOutput(name="seen")), gpus=2)
    parallel.compile("sgd", "mse")
    words = "return what the metric 'seen' takes as an output, and pass the metric to"
    with pytest.raises(ModelError, match=words):
        parallel.fit(X, Y, 5, verbose=0)


def test_run_eagerly_is_named_where_it_hinders():
    parallel = towers.multi_gpu_model(Own(keras.metrics.Mean(name="seen")), gpus=2)
    parallel.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ModelError, match=r"to 'seen/total' .* run_eagerly=False"):
        parallel.fit(X, Y, 5, verbose=0)


def test_a_metric_that_no_layer_holds_is_named():
    apart = keras.metrics.Mean(name="apart")

    class Uses(layers.Layer):
        def call(self, x):
            apart.update_state(x)
            return x

    model = keras.Sequential([keras.Input((6,)), Uses(), layers.Dense(1)])
    parallel = towers.multi_gpu_model(model, gpus=2)
    parallel.compile("sgd", "mse")
    words = "changes 'apart/total'.*make the metric an attribute of the layer"
    with pytest.raises(ModelError, match=words):
        parallel.fit(X, Y, 5, verbose=0)
