"""What an update costs: operations for each variable, in the graph that is executed."""

import contextlib
import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import executed
from towers import fused

optimizers = keras.optimizers
_numbers = itertools.count()

OPTIMIZERS = {
    "SGD": optimizers.SGD,
    "SGD, momentum": lambda: optimizers.SGD(momentum=0.9),
    "RMSprop": optimizers.RMSprop,
    "Adam": optimizers.Adam,
    "Adam, amsgrad": lambda: optimizers.Adam(amsgrad=True),
    "Adam, schedule": lambda: optimizers.Adam(optimizers.schedules.CosineDecay(0.1, 9)),
    "Adam, clipnorm, use_ema": lambda: optimizers.Adam(clipnorm=1.0, use_ema=True),
    "AdamW": optimizers.AdamW,
    "AdamW, schedule": lambda: optimizers.AdamW(
        optimizers.schedules.CosineDecay(0.1, 9)
    ),
    "Adagrad": optimizers.Adagrad,
    "Adadelta": optimizers.Adadelta,
    "Adamax": optimizers.Adamax,
    "Nadam": optimizers.Nadam,
    "Adafactor": optimizers.Adafactor,
    "Ftrl": optimizers.Ftrl,
    "Lion": optimizers.Lion,
    "Lamb": optimizers.Lamb,
    "Muon": optimizers.Muon,
    "ScheduleFreeAdamW": optimizers.ScheduleFreeAdamW,
    "LossScaleOptimizer, SGD": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(momentum=0.9)
    ),
    "LossScaleOptimizer, Adam": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam()
    ),
}
# Operations for a variable, the mean of a matrix's and a vector's: as Keras does it,
# and as we do.
TABLE = {
    "SGD": (2, 2),
    "SGD, momentum": (5, 1),
    "RMSprop": (10, 10),
    "Adam": (21, 12),
    "Adam, amsgrad": (23, 14),
    "Adam, schedule": (21, 12),
    "Adam, clipnorm, use_ema": (37, 24),
    "AdamW": (24, 15),
    "AdamW, schedule": (32, 15),
    "Adagrad": (7, 7),
    "Adadelta": (19, 19),
    "Adamax": (16, 12),
    "Nadam": (36, 21),
    "Adafactor": (36, 26),
    "Ftrl": (22, 19),
    "Lion": (10, 10),
    "Lamb": (32, 26),
    "Muon": (42.5, 38),
    "ScheduleFreeAdamW": (26, 20),
    "LossScaleOptimizer, SGD": (11, 7),
    "LossScaleOptimizer, Adam": (28, 19),
}
# Nothing is computed, or launched on a GPU, for these.
_FREE = "Const", "Identity", "NoOp", "ReadVariableOp", "_Recv", "_Send", "Shape"


def _trained(make, ours, pairs=2, steps=1):
    """Updates so many matrices and vectors.

    Returns:
        All variables, and how many operations an update has executed.
    """
    optimizer, random = make(), np.random.default_rng(0)
    variables = [
        keras.Variable(random.normal(size=shape), dtype="float32")
        for _ in range(pairs)
        for shape in [(6, 4), (4,)]
    ]
    optimizer.build(variables)
    name = f"apply_{next(_numbers)}"

    @tf.function(autograph=False)
    def update(gradients):
        with fused.updates() if ours else contextlib.nullcontext():
            with tf.name_scope(name):
                optimizer.apply(gradients, variables)

    def train():
        for _ in range(steps):
            gradients = [random.normal(size=v.shape) for v in variables]
            update([tf.constant(gradient, tf.float32) for gradient in gradients])

    nodes = executed.run(train, name)
    found = [v.numpy() for v in (*variables, *optimizer.variables)]
    return found, _operations(nodes, name)


def _operations(nodes, name):
    return sum(
        f"{name}/" in node.name and node.op not in _FREE
        for each in nodes.values()
        for node in each
    )


@pytest.mark.parametrize(("name", "expected"), TABLE.items(), ids=TABLE)
def test_what_all_variables_share_is_computed_once(name, expected):
    found = []
    for ours in False, True:
        fewer, more = (_trained(OPTIMIZERS[name], ours, n)[1] for n in (1, 3))
        found.append((more - fewer) / 4)
    assert tuple(found) == expected


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_are_keras_own_to_the_last_bit(name):
    expected, _ = _trained(OPTIMIZERS[name], False, steps=4)
    found, _ = _trained(OPTIMIZERS[name], True, steps=4)
    # Momentum's kernel rounds in its own way.
    tolerance = 1e-6 if "SGD" in name else 0
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


class Counting(keras.optimizers.Adam):
    """Assigns what others only read."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        self._iterations.assign_add(1)


def test_an_update_of_the_users_own_reads_for_itself():
    expected, _ = _trained(Counting, False, steps=3)
    found, _ = _trained(Counting, True, steps=3)
    np.testing.assert_equal(found, expected)


def _fail(*arguments):
    raise KeyError


def test_after_a_failure_variables_are_read_again(monkeypatch):
    _fail.__module__ = keras.optimizers.Adam.__module__
    monkeypatch.setattr(keras.optimizers.Adam, "update_step", _fail)
    optimizer, variable = keras.optimizers.Adam(), keras.Variable([1.0])
    optimizer.build([variable])
    with pytest.raises(KeyError), fused.updates():
        optimizer.apply([tf.constant([1.0])], [variable])
    optimizer.iterations.assign(7)
    assert int(optimizer.iterations + 0) == 7


@pytest.mark.parametrize("builder", ["parameter_server", "replicated", "asynchronous"])
def test_builders_update_so(builder):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4) for _ in range(4)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    parallel = towers.multi_gpu_model(model, 2, builder=builder)
    parallel.compile("adam", "mse")
    x = np.ones((4, 4), "float32")
    fit = functools.partial(parallel.fit, x, x, batch_size=4, verbose=0)
    nodes = executed.run(fit, "apply/adam")
    # On each device that has the variables.
    counts = [
        sum(node.op == "Pow" and "apply" in node.name for node in each)
        for each in nodes.values()
    ]
    assert max(counts) == 2
