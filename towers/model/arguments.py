"""Checks the arguments of `multi_gpu_model`: a `ValueError` says what is wrong."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import devices
from towers.builders.guard import Guard
from towers.builders.steps import has_own_steps
from towers.devices import is_gpu
from towers.keras_adapter.models import already, overrides
from towers.layers import pipeline as pipelines
from towers.layers import tables
from towers.layers.pipeline import Pipeline, Placement
from towers.model.tower_model import TowerModel
from towers.model.update.layout import check_count
from towers.program.voice import say
from towers.tower.preprocess import Preprocess


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


def check_loss_placement(placement: Any) -> str:
    """Returns where losses are computed: "auto" or "tower"."""
    check_choice("loss_placement", placement, ["auto", "gathered", "tower"])
    if placement != "gathered":
        return placement
    say(
        "loss_placement='gathered' is 'auto', which computes on one device what lets "
        "examples meet; leave it out, as later releases do not know it."
    )
    return "auto"


def chosen_update(model: keras.Model, variable_update: str) -> str:
    """Returns the way to update variables; of "auto", the one that such models need."""
    if variable_update != "auto" or not has_own_steps(model):
        return variable_update
    say(
        f"{type(model).__name__} defines its own step, such as `train_step`, so that "
        "variable_update='auto' is 'parameter_server'."
    )
    return "parameter_server"


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Checks that an argument is one of the names that it may be."""
    if value not in known:
        raise ValueError(f"Received {name}={value!r}; expected one of {[*known]}.")


def find_home(
    device: str | None, model: keras.Model, variable_update: str, towers: Sequence[str]
) -> str:
    """Returns the device string of the variables' home.

    Args:
        device: "cpu", "gpu" for the first tower's device, a device string, or `None`
            for where the variables are.
        model: The model.
        variable_update: How the variables are updated.
        towers: The towers' devices.
    """
    named = {"cpu": devices.HOST, "gpu": towers[0]}
    asked = device is not None
    home = named.get(device, device) if asked else _home_of(model, towers)
    if variable_update == "replicated" and not asked:
        home = towers[0]
    (found,) = devices.resolve([home], "local_parameter_device")
    if variable_update == "replicated" and found != towers[0]:
        raise ValueError(
            f"Received local_parameter_device={home} with variable_update="
            "'replicated', where the variables are on each tower; expected none, or "
            f"the first tower's, {towers[0]}."
        )
    return found


def check_optimizer_shards(variable_update: str, algorithm: str) -> None:
    """Checks that the optimizer's state can be sharded."""
    if variable_update != "replicated":
        raise ValueError(
            f"Received shard_optimizer_state=True with variable_update="
            f"'{variable_update}'; each tower updates its part of the parameters in a "
            "copy of its own, so give variable_update='replicated' as well."
        )
    if algorithm != "auto":
        raise ValueError(
            f"Received all_reduce_alg='{algorithm}' with shard_optimizer_state=True, "
            "where no tower gets all sums; leave it out."
        )


def check_hosts(count: int, variable_update: str) -> None:
    """Checks that several hosts can update the variables that way."""
    if count > 1 and variable_update == "asynchronous":
        raise ValueError(
            f"Received variable_update='asynchronous' on {count} hosts, which wait for "
            "one another in each step; use 'parameter_server' or 'replicated'."
        )


def check_sharding(way: Any, variable_update: str) -> None:
    """Checks that tables can lie on several devices; see `multi_gpu_model`."""
    check_choice("shard_embeddings", way, tables.WAYS)
    if way == "none":
        return
    if variable_update == "asynchronous":
        raise ValueError(
            f"Received shard_embeddings='{way}' with variable_update='asynchronous', "
            "whose towers update all of a model at home; use 'parameter_server' or "
            "'replicated'."
        )


def check_max_staleness(bound: Any, variable_update: str) -> None:
    """Checks the bound."""
    if variable_update != "asynchronous":
        raise ValueError(
            f"Received max_staleness={bound!r} and variable_update="
            f"'{variable_update}', whose towers wait for one another; expected None, "
            "or variable_update='asynchronous'."
        )
    if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
        raise ValueError(
            f"Received max_staleness={bound!r}; expected None, for any, or a number "
            "of updates, such as 0 to have them made in turn."
        )


def check_prefetch(prefetch: Any, towers: Sequence[str]) -> int:
    """Returns the number of batches to fetch ahead."""
    if prefetch is None:
        # Between logical CPUs nothing is copied.
        return 2 if any(map(is_gpu, towers)) else 0
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(
            f"Received prefetch={prefetch!r}; expected None, or a number of batches, "
            "such as 0 to have none fetched ahead."
        )
    return prefetch


def check_numerics(asked: Any) -> tuple[Guard | None, str | None]:
    """Returns what guards steps, and the file for one that is not finite, if any."""
    if isinstance(asked, bool):
        return (Guard() if asked else None), None
    if not isinstance(asked, str | os.PathLike):
        raise ValueError(
            f"Received check_numerics={asked!r}; expected True, False, or where to "
            "write the batch of a step that is not finite, such as 'not_finite.npz'."
        )
    return Guard(), os.path.abspath(os.path.expanduser(asked))


def check_preprocess(preprocess: Any) -> Preprocess:
    """Returns the function, as towers call it."""
    if not callable(preprocess):
        raise ValueError(
            f"Received preprocess={preprocess!r}; expected None, or a function "
            "`preprocess(x, y, training)` that returns x and y."
        )
    return Preprocess(preprocess)


def check_pipeline(
    model: keras.Model,
    stages: int,
    placement: Any,
    micro_batches: Any,
    schedule: Any,
    recompute: Any,
    shard_embeddings: Any = "none",
) -> Pipeline:
    """Returns how the devices of a tower share the model; see `multi_gpu_model`."""
    check_count("micro_batches", micro_batches)
    check_choice("pipeline_schedule", schedule, pipelines.SCHEDULES)
    check_choice("recompute", recompute, pipelines.RECOMPUTE)
    if placement != "auto" and not isinstance(placement, Mapping):
        raise ValueError(
            f"Received placement={placement!r}; expected 'auto', or stages by regular "
            "expressions for names of layers, such as {'block_[0-5]': 0, '.*': 1}."
        )
    if stages == 1 and placement != "auto":
        raise ValueError(
            "Received a placement with stages=1; expected stages=2 or more, or no "
            "placement."
        )
    for line in _idle(stages, micro_batches, schedule, recompute):
        say(line)
    places = Placement(model, stages, placement, apart=shard_embeddings != "none")
    found = Pipeline(stages, micro_batches, schedule, recompute, places)
    if model.built:
        # It says what does not fit.
        _ = found.layers
    return found


def _idle(stages, micro_batches, schedule, recompute):
    """A line for each argument that changes nothing beside the others."""
    if schedule != pipelines.SCHEDULES[0] and micro_batches == 1:
        yield (
            f"pipeline_schedule='{schedule}' changes nothing with one micro-batch, "
            "which goes forward and back; pass micro_batches=2 or more."
        )
    if recompute == "stage" and (
        micro_batches == 1 or (stages == 1 and schedule == pipelines.SCHEDULES[0])
    ):
        yield (
            "recompute='stage' takes time and saves no memory here, as a stage keeps "
            "the activations of one micro-batch either way; pass recompute='layer', or "
            "several stages and micro-batches."
        )


def check_updates_stages(pipeline: Pipeline, variable_update: str) -> None:
    """Checks that variables can be updated that way by towers with stages."""
    if variable_update == "asynchronous" and not pipeline.alone:
        raise ValueError(
            "Received variable_update='asynchronous' with stages, micro_batches or "
            "recompute; expected 'parameter_server' or 'replicated'."
        )


def _home_of(model: keras.Model, towers: Sequence[str]) -> str:
    """The device that the model's variables are on; where it has none yet, will be."""
    if own := already(model, "trainable_variables") or already(model, "variables"):
        return own[0].value.device
    return towers[0] if is_gpu(towers[0]) else devices.HOST
