"""The flags of towers.train that say how towers share the work."""

import math
import re
import sys
from collections.abc import Sequence

from towers.devices.wish import MOST_DEVICES
from towers.program import words
from towers.train.settings import DEFAULTS, Settings, is_given

HELPS = {
    "variable_update": (
        "How to update the variables. parameter_server: on one device. replicated: "
        "in a copy on each tower. sharded: in parts, one on each tower. asynchronous: "
        "by each tower, waiting for none. auto: the faster one of the first two."
    ),
    "all_reduce_alg": (
        "How --variable_update=replicated adds gradients. cpu: on the CPU. device: "
        "on one device. ring: in parts, on all devices. nccl: by NCCL, on GPUs, also "
        "those of other hosts."
    ),
    "shard_optimizer_state": (
        "With --variable_update=replicated, divide the optimizer's variables, such "
        "as Adam's moments, among the towers of all hosts: each tower keeps those for "
        "one part of the parameters, and updates that part. The results are the same."
    ),
    "gradient_compression": (
        "How gradients travel between hosts. none: as they are. fp16, bf16: in 16 "
        "bits, which is inexact and takes half the bytes, for slow networks."
    ),
    "elastic_batch": (
        "What --batch_size and --learning_rate apply to. global: to all towers "
        "together, so that the results are the same with any number of towers. "
        "per_tower: to one tower; in each epoch, both are multiplied by the number of "
        "towers at the start of the epoch."
    ),
    "max_staleness": (
        "With --variable_update=asynchronous, how many updates other towers may make "
        "between the time a tower reads the variables and the time it updates them. "
        "Default: no limit."
    ),
    "shard_embeddings": (
        "How to place embedding tables and their optimizer slots on the towers' "
        "devices. none: like all other variables. rows, columns: divide each table "
        "over all devices. auto: keep each small table whole on one device, and "
        "divide large ones by rows. With several hosts, rows are divided over all "
        "hosts, and columns over the devices of each host."
    ),
    "stages": (
        "Number of devices of each tower. The model is divided among them, with "
        "its gradients and optimizer slots, so that it may be larger than a "
        "device. 4 GPUs with --stages=2 make 2 towers."
    ),
    "placement": (
        "The stage of each layer: PATTERN=STAGE, separated by commas, such as "
        "block_[0-5]=0,.*=1. A pattern is a regular expression for the whole name "
        "of a layer; the first that matches counts. Default: layers are divided in "
        "their order, by their weights and the time that they take."
    ),
    "micro_batches": (
        "Number of parts of a tower's batch that go through its stages one after "
        "another, so that stages work at the same time. With one stage, it saves "
        "memory."
    ),
    "pipeline_schedule": (
        "The order of micro-batches. gpipe: all go forward, then all go backward. "
        "1f1b: each goes backward as soon as it can, which takes less memory."
    ),
    "recompute": (
        "Which activations to recompute for the gradient, instead of keeping them in "
        "memory. none: no activations. stage: those of a whole stage. layer: those of "
        "each layer separately."
    ),
    "local_parameter_device": (
        "Device where the variables are, and where gradients are added. gpu: the "
        "first tower's device. Default: gpu if towers are on GPUs, else cpu."
    ),
    "split_ratios": (
        "Relative size of each tower's part of a batch, such as 2,3,3. auto: measure "
        "the towers during the first steps, and give slow ones less. Default: equal "
        "parts."
    ),
    "loss_placement": (
        "Where examples meet, as in a loss over pairs. auto: on one device, with the "
        "rows of all towers. tower: each tower treats its part of the batch as the "
        "whole batch. gathered: as auto, for one more release."
    ),
    "strict": (
        "Refuse a model with a variable that is overwritten with its gradient, if "
        "nobody knows how to combine the gradients of several towers."
    ),
    "steps_per_loop": "Number of training steps in one call of the graph.",
    "enable_xla": (
        "What to compile with XLA. true: towers and update. auto: the towers if the "
        "first steps show that this is faster (on CPUs, only --variable_update=auto "
        "tries it), and the update if the variables are on a GPU. false: nothing."
    ),
}
OF_A_RUN = (
    *("checkpoint", "monitor", "monitor_mode", "early_stopping", "log_csv"),
    *("save_steps", "save_minutes", "keep_checkpoints", "on_save_error"),
    *("preemption_notice", "max_train_steps", "train_epochs", "eval_steps"),
    *("histograms", "profile_steps", "stall_seconds", "on_stall", "parity_steps"),
)
"""Flags of what only a whole run does: it ends, saves, evaluates, and is watched."""


def check(settings: Settings) -> None:
    """Checks how variables are updated, and by which towers.

    Raises:
        ValueError: Flags do not go together.
    """
    if settings.all_reduce_alg != "auto" and settings.variable_update != "replicated":
        raise ValueError(
            f"Received {settings.as_flag('all_reduce_alg')} with "
            f"{settings.as_flag('variable_update')}; it says how replicated adds "
            "gradients, so give --variable_update=replicated as well."
        )
    others = {"variable_update": "replicated", "all_reduce_alg": "auto"}
    for name, value in others.items() if settings.shard_optimizer_state else ():
        if getattr(settings, name) != value:
            raise ValueError(
                f"Received --shard_optimizer_state and {settings.as_flag(name)}; "
                f"expected --{name}={value} with it, so give that, or leave it out."
            )
    if settings.max_staleness is not None and not settings.asynchronous:
        raise ValueError(
            f"Received {settings.as_flag('max_staleness')} and "
            f"{settings.as_flag('variable_update')}, whose towers wait for one "
            "another; expected --variable_update=asynchronous, or none."
        )
    if settings.deterministic and settings.asynchronous:
        raise ValueError(
            "Received --deterministic and --variable_update=asynchronous, where the "
            "order of updates is left to chance; expected one of them, so use "
            "--variable_update=parameter_server."
        )
    if settings.shard_embeddings != "none" and settings.asynchronous:
        raise ValueError(
            f"Received {settings.as_flag('shard_embeddings')} and "
            "--variable_update=asynchronous, whose towers update all of a model at "
            "home; expected one of them, so use --variable_update=parameter_server."
        )
    if settings.batch_per_tower and not settings.constant_rate:
        name = "warmup_steps" if settings.warmup_steps else "lr_schedule"
        raise ValueError(
            f"Received {settings.as_flag('elastic_batch')} and "
            f"{settings.as_flag(name)}, which counts steps, although their number "
            "would change with that of the towers; expected one of them."
        )
    _check_batch_per_tower(settings)
    _check_stages(settings)
    _check_placement(settings)
    check_devices(settings)
    _check_ratios(settings)


def _check_batch_per_tower(settings: Settings) -> None:
    """Checks that nothing else says how large a batch is."""
    size = settings.batch_size_per_tower
    if size is None:
        return
    one = f"--batch_size={size}"
    for name, why in {
        "batch_size": "which is that of all towers; expected one of them",
        "elastic_batch": f"where --batch_size is a tower's; expected {one} with it",
        "share_gpus": "by which towers come and go; expected "
        f"--elastic_batch=per_tower and {one} with it",
        "split_ratios": "which gives towers unequal parts; expected --batch_size, the "
        "examples of all towers",
    }.items():
        if is_given(settings, name):
            raise ValueError(
                f"Received --batch_size_per_tower={size} and "
                f"{settings.as_flag(name)}, {why}."
            )
    if settings.finds_count:
        raise ValueError(
            f"Received --batch_size_per_tower={size} and --num_gpus=auto, which "
            "compares numbers of towers by the same batch; expected --batch_size."
        )
    if settings.micro_batches > size:
        raise ValueError(
            f"Received {settings.as_flag('micro_batches')} for "
            f"--batch_size_per_tower={size}; expected at least one example for each "
            "micro-batch."
        )


def check_whole_batch(settings: Settings, program: str) -> None:
    """Checks that a program is told the batch of all towers.

    Raises:
        ValueError: It is not.
    """
    if settings.batch_size_per_tower is not None:
        raise ValueError(
            f"Received {settings.as_flag('batch_size_per_tower')}; expected "
            f"--batch_size, the examples of all towers, in {program}."
        )


def _check_ratios(settings: Settings) -> None:
    """Checks how a batch is divided."""
    if settings.finds_ratios:
        if settings.asynchronous:
            raise ValueError(
                "Received --split_ratios=auto and --variable_update=asynchronous, "
                "whose towers do not wait for one another; expected one of them."
            )
        return
    for ratio in settings.split_ratios or []:
        if not (ratio.isdecimal() and int(ratio)):
            raise ValueError(
                f"Received {settings.as_flag('split_ratios')}; expected auto, or a "
                "positive integer for each tower, such as --split_ratios=2,3,3."
            )


def _check_stages(settings: Settings) -> None:
    """Checks how devices share a model."""
    wanted = [
        name
        for name in ("stages", "micro_batches", "recompute")
        if is_given(settings, name)
    ]
    for flag, refused in (
        ("variable_update", settings.asynchronous),
        ("enable_xla", settings.enable_xla == "true"),
    ):
        if wanted and refused:
            raise ValueError(
                f"Received {settings.as_flag(flag)} and {settings.as_flag(wanted[0])}; "
                "expected one of them, as they do not go together."
            )
    if settings.pipeline_schedule != DEFAULTS.pipeline_schedule and (
        settings.micro_batches == 1
    ):
        raise ValueError(
            f"Received {settings.as_flag('pipeline_schedule')} without "
            "--micro_batches, whose order it is; expected several, such as "
            "--micro_batches=4."
        )
    if settings.micro_batches > settings.batch_size and (
        settings.batch_size_per_tower is None
    ):
        raise ValueError(
            f"Received {settings.as_flag('micro_batches')} for "
            f"{settings.as_flag('batch_size')}; expected at least one example for each "
            "micro-batch."
        )


def _check_placement(settings: Settings) -> None:
    """Checks which layers are on which stage, as far as no model is needed."""
    if settings.placement and settings.stages == 1:
        raise ValueError(
            f"Received {settings.as_flag('placement')} without --stages; expected the "
            "number of stages as well, such as --stages=2."
        )
    patterns = set()
    for entry in settings.placement or ():
        pattern, _, stage = entry.rpartition("=")
        if not pattern or not stage.isdecimal() or int(stage) >= settings.stages:
            raise ValueError(
                f"Received {settings.as_flag('placement')}; expected PATTERN=STAGE, "
                f"with a stage from 0 to {settings.stages - 1}, such as block_[0-5]=0."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"Received {settings.as_flag('placement')}, where {pattern} is no "
                f"regular expression ({error}); expected one such as block_[0-5]."
            ) from None
        if pattern in patterns:
            raise ValueError(
                f"Received {settings.as_flag('placement')}, which has {pattern} twice; "
                "expected each pattern once."
            )
        patterns.add(pattern)


def check_devices(settings: Settings) -> None:
    """Checks which devices are asked for, and how much of them.

    Raises:
        ValueError: Flags do not go together.
    """
    _check_indices(settings)
    _check_fraction(settings)
    _check_count(settings)


def _check_count(settings: Settings) -> None:
    """Checks that no machine is asked for that there is not."""
    ratios = () if settings.finds_ratios else settings.split_ratios
    ratios = ratios or ("1",)
    count = settings.fixed_gpus or settings.stages * len(ratios)
    _check_most(settings)
    _check_sharing(settings)
    for name in ("gpu_indices", "gpu_split"):
        if settings.finds_count and is_given(settings, name):
            raise ValueError(
                f"Received --num_gpus=auto and {settings.as_flag(name)}; expected one "
                "of them, as auto tries the first GPUs, each as a whole."
            )
    if settings.finds_count and settings.split_ratios and not settings.finds_ratios:
        raise ValueError(
            f"Received --num_gpus=auto and {settings.as_flag('split_ratios')}, which "
            "is for a fixed number of towers; expected --split_ratios=auto with it."
        )
    towers, rest = divmod(count * settings.gpu_split, settings.stages)
    if settings.fixed_gpus and not rest:
        check_ratios(settings, towers)
    count = max(count, settings.stages, settings.max_gpus or 1) * settings.gpu_split
    if count > MOST_DEVICES:
        names = "num_gpus", "max_gpus", "stages", "split_ratios", "gpu_split"
        given = [name for name in names if getattr(settings, name) not in (None, 1)]
        raise ValueError(
            f"Received {' '.join(map(settings.as_flag, given))}, which needs {count:,} "
            f"devices; expected at most {MOST_DEVICES}."
        )


def check_ratios(settings: Settings, towers: int) -> None:
    """Checks that --split_ratios, if it is given, has one ratio for each tower.

    Raises:
        ValueError: It has not.
    """
    ratios = settings.split_ratios
    if ratios and not settings.finds_ratios and len(ratios) != towers:
        gpus, rest = divmod(len(ratios) * settings.stages, settings.gpu_split)
        raise ValueError(
            f"Received {settings.as_flag('split_ratios')} for "
            f"{words.count(towers, 'tower')}; expected one ratio for each, so give "
            f"{towers} of them" + ("." if rest else f", or --num_gpus={gpus}.")
        )


def check_fixed(settings: Settings, program: str, finds_free: bool = False) -> None:
    """Checks that a program is told how many GPUs there are, as only a run finds it.

    Args:
        settings: The settings.
        program: What to call it.
        finds_free: Whether it finds GPUs that nobody uses.

    Raises:
        ValueError: It is not.
    """
    if settings.finds_count:
        raise ValueError(
            f"Received --num_gpus=auto, which only towers.train takes; expected a "
            f"number for {program}, or no --num_gpus for all GPUs."
        )
    if settings.finds_free and not finds_free:
        raise ValueError(
            "Received --gpu_indices=free, which a single process takes; expected "
            f"numbers of GPUs for {program}, such as --gpu_indices=0,2."
        )


def _check_indices(settings: Settings) -> None:
    """Checks which GPUs are asked for."""
    indices = settings.gpu_indices or ()
    if settings.finds_free:
        if settings.share_gpus is not None:
            raise ValueError(
                "Received --gpu_indices=free and --share_gpus, which takes what other "
                "runs leave; expected one of them."
            )
        return
    if any(index.startswith("MIG-") for index in indices):
        raise ValueError(
            f"Received {settings.as_flag('gpu_indices')}; expected numbers of GPUs, as "
            "a process has one slice of a GPU at most: name it by "
            f"CUDA_VISIBLE_DEVICES={indices[0]}, and train on each slice in a process "
            "of its own, as towers queue does."
        )
    if not all(index.isdecimal() for index in indices):
        raise ValueError(
            f"Received {settings.as_flag('gpu_indices')}; expected numbers of GPUs, "
            "such as --gpu_indices=0,2, or free."
        )


def _check_fraction(settings: Settings) -> None:
    """Checks how much of a GPU's memory is asked for."""
    fraction = settings.gpu_memory_fraction
    if fraction is None:
        return
    asked = settings.as_flag("gpu_memory_fraction")
    if not 0 < fraction <= 1:
        raise ValueError(f"Received {asked}; expected more than 0, and at most 1.")
    if settings.gpu_memory_limit_mb is not None:
        raise ValueError(
            f"Received {asked} and {settings.as_flag('gpu_memory_limit_mb')}, which "
            "both limit the memory of a GPU; expected one of them."
        )
    if settings.allow_growth:
        raise ValueError(
            f"Received {asked} and --allow_growth, but TensorFlow takes limited memory "
            "at once; expected one of them."
        )


def read_shares(settings: Settings) -> tuple[float, float] | None:
    """Reads --share_gpus: the part of the devices' memory that is sure, and its limit.

    Raises:
        ValueError: It has another form.
    """
    if settings.share_gpus is None:
        return None
    try:
        least, *most = map(float, settings.share_gpus.split(":"))
        (most,) = most or [1.0]
    except ValueError:
        least = most = math.nan
    if not 0 < least <= most <= 1:
        raise ValueError(
            f"Received {settings.as_flag('share_gpus')}; expected parts of the GPUs' "
            "memory, the least and the most, such as --share_gpus=0.25:0.75."
        )
    return least, most


def _check_sharing(settings: Settings) -> None:
    """Checks that towers may come and go."""
    if read_shares(settings) is None:
        return
    for name in ("num_gpus", "split_ratios", "stages"):
        if is_given(settings, name):
            raise ValueError(
                f"Received {settings.as_flag(name)} and "
                f"{settings.as_flag('share_gpus')}, by which towers come and go one by "
                "one; expected one of them, so give --max_gpus for how many to share."
            )


def _check_most(settings: Settings) -> None:
    """Checks that a run begins with no more GPUs than are set up."""
    if settings.max_gpus is None:
        return
    named = () if settings.finds_free else settings.gpu_indices or ()
    first = len(named) or settings.fixed_gpus or 1
    if settings.max_gpus < first:
        name = "gpu_indices" if named else "num_gpus"
        raise ValueError(
            f"Received {settings.as_flag('max_gpus')} and {settings.as_flag(name)}, "
            f"with which the run begins; expected at least --max_gpus={first}."
        )


def say_idle(settings: Settings, names: Sequence[str], program: str) -> None:
    """Says on stderr which flags are given although they have no effect.

    Args:
        settings: The flags. Those with their defaults say nothing anyway.
        names: Those that have no effect.
        program: What to call the program.
    """
    given = [settings.as_flag(name) for name in names if is_given(settings, name)]
    if given:
        print(
            f"{program}: These flags have no effect here: {' '.join(given)}.",
            file=sys.stderr,
        )
