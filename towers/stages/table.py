"""Describes the stages of a tower: their layers, and the memory that they take."""

import collections
from collections.abc import Sequence
from typing import NamedTuple

from towers.keras_adapter.optimizers import slots_of
from towers.keras_adapter.variables import bytes_of
from towers.layers import sharded
from towers.layers.parameters import ShardedParameter
from towers.layers.pipeline import Pipeline, weighted
from towers.program import words
from towers.stages.staged import Staged
from towers.stages.work import numbers


class Held(NamedTuple):
    """The bytes that a stage holds in the memory of its device.

    Attributes:
        weights: The model's variables.
        gradients: The gradients of the trainable variables.
        slots: The optimizer's variables, on the fullest device of the stage.
        activations: The maximum of the activations kept for the backward pass.
    """

    weights: int
    gradients: int
    slots: int
    activations: int


def held_by_stages(pipeline: Pipeline, kept: Sequence[int]) -> list[Held]:
    """Returns the memory of each stage, without tables on the devices of all stages.

    Parameters in parts count as whole, as devices gather them in a step.

    Args:
        pipeline: Describes how the devices of a tower share the model, which is built.
        kept: The bytes of activations that each stage keeps; see `activation_bytes`.
    """
    model = pipeline.model
    weights, gradients = [0] * pipeline.stages, [0] * pipeline.stages
    slots = [collections.Counter() for _ in weights]
    stage_of = pipeline.stage_of
    for variable in model.variables:
        if _is_table(variable):
            continue
        stage = stage_of(variable)
        weights[stage] += bytes_of(variable)
        if variable.trainable:
            gradients[stage] += bytes_of(variable)
        if variable.trainable and model.optimizer is not None:
            for slot in slots_of(model.optimizer, variable):
                for shard in sharded.places(slot):
                    slots[stage][shard.device] += bytes_of(shard)
    fullest = (max(bytes_on.values(), default=0) for bytes_on in slots)
    return [*map(Held, weights, gradients, fullest, kept)]


def lines(pipeline: Pipeline, kept: Sequence[int], rows: int) -> list[str]:
    """Returns a table of the stages of a tower.

    Args:
        pipeline: Describes how the tower's devices share the model.
        kept: The bytes of activations that each stage keeps; see `activation_bytes`.
        rows: The number of examples of a micro-batch.
    """
    model = pipeline.model
    held_by = held_by_stages(pipeline, kept)
    cells = [("stage", "layers", "weights", "gradients and slots", "activations")]
    for stage in range(pipeline.stages):
        names = [
            layer.name
            for layer in weighted(model)
            if pipeline.layers.get(id(layer)) == stage
        ]
        held = held_by[stage]
        sizes = held.weights, held.gradients + held.slots, held.activations
        cells.append((str(stage), _listed(names), *map(words.size, sizes)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    first = (
        f"Stages of model '{model.name}', with "
        f"{words.count(pipeline.micro_batches, 'micro-batch', 'micro-batches')} of "
        f"{words.count(rows, 'example')}, schedule {pipeline.schedule}, recompute "
        f"{pipeline.recompute}"
    )
    if any(map(_is_table, model.variables)):
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


def _is_table(variable):
    """Returns whether a variable is on the devices of all stages, as tables are."""
    parts = sharded.of(variable)
    return parts is not None and not isinstance(parts, ShardedParameter)


def activation_bytes(
    towers: Sequence[Staged], pipeline: Pipeline, rows: int
) -> list[int]:
    """Returns the maximum of the bytes that each stage keeps for the backward pass.

    Args:
        towers: The functions that a tower computes in a training step, in order.
        pipeline: Describes how the tower's devices share the model.
        rows: The number of examples of a micro-batch, for sizes unknown to the graph.
    """
    kept = [_kept_at_most(staged, pipeline, rows) for staged in towers]
    return [*map(sum, zip([0] * pipeline.stages, *kept, strict=True))]


def _kept_at_most(tower, pipeline, rows):
    now, most = [0] * pipeline.stages, [0] * pipeline.stages
    kept, freed = [], [0] * len(tower.turns)
    for tensors in tower.kept():
        sizes = [
            (numbers(tensor, rows) * tensor.dtype.size, last)
            for tensor, last in tensors
        ]
        kept.append(sum(size for size, _ in sizes))
        for size, last in sizes:
            freed[last] += size
    for slot in tower.slots(pipeline.micro_batches):
        stage = tower.turns[slot.turn].stage
        now[stage] += kept[slot.turn]
        most[stage] = max(most[stage], now[stage])
        now[stage] -= freed[slot.turn]
    return most


def _listed(names: Sequence[str]) -> str:
    if len(names) < 3:
        return ", ".join(names)
    return f"{names[0]} to {names[-1]} ({len(names)})"
