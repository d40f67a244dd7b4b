"""Holds the state that a save needs of the running `fit` and its epoch."""

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.collectives.world import World
from towers.devices.names import HOST
from towers.layers.variables import steps_done
from towers.lifecycle.checkpoints import saved_model, states
from towers.lifecycle.checkpoints.best import Monitor
from towers.lifecycle.checkpoints.store import Contents, Position
from towers.model.fit_call import FitCall


@dataclasses.dataclass
class CurrentFit:
    """The running call of `fit`.

    Attributes:
        call: The call.
        others: The callbacks whose states are saved.
        data: The known facts that decide which records a batch has, as JSON.
        validates: Whether there are validation data.
        begun: The position at which the call began.
        values_before: For a continued epoch, the variables' values before callbacks
            heard of it.
        values_at_end: Values to save at the end, if other than the variables' then.
    """

    call: FitCall
    others: Sequence[keras.callbacks.Callback]
    data: Mapping[str, Any]
    validates: bool
    begun: Position
    values_before: Mapping[str, Any] | None = None
    values_at_end: Mapping[str, Any] | None = None
    _described: dict[str, list[list[Any]]] | None = None
    _counts: list[int] | None = None

    @property
    def step(self) -> int:
        """The number of the last step."""
        return steps_done(self.call.model)

    def described(self) -> dict[str, list[list[Any]]]:
        """Describes the variables; a model's own step may create some late."""
        parts = saved_model.parts(self.call.model)
        if (counts := [*map(len, parts.values())]) != self._counts:
            self._described = {
                part: saved_model.describe(variables)
                for part, variables in parts.items()
            }
            self._counts = counts
        return self._described


@dataclasses.dataclass
class CurrentEpoch:
    """The running epoch, or the last one.

    Attributes:
        random: The states of random generators at its beginning.
        read: The number of batches read in it.
        batch_begun: Whether a batch has begun and not ended.
        metrics: The values of the training metrics, while validation overwrites them.
        score: Its score, once it is over.
        step: With elastic hosts, the number of steps before the batch that has begun.
    """

    random: Mapping[str, Any] | None = None
    read: int = 0
    batch_begun: bool = False
    metrics: Sequence[Any] | None = None
    score: float | None = None
    step: int = 0


def contents(
    fit: CurrentFit,
    epoch: CurrentEpoch,
    position: Position,
    past: Sequence[int] | None,
    monitor: Monitor,
    preprocessing: Mapping[str, Any] | None,
) -> Contents:
    """Collects it.

    Args:
        fit: The call of `fit` that runs.
        epoch: The epoch that runs.
        position: How far the run has come.
        past: As of `RunState`.
        monitor: Tells which epoch was the best.
        preprocessing: As of `RunState`.
    """
    arrays = []
    model, score = fit.call.model, None if position.batch else epoch.score
    about = {
        "variables": fit.described(),
        "built_for": saved_model.built_for(model),
        "data": fit.data,
        "past": None if past is None else [*past],
        "step": fit.step,
        "preprocessing": preprocessing,
        **monitor.describe(score),
        **states.collect(model, fit.others, position.epoch, arrays),
    }
    values = {"callbacks": arrays}
    if position.batch:
        values["metrics"] = epoch.metrics or saved_model.copies(model.metrics_variables)
        about["random_at_begin"] = epoch.random
    return Contents(values, about)


# What hosts hand over to those that train together after them.


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
