"""What stages hold, counted: that a model fits several devices, and not one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import Replicated, multi_gpu_model
from towers.layers import parameters
from towers.layers.pipeline import LayerPlacement, Pipeline
from towers.partition.partitioned import Partitioned, judge
from towers.stages import table

layers = keras.layers
ROWS, WIDTH = 2, 64


def build():
    inputs = keras.Input((WIDTH,))
    h = inputs
    for _ in range(8):
        h = layers.Dense(WIDTH, activation="tanh")(h)
    model = keras.Model(inputs, h)
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def count(model, stages, micro_batches):
    places = LayerPlacement(model, stages)
    pipeline = Pipeline(stages, micro_batches, placement=places)
    spec = tf.TensorSpec([None, WIDTH])
    function, specs = model.train_step, (spec, spec)
    verdict = judge(function, specs, updates_apart=True, pipeline=pipeline)
    tower = Partitioned(verdict).staged(ROWS)
    kept = table.activation_bytes(tower, pipeline, ROWS)
    return table.held_by_stages(pipeline, kept)


def test_a_model_that_is_too_large_for_one_device():
    model = build()
    (one,) = count(model, 1, 8)
    assert one.weights == one.gradients == 4 * model.count_params()
    assert one.slots == 2 * one.weights
    budget = 0.4 * sum(one)
    parts = count(model, 4, 8)
    assert sum(one) > budget >= max(map(sum, parts))
    assert sum(part.weights for part in parts) == one.weights
    # A device keeps what each layer returns, of one micro-batch.
    assert 8 * ROWS * WIDTH * 4 <= one.activations < 2 * 8 * ROWS * WIDTH * 4


def test_a_frozen_layer_has_no_gradient():
    model = build()
    model.layers[1].trainable = False
    (one,) = count(model, 1, 2)
    assert one.weights - one.gradients == 4 * model.layers[1].count_params()


@pytest.mark.slow
def test_a_device_holds_its_shard_of_slots(monkeypatch):
    monkeypatch.setattr(parameters, "MIN_BYTES", 1)
    held = []
    for shards in (False, True):
        model = build()
        parallel = multi_gpu_model(
            model,
            4,
            stages=2,
            variable_update=Replicated(shard_optimizer_state=shards),
        )
        parallel.compile("adam", "mse", jit_compile=False)
        x = np.ones([8, WIDTH], "float32")
        parallel.train_on_batch(x, x)
        held.append(table.held_by_stages(parallel.builder.plan.pipeline, [0, 0]))
    for whole, part in zip(*held, strict=True):
        assert part.slots == pytest.approx(whole.slots / 2, rel=0.01)
        assert (part.weights, part.gradients) == (whole.weights, whole.gradients)
