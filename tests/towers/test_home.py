"""Where variables live if towers are on GPUs, which logical CPUs stand in for."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

from towers import multi_gpu_model, variables

GPUS = "/device:CPU:1", "/device:CPU:2"


@pytest.fixture
def gpus(monkeypatch):
    """Logical CPUs that are taken for GPUs."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("towers.") and hasattr(module, "is_gpu"):
            monkeypatch.setattr(module, "is_gpu", lambda device: device in GPUS)
    return GPUS


class Counts(keras.layers.Layer):
    """Has a variable of a type that GPUs do not have, and a seed made late."""

    def build(self, shape):
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        self.count.assign_add(1)
        return keras.random.dropout(x, 0.5, seed=self.seed) if training else x


class Subclassed(keras.Model):
    """Is built by its first batch."""

    def __init__(self):
        super().__init__()
        self.hidden = [keras.layers.Dense(4), keras.layers.Dropout(0.5, seed=2)]
        self.counts, self.last = Counts(), keras.layers.Dense(1)

    def call(self, x):
        for layer in (*self.hidden, self.counts, self.last):
            x = layer(x)
        return x


def _batches(rows=14, size=8):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(size)


@pytest.mark.parametrize("builder", ["parameter_server", "replicated"])
@pytest.mark.parametrize("steps", [1, 2])
def test_what_gpus_cannot_hold_stays_on_the_host(gpus, builder, steps):
    model = Subclassed()
    parallel = multi_gpu_model(model, gpus, home=gpus[0], builder=builder)
    parallel.compile("adam", "mse", steps_per_execution=steps)
    parallel.fit(_batches(), verbose=0)
    places = {v.path: v.value.device[-len(gpus[0]) :] for v in variables.of(model)}
    hosted = {path for path, place in places.items() if place == "/device:CPU:0"}
    assert {path.rpartition("/")[2] for path in hosted} == {
        "seed_generator_state",
        "variable",  # the counter
    }
    assert {places[path] for path in places.keys() - hosted} == {gpus[0]}
    # They have arrived.
    values = [variable.value for variable in variables.of(model)]
    parallel.fit(_batches(), verbose=0)
    assert all(
        variable.value is value
        for variable, value in zip(variables.of(model), values, strict=True)
    )
    assert int(model.counts.count) == 4


def test_types_that_gpus_do_not_have():
    registered = kernels.get_registered_kernels_for_op("VarHandleOp").kernel
    on_gpus = {
        tf.as_dtype(dtype)
        for kernel in registered
        if kernel.device_type in ("GPU", "DEFAULT")
        for constraint in kernel.constraint
        for dtype in constraint.allowed_values.list.type
    }
    integers = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    floats = ["float16", "bfloat16", "float32", "float64"]
    for name in [*integers, *floats, "float8_e4m3fn", "float8_e5m2", "bool", "string"]:
        dtype = tf.as_dtype(name)
        assert (dtype in on_gpus) != (dtype in variables.NOT_ON_GPUS), name


def test_the_usual_batch_is_the_first(gpus):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    parallel = multi_gpu_model(model, gpus)
    parallel.compile("sgd", "mse")
    assert parallel.builder.usual_rows is None
    history = parallel.fit(_batches(), epochs=2, verbose=0)
    assert parallel.builder.usual_rows == 8
    assert len(history.history["loss"]) == 2
