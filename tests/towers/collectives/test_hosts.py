"""Pieces ask the plan's hosts for whatever several hosts have to put together."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.variants import slow
from towers import multi_gpu_model
from towers.collectives.hosts import OneHost
from towers.plan import Plan


class TwoEqualHosts(OneHost):
    """As if another host had the same batches: together they are one batch of twice."""

    count = 2

    def sum(self, tensors):
        return tf.nest.map_structure(
            lambda each: None if each is None else each + each, tensors
        )


def _trained(builder, loss):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    parallel = multi_gpu_model(model, gpus=2, variable_update=builder)
    parallel.compile("sgd", loss, weighted_metrics=["mae"])
    random = np.random.default_rng(0)
    x, y, weights = (random.normal(size=(10, n)).astype("float32") for n in (4, 1, 1))
    options = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0}
    history = parallel.fit(x, y, sample_weight=np.abs(weights[:, 0]), **options)
    return [*history.history.values(), *(v.numpy() for v in model.variables)]


@pytest.mark.parametrize("loss", ["mse", slow("kl_divergence")])
@pytest.mark.parametrize("builder", ["parameter_server", "replicated"])
def test_a_mean_over_two_equal_hosts_is_that_of_one(builder, loss, monkeypatch):
    expected = _trained(builder, loss)
    of = Plan.of
    monkeypatch.setattr(
        Plan, "of", lambda *args: dataclasses.replace(of(*args), hosts=TwoEqualHosts())
    )
    found = _trained(builder, loss)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
