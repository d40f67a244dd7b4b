"""Each class of `keras.layers` in a stage of its own, against the same graph whole."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.towers.analysis import layers as every
from tests.towers.stages.stage import traced
from tests.variants import slow
from towers.analysis.layer_calls import key
from towers.layers.pipeline import LayerPlacement, Pipeline

COMPUTED = "trusted", "proved", "at home", "by design"
ROWS = [
    row
    for row in every.table()
    if row.outcome in COMPUTED and row.inputs in every.INPUTS
]


class Scale(layers.Layer):
    """Makes what is in front of a layer, and behind it, depend on a weight."""

    def build(self, _):
        self.scale = self.add_weight(shape=[], initializer="ones")

    def call(self, x):
        return tf.cast(self.scale, x.dtype) * x


class Around(keras.Model):
    """Has a layer on a stage of its own."""

    def __init__(self, layer):
        super().__init__()
        self.before, self.layer, self.behind = Scale(), layer, Scale()

    def call(self, x, training=None):
        mode = {"training": training} if self.layer._call_has_training_arg else {}
        arguments = every._arguments(self.layer, _scaled(self.before, x))
        return _scaled(self.behind, self.layer(*arguments, **mode))


def _scaled(scale, x):
    return tf.nest.map_structure(lambda t: scale(t) if t.dtype.is_floating else t, x)


def compare(row, recompute):
    x = every.INPUTS[row.inputs]
    x = tf.nest.map_structure(tf.convert_to_tensor, x)
    kind = every.classes()[row.kind]
    layer = eval(f"kind({row.arguments})", {"kind": kind, "layers": layers})
    # Some keep tensors where they are built.
    layer(*every._arguments(layer, x))
    model = Around(layer)
    model(x)
    parts = {id(each): k for k, each in enumerate([model.before, layer, model.behind])}
    placement = LayerPlacement(model, 3, layers=parts)
    pipeline = Pipeline(3, 1, recompute=recompute, placement=placement)
    spec = tf.nest.map_structure(every._spec, every.INPUTS[row.inputs])
    function, staged = traced(model, pipeline, spec)
    before = [np.array(variable) for variable in model.variables]
    trained = [tf.convert_to_tensor(each.value) for each in model.trainable_variables]
    whole = tf.nest.flatten(function(x, trained), expand_composites=True)
    for variable, value in zip(model.variables, before, strict=True):
        # The next call draws the same.
        variable.assign(value)
    given = tf.nest.flatten([x, trained], expand_composites=True)
    made = dict(zip(map(key, staged.inputs), given, strict=True))
    for phase in staged.phases:
        values, _ = phase([made[each] for each in phase.takes])
        made.update(zip(phase.makes, values, strict=True))
    for expected, tensor in zip(whole, staged.outputs, strict=True):
        if tensor.dtype != tf.string:
            np.testing.assert_allclose(made[key(tensor)], expected, 1e-5, 1e-6)
    return staged


FIRST = {row.kind: row for row in reversed(ROWS)}


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [slow(kind, how) for kind in sorted(FIRST) for how in ("none", "stage")],
)
def test_a_layer_in_a_stage_computes_the_same(kind, recompute):
    compare(FIRST[kind], recompute)
