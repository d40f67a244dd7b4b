"""Each class of `keras.layers` in a stage of its own, against the same graph whole."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.towers.analysis import layers as every
from tests.variants import slow
from towers.analysis.layer_calls import key
from towers.layers.labels import Labels
from towers.layers.pipeline import Pipeline, Placement
from towers.stages.staged import StagedTower
from towers.tower import passes
from towers.tower.traced import Traced

COMPUTED = "trusted", "proved", "compared", "by design"
ROWS = [row for row in every.table() if row.outcome in COMPUTED]


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
    placement = Placement(model, 3, layers=parts)
    pipeline = Pipeline(3, 1, recompute=recompute, placement=placement)
    labels = Labels(parts)
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    values = [tf.convert_to_tensor(variable.value) for variable in variables]
    split = len(model.trainable_variables)
    arguments = [values[:split], values[split:], x, tf.ones([])]
    specs = [
        *tf.nest.map_structure(tf.type_spec_from_value, arguments[:2]),
        tf.nest.map_structure(every._spec, every.INPUTS[row.inputs]),
        tf.TensorSpec([]),
    ]
    probe = functools.partial(passes.probe, model, True)
    traced = Traced(probe, specs, False, False, labels=labels)
    staged = StagedTower(traced, labels, pipeline, variables)
    given = tf.nest.flatten(arguments, expand_composites=True)
    made = dict(zip(map(key, traced.inputs), given, strict=True))
    for phase in staged.phases:
        values, _ = phase([made[each] for each in phase.takes])
        made.update(zip(phase.makes, values, strict=True))
    whole = tf.nest.flatten(traced(*arguments), expand_composites=True)
    inside = tf.nest.flatten(traced.returned, expand_composites=True)
    for expected, tensor in zip(whole, inside, strict=True):
        if tensor is not None and tensor.dtype != tf.string:
            np.testing.assert_allclose(made[key(tensor)], expected, 1e-5, 1e-6)
    return staged


FIRST = {row.kind: row for row in reversed(ROWS)}


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [slow(kind, how) for kind in sorted(FIRST) for how in ("none", "stage")],
)
def test_a_layer_in_a_stage_computes_the_same(kind, recompute):
    compare(FIRST[kind], recompute)
