"""The flags of towers.train that say how towers share the work."""

import re

from towers.train.settings import DEFAULTS, Settings, is_given
from towers.train.tower_flags import devices
from towers.train.tower_flags.devices import check_fixed, check_ratios, read_shares

__all__ = [
    "HELPS",
    "check",
    "check_fixed",
    "check_ratios",
    "check_whole_batch",
    "read_shares",
]

HELPS = {
    "variable_update": (
        "How to update the variables. parameter_server: on one device. replicated: "
        "in a copy on each tower. sharded: in parts, one on each tower. asynchronous: "
        "by each tower, waiting for none. auto: the faster one of the first two."
    ),
    "all_reduce_alg": (
        "How --variable_update=replicated adds gradients. cpu: on the CPU. device: "
        "on one device. ring: in parts, on all devices. nccl: by NCCL, on several "
        "GPUs."
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
    devices.check(settings)
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
