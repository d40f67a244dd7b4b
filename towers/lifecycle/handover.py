"""What hosts hand over to those that train together after them."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.collectives.world import World
from towers.devices.names import HOST
from towers.lifecycle.checkpoints import saved_model
from towers.lifecycle.checkpoints.best import Monitor
from towers.lifecycle.checkpoints.store import Contents, Position


class Handed(NamedTuple):
    """What a host knows of a run, besides its variables.

    Attributes:
        position: How far the run has come.
        past: As of `RunState`.
        contents: As a checkpoint has them, without variables; `None` at the start.
    """

    position: Position
    past: Sequence[int] | None
    contents: Contents | None


def from_first(hosts: World, mine: Handed, monitor: Monitor) -> Handed:
    """Returns what the first of these hosts knows; all call it together.

    Variables follow with the first step.

    Args:
        hosts: The hosts.
        mine: What this host knows.
        monitor: Is told which epoch was the best.
    """
    if hosts.count == 1:
        return mine
    told = hosts.broadcast_value(_as_json(mine) if hosts.index == 0 else None)
    if hosts.index == 0:
        return mine
    handed = _from_json(told)
    if handed.contents is not None:
        monitor.recall(handed.contents.about)
    return handed


def give_back(
    hosts: World, model: keras.Model, values: Mapping[str, Sequence[Any]] | None
) -> None:
    """Gives variables their values from before; of divided ones, the first host's.

    All hosts call it together: those that have just come have had no other values.

    Args:
        hosts: The hosts.
        model: The model.
        values: What `saved_model.values` has returned; `None` if it was not built.
    """
    for part, variables in saved_model.parts(model).items():
        mine = [None] * len(variables) if values is None else values[part]
        for variable, value in zip(variables, mine, strict=True):
            if saved_model.is_divided(variable):
                with tf.device(HOST):  # It may be larger than a GPU.
                    if value is None:
                        value = tf.zeros(variable.shape, variable.dtype)
                    value = tf.constant(value)
                (value,) = hosts.broadcast([value], "values from before")
            if value is not None:
                variable.assign(value)


def _as_json(handed: Handed) -> dict[str, Any]:
    contents = handed.contents
    values = {} if contents is None else contents.values
    return {
        "position": [handed.position.epoch, handed.position.batch],
        "past": handed.past,
        "about": contents and contents.about,
        "values": {name: [*map(_as_text, arrays)] for name, arrays in values.items()},
    }


def _from_json(told: dict[str, Any]) -> Handed:
    contents = None
    if told["about"] is not None:
        values = {
            name: [*map(_from_text, arrays)] for name, arrays in told["values"].items()
        }
        contents = Contents(values, told["about"])
    return Handed(Position(*told["position"]), told["past"], contents)


def _as_text(array: Any) -> list[str]:
    tensor = tf.convert_to_tensor(array)
    data = tf.io.serialize_tensor(tensor).numpy()
    return [tensor.dtype.name, base64.b64encode(data).decode()]


def _from_text(told: list[str]) -> tf.Tensor:
    dtype, data = told
    return tf.io.parse_tensor(base64.b64decode(data), dtype)
