"""Recurrent layers in a step of a model's own: what they read, assign and add."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import multi_gpu_model
from towers.partition.partitioned import judge

_L = keras.layers
X = np.random.default_rng(0).normal(size=[13, 5, 3]).astype("float32")
Y = X[:, 0, :2]


class Cell(_L.Layer):
    """A cell of a user's own, which may do more than compute.

    Attributes:
        does: What more: "assigns" a weight, or "draws" by the seed that layers share.
    """

    def __init__(self, does=""):
        super().__init__()
        self.units = self.state_size = 4
        self.does = does

    def build(self, shape):
        """Creates a kernel, and a factor."""
        self.kernel = self.add_weight(shape=(7, 4))
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, x, states):
        """Computes the next state."""
        if self.does == "assigns":
            self.factor.assign(self.factor * 0.9)
        both = keras.ops.concatenate([x, states[0]], axis=1)
        state = keras.ops.tanh(keras.ops.matmul(both, self.kernel) * self.factor)
        if self.does == "draws":
            state = state + 0.1 * keras.random.normal((4,))
        return state, [state]


class Assigns(_L.LSTM):
    """Assigns a weight before it is called."""

    def call(self, sequences, initial_state=None, mask=None, training=False):
        """Computes what the layer of Keras's does."""
        self.cell.bias.assign(self.cell.bias * 0.9)
        return super().call(sequences, initial_state, mask, training)


LAYERS = {
    "a layer that assigns": lambda: Assigns(4, unroll=True),
    "frozen": lambda: _L.LSTM(4, trainable=False),
    "dropout": lambda: _L.LSTM(4, dropout=0.2, recurrent_dropout=0.1),
    "a loss of its activities": lambda: _L.GRU(4, activity_regularizer="l2"),
    "a cell of one's own": lambda: _L.RNN(Cell()),
    "a cell that assigns": lambda: _L.RNN(Cell("assigns"), unroll=True),
    "a cell that draws": lambda: _L.RNN(Cell("draws"), unroll=True),
    "both ways": lambda: _L.Bidirectional(_L.LSTM(2)),
    "two cells": lambda: _L.RNN([_L.GRUCell(3), _L.LSTMCell(4)]),
}


class OfKeras(keras.Model):
    """Defines the step that Keras has."""

    def train_step(self, data):
        """Trains on x and y."""
        return super().train_step(data)


@pytest.mark.parametrize("name", LAYERS)
def test_numbers_are_those_of_one_device(name):
    def trained(wrap):
        keras.utils.set_random_seed(3)
        inputs = keras.Input([5, 3])
        model = OfKeras(inputs, _L.Dense(2)(LAYERS[name]()(inputs)))
        parallel = wrap(model)
        parallel.compile(keras.optimizers.Adam(0.05, epsilon=1e-4), "mse")
        how = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        losses = parallel.fit(X, Y, **how).history["loss"]
        return [*model.get_weights(), losses]

    found = trained(lambda model: multi_gpu_model(model, 2))
    wanted = trained(lambda model: model)
    for mine, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, other, rtol=5e-5, atol=5e-6)


@pytest.mark.parametrize("name", ["dropout", "two cells", "frozen"])
def test_weights_are_read_before_the_loop(name):
    inputs = keras.Input([5, 3])
    model = OfKeras(inputs, _L.Dense(2)(LAYERS[name]()(inputs)))
    model.compile("sgd", "mse")
    spec = tf.TensorSpec([None, 5, 3]), tf.TensorSpec([None, 2])
    graph = judge(model.train_step, spec).trace.graph.as_graph_def()
    called = {f.signature.name: f for f in graph.library.function}
    loops = [
        called[node.attr[part].func.name]
        for node in graph.node
        for part in ("cond", "body")
        if node.op in ("StatelessWhile", "While")
    ]
    assert loops
    assert not [n.name for f in loops for n in f.node_def if n.op == "ReadVariableOp"]
