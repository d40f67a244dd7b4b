"""`multi_gpu_model()` makes a Keras model train on towers."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.keras_adapter.models import has_own_steps, overrides
from towers.layers import pipeline
from towers.model.options import (
    Auto,
    Config,
    Layout,
    ParameterServer,
    Stages,
    UpdateOptions,
    as_stages,
    as_update,
)
from towers.model.program import Program
from towers.model.tower_model import TowerModel
from towers.program.voice import say


def multi_gpu_model(
    model: keras.Model,
    gpus: int | Sequence[int] | Sequence[str] | None = None,
    cpu_merge: bool | None = None,
    cpu_relocation: bool = False,
    *,
    variable_update: str | UpdateOptions = "parameter_server",
    split_ratios: Sequence[int] | None = None,
    loss_placement: str = "auto",
    strict: bool = True,
    gradient_compression: str = "none",
    stages: int | Stages = 1,
    micro_batches: int = 1,
    recompute: str = "none",
    preprocess: Callable[[Any, Any, bool], tuple[Any, Any]] | None = None,
    prefetch: int | None = None,
    check_numerics: bool | str | os.PathLike = False,
    shard_embeddings: str = "none",
) -> TowerModel:
    """Makes a model train, evaluate and predict on several devices.

    Each batch is divided among the devices. The results are those of one device with
    the whole batch. The returned model is compiled and fitted like any other. It shares
    its weights with `model`, which continues to work on one device. Saving either of
    the two saves `model`, an ordinary Keras model.

    The name and the first four arguments are those of Keras 2's `multi_gpu_model`.
    Options that apply only to a certain value of an argument are fields of an object; a
    string or a number is shorthand for that object with its defaults.

    Examples:
        >>> parallel = towers.multi_gpu_model(model, gpus=2)
        >>> parallel.compile(optimizer="adam", loss="mse")
        >>> parallel.fit(x, y, batch_size=64)
        >>> model.save("model.keras")

        >>> ring = towers.Replicated(all_reduce="ring")
        >>> parallel = towers.multi_gpu_model(model, gpus=4, variable_update=ring)

    Args:
        model: A Keras model. If it is compiled, it stays so.
        gpus: Number of GPUs, a list of their indices, or a list of device strings. By
            default all GPUs. Without a GPU, logical CPUs are used.
        cpu_merge: Whether gradients are added on the CPU (True) or on the first tower
            (False), as with `ParameterServer(merge=...)`. By default on the device of
            the variables.
        cpu_relocation: Whether to move the variables to the CPU, as with
            `ParameterServer(device="cpu")`. By default they stay where Keras created
            them, which is the first GPU if there is one.
        variable_update: How the variables are updated. "parameter_server": on one
            device, once, by the sum of all gradients. "replicated": in a copy on each
            tower. "sharded": in shards, one of each large variable on each tower.
            "asynchronous": on one device, by each tower's gradients, without waiting
            for the others. "auto": the faster way, measured in the first calls of
            training. For options, a `ParameterServer`, `Replicated`, `Sharded`,
            `Asynchronous` or `Auto`.
        split_ratios: Relative size of each tower's part of a batch, as positive
            integers, such as (2, 3, 3) if the first GPU has less memory. By default the
            parts are equal.
        loss_placement: Where operations run that mix examples, such as a loss over
            pairs. "auto": on one device, with the rows of all towers, so that results
            are those of one device. A line names these operations. "tower": each tower
            treats its part as the whole batch there, and such a loss is the mean over
            the parts, weighted by their sizes. "gathered" is "auto", and works until
            Towers 0.4. With `run_eagerly`, one device computes all of each batch.
        strict: Whether to refuse a model with a variable that is overwritten with its
            gradient, if Towers does not know how to combine the gradients of several
            towers. If False, the largest gradient is taken.
        gradient_compression: Compression of gradients between hosts: "none"; "fp16" or
            "bf16" rounds to 16 bits, which is inexact and halves the bytes, for slow
            networks. Rows of sparse gradients are not rounded.
        stages: Number of devices of each tower. If there are several, the model is
            divided among them. So 4 GPUs with `stages=2` make 2 towers. A model that is
            not built yet is divided when `fit` builds it. For options, a `Stages`.
        micro_batches: Number of parts of a tower's batch that pass through its stages
            one after another, so that stages work at the same time. Each part is
            computed like the batch of a tower. Without stages, it saves memory.
        recompute: The activations that are recomputed for the gradient instead of being
            kept: "none", those of each "stage", or of each placed "layer".
        preprocess: A function `preprocess(x, y, training)` that returns x and y with
            the same number of rows. Each tower applies it to its part of the batch,
            before the model. It can turn bytes into floats, or mix examples with random
            numbers of `tf.random`. The loss gets the y that it returns, and metrics get
            the original y. In prediction, y is `None`. `model` itself expects
            preprocessed inputs.
        prefetch: Number of batches that are copied to the towers ahead of use, while a
            step runs, if each call of training is one step. This number of extra
            batches is read from the data. By default 2 if a tower is on a GPU, and
            otherwise 0.
        check_numerics: Whether to stop at the first training step with a loss or a
            gradient that is not finite. Nothing of the step is applied, and a
            `NotFiniteStep` says where the value came from. If it is a path, the batch
            and the variables are written to that file; see `towers.numerics.locate`. By
            default there is no check.
        shard_embeddings: Placement of the tables of Keras's `Embedding` layers, and of
            their optimizer slots, on the towers' devices. "none": like all other
            variables. "rows", "columns": each table is divided over all devices.
            "auto": small tables are whole on one device, large ones are divided by
            rows, and all devices have about the same number of bytes. Rows are looked
            up and updated on the device that has them. With several hosts, rows are
            divided over the devices of all hosts, and columns over those of each host.

    Returns:
        A model that computes on towers.

    Raises:
        ValueError: If a device does not exist, the model cannot run on towers, or
            another argument has a wrong value.
    """
    check_model(model)
    config = Config(
        variable_update=chosen_update(model, as_update(variable_update)),
        stages=as_stages(stages),
        micro_batches=micro_batches,
        recompute=recompute,
        loss_placement=present_placement(loss_placement),
        strict=strict,
        gradient_compression=gradient_compression,
        shard_embeddings=shard_embeddings,
        check_numerics=check_numerics,
        cpu_merge=cpu_merge,
        cpu_relocation=cpu_relocation,
        preprocess=preprocess,
        prefetch=prefetch,
    )
    layout = Layout.of(gpus, config.stages.count, split_ratios)
    config.variable_update.check_towers(layout.firsts)
    for line in idle(config):
        say(line)
    return TowerModel(Program(model, config, layout))


# Checks of arguments that depend on the model, or that have no effect.
#
# `Config` and its values check all other arguments.


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
    """Returns the current name of a value of `loss_placement`."""
    if loss_placement != "gathered":
        return loss_placement
    say(
        "loss_placement='gathered' is 'auto', which computes on one device what lets "
        "examples meet; leave it out, as the old name works until Towers 0.4."
    )
    return "auto"


def chosen_update(model: keras.Model, update: UpdateOptions) -> UpdateOptions:
    """Returns the way to update variables; for models with own steps, not "auto"."""
    if not isinstance(update, Auto) or not has_own_steps(model):
        return update
    say(
        f"{type(model).__name__} defines its own step, such as `train_step`, so that "
        "variable_update='auto' is 'parameter_server'."
    )
    return ParameterServer(update.device, packed=update.packed)


def idle(config: Config) -> Iterator[str]:
    """Yields a line for each option that has no effect with the other options."""
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
