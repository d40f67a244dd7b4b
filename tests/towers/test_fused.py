"""Fused kernels against Keras's own operations."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import fused


class Own(keras.layers.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return inputs + 1


def _layer(shape=(8, 5, 5, 3), **options):
    make = options.pop("make", keras.layers.BatchNormalization)
    layer = make(**options)
    layer.build((None, *shape[1:]))
    random = np.random.default_rng(0)
    for weight in layer.weights:
        weight.assign(random.uniform(0.5, 1.5, weight.shape))
    x = random.normal(2, 3, shape).astype("float32")
    return layer, tf.constant(x)


def _step(layer, x):
    """Outputs, gradients and new statistics of one training step."""
    weights = layer.trainable_variables
    state = [(v, tf.constant(v.value)) for v in layer.non_trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(x)
        with keras.StatelessScope(state) as scope:
            outputs = layer(x, training=True)
        target = tf.reduce_sum(tf.sin(tf.cast(outputs, tf.float32)))
    gradients = tape.gradient(target, [x, *(w.value for w in weights)])
    return [
        outputs,
        *gradients,
        *(scope.get_current_value(v) for v, _ in state),
    ]


def _kernels(layer, x):
    with fused.batch_normalization():
        traced = tf.function(lambda x: layer(x, training=True)).get_concrete_function(x)
    operations = traced.graph.get_operations()
    return sum(op.type == "FusedBatchNormV3" for op in operations)


class OwnMoments(keras.layers.BatchNormalization):
    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean * 0, variance


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": False},
        {"center": False},
        {"momentum": 0.5, "epsilon": 0.1, "axis": 3},
        {"shape": (1, 7, 1, 2)},
        {"shape": (1, 1, 1, 2)},
    ],
)
def test_the_kernel_gives_keras_numbers(options):
    layer, x = _layer(**options)
    expected = _step(layer, x)
    with fused.batch_normalization():
        ours = _step(layer, x)
    assert _kernels(layer, x) == 1
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"shape": (8, 3)},
        {"axis": 1},
        {"epsilon": 1e-7},
        {"dtype": "mixed_float16"},
        {"trainable": False},
        {"renorm": True},
        {"make": Own},
        {"make": OwnMoments},
    ],
    ids=str,
)
def test_where_it_does_not_fit_the_layer_is_keras_own(options):
    layer, x = _layer(**options)
    expected = layer(x, training=True)
    assert _kernels(layer, x) == 0
    layer, x = _layer(**options)
    with fused.batch_normalization():
        np.testing.assert_array_equal(layer(x, training=True), expected)


def test_inference_and_the_outside_are_keras_own():
    layer, x = _layer()
    with fused.batch_normalization():
        inside = layer(x, training=False)
    np.testing.assert_array_equal(inside, layer(x, training=False))
    assert "fused" not in keras.layers.BatchNormalization.call.__module__


def test_a_mask_is_respected():
    layer, x = _layer()
    mask = tf.constant(np.random.default_rng(1).uniform(size=(8, 5, 5)) > 0.5)
    expected = layer(x, training=True, mask=mask)
    layer, x = _layer()
    with fused.batch_normalization():
        ours = layer(x, training=True, mask=mask)
    np.testing.assert_array_equal(ours, expected)


class OwnStep(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient)


def _train(optimizer, gradients, dtype="float32"):
    """Applies gradients in turn; returns all variables and how often the kernel ran."""
    start = np.random.default_rng(1).normal(size=(6, 4))
    variable = keras.Variable(start, dtype=dtype)
    optimizer.build([variable])
    apply = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
    for gradient in gradients:
        apply(gradient)
    graph = apply.get_concrete_function(gradients[0]).graph
    types = [operation.type for operation in graph.get_operations()]
    kernels = types.count("ResourceApplyKerasMomentum")
    return [v.numpy() for v in (variable, *optimizer.variables)], kernels


def _gradients(sparse=False):
    random = np.random.default_rng(2)
    for _ in range(3):
        values = tf.constant(random.normal(size=(6, 4)), tf.float32)
        if sparse:
            yield tf.IndexedSlices(values[:2], tf.constant([1, 4]), tf.constant([6, 4]))
        else:
            yield values


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": True},
        {"weight_decay": 0.1, "clipnorm": 0.5, "use_ema": True},
        {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)},
        {"gradient_accumulation_steps": 2},
    ],
    ids=["plain", "nesterov", "with all", "schedule", "accumulation"],
)
def test_momentum_in_one_kernel_gives_keras_numbers(options):
    options = {"learning_rate": 0.1, "momentum": 0.9} | options
    expected, none = _train(keras.optimizers.SGD(**options), list(_gradients()))
    with fused.updates():
        ours, _ = _train(keras.optimizers.SGD(**options), list(_gradients()))
    assert none == 0
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "make, options, sparse, dtype, kernels",
    [
        (keras.optimizers.SGD, {"momentum": 0.9}, False, "float32", 1),
        (keras.optimizers.SGD, {}, False, "float32", 0),
        (keras.optimizers.SGD, {"momentum": 0.9}, True, "float32", 0),
        (keras.optimizers.SGD, {"momentum": 0.9}, False, "float64", 0),
        (OwnStep, {"momentum": 0.9}, False, "float32", 0),
    ],
)
def test_where_the_update_is_one_kernel(make, options, sparse, dtype, kernels):
    gradients = list(_gradients(sparse))
    expected, _ = _train(make(0.1, **options), gradients, dtype)
    with fused.updates():
        ours, found = _train(make(0.1, **options), gradients, dtype)
    assert found == kernels
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
