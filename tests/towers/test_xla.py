"""XLA compiles towers wherever they are, and where it cannot, a line says so.

A tower that XLA compiles may read nothing from another device than its own: in the
table one tower is away from home, where variables, losses and metrics are.
"""

import dataclasses
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import oracle
from tests.exact import oracle as exact
from tests.exact.cases import CASES
from tests.towers.test_exact_cases import _alone

HOME, AWAY = "/device:CPU:0", "/device:CPU:1"
GROUPS = "losses", "metrics", "state"
# To compile them all takes ten minutes. These are: the tracked losses of several
# outputs, a gathered loss, weights that a layer assigns, and integers.
QUICK = (
    "batches/dict of outputs, each with loss, loss weight, metrics, sample weights",
    "losses/Dice",
    "state/SpectralNormalization, 1 iterations",
    "state/counter, int64",
)
TABLE = [
    case
    for case in CASES
    if str(case) in QUICK or (case.group in GROUPS and "TOWERS_EXACT_ALL" in os.environ)
    if case.expect != "stateful"  # refused before anything is compiled
]


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_compiled_away_from_home(case):
    built = []

    def wrap(model):
        parallel = towers.multi_gpu_model(model, [AWAY], home=HOME, **case.options)
        built.append(parallel.builder)
        return parallel

    case = dataclasses.replace(
        _alone(case),
        name=f"{case.name}, compiled",
        batches=lambda batches=case.batches: batches()[:1],
        compile=lambda compile=case.compile: compile() | {"jit_compile": True},
        between=None,
    )
    found = exact.outcome(case, wrap, later=("evaluate",))
    assert found["verdict"] == "equal", found
    assert built[0].compiled


def test_the_quick_ones_are_cases():
    assert {*QUICK} <= {str(case) for case in CASES}


@keras.saving.register_keras_serializable("test_xla")
class Scaled(keras.layers.Layer):
    """A layer that reads a variable that is not the model's."""

    scale = tf.Variable(2.0)

    def call(self, x):
        return x * self.scale


def _scaled_error(y, predicted):
    return keras.ops.mean(keras.ops.square(y - predicted), axis=-1) * Scaled.scale


@pytest.mark.parametrize(
    ("layers", "loss"), [([Scaled], "mse"), ([], _scaled_error)], ids=["layer", "loss"]
)
def test_what_is_on_another_device_goes_on_without(capsys, layers, loss):
    x = np.random.default_rng(0).normal(size=(7, 6)).astype("float32")

    def weights(wrap, **options):
        keras.utils.set_random_seed(7)
        body = [keras.Input((6,)), *[kind() for kind in layers], keras.layers.Dense(1)]
        model = keras.Sequential(body)
        trained = wrap(model)
        trained.compile("sgd", loss, **options)
        trained.train_on_batch(x, x[:, :1])
        return model.get_weights()

    expected = weights(lambda model: model, run_eagerly=True)
    capsys.readouterr()
    ours = weights(lambda model: towers.multi_gpu_model(model, 2), jit_compile=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("XLA cannot compile model")
    assert "a tower reads 'Variable" in line and "not a variable of the model" in line
    assert oracle.largest_difference(ours, expected) < 1e-5
