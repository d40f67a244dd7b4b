"""A small tower, traced and cut."""

import functools

import tensorflow as tf

from towers.layers.labels import Labels
from towers.layers.pipeline import Pipeline, Placement
from towers.stages.staged import StagedTower
from towers.tower import passes
from towers.tower.traced import Traced


def cut(model, stages, placement="auto", recompute="none"):
    """Traces and cuts a tower that returns outputs, and a sum's gradients."""
    placed = Placement(model, stages, placement)
    pipeline = Pipeline(stages, 2, "1f1b", recompute, placed)
    labels = Labels(pipeline.parts)
    x = [tf.TensorSpec(each.shape, each.dtype) for each in model.inputs]
    specs = [
        [tf.TensorSpec(v.shape, v.dtype) for v in model.trainable_variables],
        [tf.TensorSpec(v.shape, v.dtype) for v in model.non_trainable_variables],
        x[0] if len(x) == 1 else x,
        tf.TensorSpec([], tf.float32),
    ]
    function = functools.partial(passes.probe, model, True)
    traced = Traced(function, specs, False, False, labels=labels)
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    return StagedTower(traced, labels, pipeline, variables)
