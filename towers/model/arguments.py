"""Checks the arguments of `multi_gpu_model` that depend on the model, or do nothing.

All others are checked by the values that they are put into; see `Config`.
"""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from towers.builders.step_function import has_own_steps
from towers.keras_adapter.models import overrides
from towers.layers import pipeline
from towers.model.config import Config
from towers.model.options import Auto, ParameterServer, UpdateOptions
from towers.model.tower_model import TowerModel
from towers.program.voice import say


def check_model(model: Any) -> None:
    """Checks that towers can compute the steps of a model."""
    if isinstance(model, TowerModel):
        raise ValueError(
            "Received a model that multi_gpu_model() has made; expected the user's own "
            "Keras model, so pass the original one."
        )
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"Received an object of type {type(model).__name__}; expected a "
            "keras.Model, so build one with Keras 3 (not tf_keras)."
        )
    for step in [f"make_{kind}_function" for kind in ("train", "test", "predict")]:
        if overrides(model, step):
            raise ValueError(
                f"{type(model).__name__} overrides `{step}`, which computes on one "
                "device; expected Keras's own, so override `train_step` or `test_step` "
                "instead."
            )
    if tf.distribute.has_strategy():
        raise ValueError(
            f"Called in the scope of {type(tf.distribute.get_strategy()).__name__}; "
            "towers replace tf.distribute, so leave the scope first."
        )


def present_placement(loss_placement: Any) -> Any:
    """Returns what `loss_placement` is called now."""
    if loss_placement != "gathered":
        return loss_placement
    say(
        "loss_placement='gathered' is 'auto', which computes on one device what lets "
        "examples meet; leave it out, as later releases do not know it."
    )
    return "auto"


def chosen_update(model: keras.Model, update: UpdateOptions) -> UpdateOptions:
    """Returns the way to update variables; of "auto", the one that such models need."""
    if not isinstance(update, Auto) or not has_own_steps(model):
        return update
    say(
        f"{type(model).__name__} defines its own step, such as `train_step`, so that "
        "variable_update='auto' is 'parameter_server'."
    )
    return ParameterServer(update.device, packed=update.packed)


def idle(config: Config) -> Iterator[str]:
    """Yields a line for each option that changes nothing beside the others."""
    stages, parts = config.stages, config.micro_batches
    usual = stages.schedule == pipeline.SCHEDULES[0]
    if not usual and parts == 1:
        yield (
            f"schedule='{stages.schedule}' changes nothing with one micro-batch, which "
            "goes forward and back; pass micro_batches=2 or more."
        )
    if config.recompute == "stage" and (parts == 1 or (stages.count == 1 and usual)):
        yield (
            "recompute='stage' takes time and saves no memory here, as a stage keeps "
            "the activations of one micro-batch either way; pass recompute='layer', or "
            "several stages and micro-batches."
        )
