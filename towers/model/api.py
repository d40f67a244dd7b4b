"""The Keras door: `multi_gpu_model()` makes a Keras model train on towers."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from towers._deprecated import accepts_old_names
from towers.builders.strategies import STRATEGIES
from towers.cluster import process_group
from towers.collectives import reduce
from towers.collectives.hosts import COMPRESSIONS, this_host
from towers.devices import is_gpu
from towers.model import arguments
from towers.model.tower_model import TowerModel
from towers.model.update.auto import Choice
from towers.model.update.layout import Layout
from towers.model.update.recipe import Recipe
from towers.model.update.variable_update import VariableUpdate


@accepts_old_names
def multi_gpu_model(
    model: keras.Model,
    gpus: int | Sequence[int] | Sequence[str] | None = None,
    cpu_merge: bool | None = None,
    cpu_relocation: bool = False,
    *,
    variable_update: str = "parameter_server",
    local_parameter_device: str | None = None,
    split_ratios: Sequence[int] | None = None,
    loss_placement: str = "auto",
    strict: bool = True,
    packed: bool | None = None,
    all_reduce_alg: str = "auto",
    shard_optimizer_state: bool = False,
    gradient_compression: str = "none",
    stages: int = 1,
    placement: str | Mapping[str, int] = "auto",
    micro_batches: int = 1,
    pipeline_schedule: str = "1f1b",
    recompute: str = "none",
    choice_file: str | None = None,
    max_staleness: int | None = None,
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

    Examples:
        >>> parallel = multi_gpu_model(model, gpus=2)
        >>> parallel.compile(optimizer="adam", loss="mse")
        >>> parallel.fit(x, y, batch_size=64)
        >>> model.save("model.keras")

    Args:
        model: A Keras model. If it is compiled, it stays so.
        gpus: Number of GPUs, a list of their indices, or a list of device strings. By
            default all GPUs. Without a GPU, logical CPUs are used.
        cpu_merge: Whether gradients are added on the CPU (True) or on the first tower
            (False). By default where the variables are.
        cpu_relocation: Whether to move the variables to the CPU. By default they stay
            where Keras created them, which is the first GPU if there is one.
        variable_update: How the variables are updated. "parameter_server": on one
            device, once, by the sum of all gradients. "replicated": in a copy on each
            tower; the first tower's copy is the model's own variables. "asynchronous":
            on one device, by each tower's gradients, without waiting for the others.
            "auto": the first calls of training measure for some seconds whether
            "parameter_server" or "replicated" is faster, and then restore the
            variables. If nothing can be measured, and in deterministic or eager runs,
            "auto" is "replicated" on several GPUs and "parameter_server" otherwise.
        local_parameter_device: Device to move the variables to, instead of
            `cpu_relocation`: "cpu", "gpu" for the first tower's device, or a device
            string. "auto" leaves them there.
        split_ratios: Relative size of each tower's part of a batch, as positive
            integers, such as (2, 3, 3) if the first GPU has less memory. By default the
            parts are equal.
        loss_placement: Where examples meet, as in a loss over pairs. "auto": on one
            device, with the rows of all towers, so that numbers are those of one
            device. A line says what that is. "tower": each tower takes its part for the
            batch there, and a loss of that is a mean by the sizes of the parts.
            "gathered" is "auto", and works for one more release. With `run_eagerly`,
            one device computes all of each batch.
        strict: Whether to refuse a model with a variable that is overwritten with its
            gradient, if Towers does not know how to combine the gradients of several
            towers. If False, the largest is taken.
        packed: Whether variables and gradients travel between devices in one buffer for
            each type. By default if they travel between memories, which logical CPUs
            share.
        all_reduce_alg: How "replicated" adds gradients: on the "cpu"; on the first
            "device"; by "ring", each device a part; by "nccl", on several GPUs. "auto"
            is the first GPU, or else the CPU.
        shard_optimizer_state: With "replicated", whether each tower of all hosts has
            the optimizer's variables of a part of the parameters only, such as Adam's
            moments, and updates that part. The numbers are the same; saved models and
            checkpoints, too.
        gradient_compression: How gradients travel between hosts: "none" as they are;
            "fp16" or "bf16" rounded to 16 bits, which is inexact and takes half the
            bytes, for slow networks. Rows of sparse gradients are not rounded.
        stages: Number of devices of each tower. If there are several, the model is
            divided among them. So 4 GPUs with `stages=2` make 2 towers. A layer's
            weights, their gradients and their optimizer slots are on its stage's
            device. A model that is not built yet is divided when `fit` builds it.
        placement: The stage of each layer: a dict of regular expressions for names of
            layers, such as `{"block_[0-5]": 0, ".*": 1}`, of which the first that
            matches a whole name counts. A layer without weights that none matches goes
            with its inputs. "auto" divides the layers in their order.
        micro_batches: Number of parts of a tower's batch that go through its stages one
            after another, so that stages work at the same time. Each part is computed
            as the batch of a tower is. Without stages, it saves memory.
        pipeline_schedule: "gpipe": all parts go forward, and then backward. "1f1b": a
            part goes backward as soon as it can, so that a stage keeps the activations
            of at most as many parts as there are stages.
        recompute: What is computed again for the gradient, instead of being kept:
            "none", each "stage", or each "layer" of those that are placed.
        choice_file: File in which "auto" keeps its choice. If the file exists, "auto"
            makes the same choice again.
        max_staleness: With "asynchronous", the most updates by other towers between a
            tower's reading the variables and its own update. By default no limit.
        preprocess: A function `preprocess(x, y, training)` that returns x and y with
            the same number of rows. Each tower applies it to its part of the batch,
            before the model. It can turn bytes into floats, or mix examples with random
            numbers of `tf.random`. The loss gets the y that it returns, and metrics get
            the original y. In prediction, y is `None`. `model` itself expects
            preprocessed inputs.
        prefetch: Number of batches that are copied to the towers ahead of use, while a
            step runs, if each call of training is one step. As many batches more than
            needed are taken from the data. By default 2 if a tower is on a GPU, and
            otherwise 0.
        check_numerics: Whether to stop at the first step of training with a loss or a
            gradient that is not finite. Nothing of the step is applied, and a
            `NotFiniteStep` says where the value came from. If it is a path, the batch
            and the variables are written there; see `towers.numerics.locate`. By
            default there is no check.
        shard_embeddings: How the tables of Keras's `Embedding` layers lie on the
            towers' devices, with their optimizer slots. "none": like all other
            variables. "rows", "columns": each is divided over all devices. "auto":
            small ones are whole on one device, large ones are divided by rows, and all
            devices have about as many bytes. Towers look up rows where they lie, and
            rows are updated there. Of several hosts, rows are divided over the devices
            of all, and columns over those of each.

    Returns:
        A model that computes on towers.

    Raises:
        ValueError: If a device does not exist, the model cannot run on towers, or
            another argument has a wrong value.
    """
    again = functools.partial(_as_before, {**locals()})
    arguments.check_model(model)
    loss_placement = arguments.check_loss_placement(loss_placement)
    updates = ["auto", *sorted(STRATEGIES)]
    arguments.check_choice("variable_update", variable_update, updates)
    variable_update = arguments.chosen_update(model, variable_update)
    layout = Layout.of(gpus, stages, split_ratios)
    towers = layout.firsts
    pipeline = arguments.check_pipeline(
        *(model, stages, placement, micro_batches, pipeline_schedule, recompute),
        shard_embeddings,
    )
    arguments.check_updates_stages(pipeline, variable_update)
    if all_reduce_alg != "auto":
        reduce.check_all_reduce(all_reduce_alg, variable_update, towers)
    if max_staleness is not None:
        arguments.check_max_staleness(max_staleness, variable_update)
    prefetch = arguments.check_prefetch(prefetch, towers)
    if preprocess is not None:
        preprocess = arguments.check_preprocess(preprocess)
    guard, numerics_file = arguments.check_numerics(check_numerics)
    asked = local_parameter_device
    if asked is None and cpu_relocation:
        asked = "cpu"
    in_stages = asked is None and stages > 1
    home = towers[0] if in_stages else asked
    home = arguments.find_home(home, model, variable_update, towers)
    follows = asked == "gpu" or in_stages or (is_gpu(home) and home == towers[0])
    arguments.check_choice(
        "gradient_compression", gradient_compression, list(COMPRESSIONS)
    )
    hosts = this_host().compressing(gradient_compression)
    arguments.check_hosts(hosts.count, variable_update)
    if process_group.member() is not None:
        # Others may come.
        arguments.check_hosts(2, variable_update)
    arguments.check_sharding(shard_embeddings, variable_update)
    if shard_optimizer_state:
        arguments.check_optimizer_shards(variable_update, all_reduce_alg)
    given = dict(
        variable_update=variable_update,
        stages=stages,
        micro_batches=micro_batches,
        recompute=recompute,
        loss_placement=loss_placement,
        strict=strict,
        gradient_compression=gradient_compression,
        shard_embeddings=shard_embeddings,
        shard_optimizer_state=shard_optimizer_state,
        check_numerics=bool(check_numerics),
    )
    recipe = Recipe(
        model=model,
        home=home,
        home_follows=follows,
        home_stays=asked is not None and home != towers[0],
        cpu_merge=cpu_merge,
        packed=packed,
        hosts=hosts,
        gradient_compression=gradient_compression,
        pipeline=pipeline,
        shard_embeddings=shard_embeddings,
        loss_placement=loss_placement,
        strict=strict,
        preprocess=preprocess,
        prefetch=prefetch,
        guard=guard,
        shard_optimizer_state=shard_optimizer_state,
        max_staleness=max_staleness,
        given=given,
    )
    recipe.check_alike()
    recipe.agree()
    choice, chooses = Choice(variable_update, all_reduce_alg), False
    if variable_update == "auto":
        choice, chooses = recipe.ways(layout, xla=False, synchronized=False)[0], True
    update = VariableUpdate(recipe, layout, choice, chooses, choice_file)
    return TowerModel(update, again, numerics_file)


def _as_before(given, model, layout):
    """Makes another model train as one does, for which some arguments were given."""
    gpus = [device for tower in layout.towers for device in tower]
    towers = {"gpus": gpus, "split_ratios": layout.split_ratios}
    return multi_gpu_model(**{**given, "model": model, **towers})
