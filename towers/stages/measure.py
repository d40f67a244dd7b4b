"""Measures how long each layer of a model takes, forward and backward.

The graph of a tower is cut layer by layer, as it is cut into stages otherwise, and its
phases run one after another, on one device, with zeros for a batch.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from towers.analysis.layer_calls import key
from towers.analysis.rules import Rules
from towers.layers.labels import Labels
from towers.layers.pipeline import Pipeline, Placement
from towers.layers.variables import not_trained
from towers.stages.staged import StagedTower
from towers.tower import passes
from towers.tower.traced import Traced

_ROUNDS = 3


def seconds_of_layers(
    model: keras.Model,
    layers: dict[int, int],
    local_batch: Any,
    device: str,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Measures a built and compiled model.

    Args:
        model: The model.
        layers: The number of each layer that is to be told apart, by its `id`, from 0.
            What no such layer computes counts for the one that it takes from.
        local_batch: The specs of (x, y, sample_weight) of a micro-batch, of known
            shapes.
        device: Where to compute.
        clock: Returns seconds.

    Returns:
        The seconds that each layer takes, the least of some rounds.
    """
    values = [tf.convert_to_tensor(variable.value) for variable in _variables(model)]
    split = len(model.trainable_variables)
    one = tf.ones([])
    data = tf.nest.map_structure(_zeros, local_batch)
    arguments = [values[:split], values[split:], data, one, one, []]
    pipeline = Pipeline(len(layers), placement=Placement(model, layers=layers))
    staged = tower_alone(pipeline, local_batch)
    seconds = [0.0] * len(layers)
    rounds = [_seconds(staged, arguments, device, clock) for _ in range(_ROUNDS)]
    for phase, *taken_s in zip(staged.phases, *rounds, strict=True):
        seconds[phase.place.part] += min(taken_s)
    return seconds


def tower_alone(pipeline: Pipeline, local_batch: Any) -> StagedTower:
    """Traces a tower, and cuts it, without a device, a step or a value.

    Args:
        pipeline: How its devices share a built and compiled model.
        local_batch: The specs of (x, y, sample_weight) of a micro-batch, of known
            shapes.
    """
    model, variables = pipeline.model, _variables(pipeline.model)
    values = [tf.TensorSpec(each.shape, each.dtype) for each in variables]
    split, one = len(model.trainable_variables), tf.TensorSpec([])
    specs = [values[:split], values[split:], local_batch, one, one, []]
    labels = Labels(pipeline.parts)
    tower = functools.partial(passes.forward_backward, model, Rules(1))
    traced = Traced(tower, specs, xla=False, noinline=False, labels=labels)
    return StagedTower(traced, labels, pipeline, variables)


def _variables(model):
    return [*model.trainable_variables, *not_trained(model)]


def _seconds(staged, arguments, device, clock):
    """Runs all phases; returns the seconds of each."""
    flat = tf.nest.flatten(arguments, expand_composites=True)
    given = [value for value in flat if value is not None]
    made = dict(zip(map(key, staged.traced.inputs), given, strict=True))
    seconds = []
    for phase in staged.phases:
        begun_s = clock()
        with tf.device(device):
            found, _ = phase([made[each] for each in phase.takes])
        for value in found[:1]:
            # All of a phase comes at once.
            if value.dtype not in (tf.resource, tf.variant):
                value.numpy()
        seconds.append(clock() - begun_s)
        made.update(zip(phase.makes, found, strict=True))
    return seconds


def _zeros(spec):
    return None if spec is None else tf.zeros(spec.shape, spec.dtype)
