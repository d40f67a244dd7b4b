"""Describes the stages of a tower: their layers, and the memory that they take."""

import math
from collections.abc import Sequence

import tensorflow as tf

from towers.keras_adapter.optimizers import slots_of
from towers.keras_adapter.variables import bytes_of
from towers.layers import sharded
from towers.layers.pipeline import Pipeline, weighted
from towers.program import words
from towers.stages.schedule import held
from towers.stages.staged import StagedTower


def lines(pipeline: Pipeline, kept: Sequence[int], rows: int) -> list[str]:
    """Returns a table of the stages of a tower.

    Args:
        pipeline: How its devices share the model.
        kept: The bytes of activations that each stage keeps; see `activation_bytes`.
        rows: Examples of a micro-batch.
    """
    model = pipeline.model
    weights, slots = _bytes_of_weights(pipeline)
    cells = [("stage", "layers", "weights", "gradients and slots", "activations")]
    for stage in range(pipeline.stages):
        names = [
            layer.name
            for layer in weighted(model)
            if pipeline.layers.get(id(layer)) == stage
        ]
        sizes = weights[stage], weights[stage] + slots[stage], kept[stage]
        cells.append((str(stage), _listed(names), *map(words.size, sizes)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    first = (
        f"Stages of model '{model.name}', with "
        f"{words.count(pipeline.micro_batches, 'micro-batch', 'micro-batches')} of "
        f"{words.count(rows, 'example')}, schedule {pipeline.schedule}, recompute "
        f"{pipeline.recompute}"
    )
    if any(map(sharded.of, model.variables)):
        first += ", without the tables, which lie on the devices of all stages"

    return [
        f"{first}:",
        *(
            "  ".join(
                cell.ljust(n) for cell, n in zip(row, widths, strict=True)
            ).rstrip()
            for row in cells
        ),
    ]


def activation_bytes(tower: StagedTower, pipeline: Pipeline, rows: int) -> list[int]:
    """Returns the bytes that each stage keeps for the way back, at most.

    Args:
        tower: The tower, as it trains.
        pipeline: How its devices share the model.
        rows: Examples of a micro-batch, where the graph does not know it.
    """
    kept = [0] * pipeline.stages
    at_most = held(tower.turns, pipeline.micro_batches, pipeline.schedule)
    for turn, count, made in zip(tower.turns, at_most, tower.kept(), strict=True):
        kept[turn.stage] += count * sum(_bytes(tensor, rows) for tensor in made)
    return kept


def _bytes(tensor, rows):
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    if tensor.shape.rank is None:
        return 0
    sizes = [rows if n is None else n for n in tensor.shape]
    return math.prod(sizes) * tensor.dtype.size


def _bytes_of_weights(pipeline):
    """For each stage, the bytes of weights, and those of the optimizer's slots.

    What is cut is on the devices of all stages.
    """
    model = pipeline.model
    weights, slots = [0] * pipeline.stages, [0] * pipeline.stages
    stage_of = pipeline.stage_of
    for variable in model.variables:
        if sharded.of(variable) is not None:
            continue
        weights[stage_of(variable)] += bytes_of(variable)
        if variable.trainable and model.optimizer is not None:
            mine = slots_of(model.optimizer, variable)
            slots[stage_of(variable)] += sum(map(bytes_of, mine))
    return weights, slots


def _listed(names: Sequence[str]) -> str:
    if len(names) < 3:
        return ", ".join(names)
    return f"{names[0]} to {names[-1]} ({len(names)})"
