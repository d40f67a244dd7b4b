"""The flags of towers.train that say how towers share the work."""

import math
import re
import sys
from collections.abc import Sequence

from towers.devices.wish import MOST_DEVICES
from towers.hosts.group import JOIN_SECONDS
from towers.program import words
from towers.train.settings import Settings, is_given


def check(settings: Settings) -> None:
    """Checks how variables are updated, and by which towers.

    Raises:
        ValueError: Flags do not go together.
    """
    others = {"update": "replicated", "all_reduce_alg": "auto"}
    for name, value in others.items() if settings.shard_optimizer_state else ():
        if getattr(settings, name) != value:
            raise ValueError(
                f"Received --shard_optimizer_state and {settings.as_flag(name)}; "
                "expected --variable_update=replicated with it, so give that, or leave "
                "it out."
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
    _ = settings.gpu_memory_limit_mb
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
    """Checks that nothing contradicts a batch that is so many for each tower."""
    if not settings.batch_at_start:
        return
    received = f"Received {settings.as_flag('elastic_batch')} and"
    for name, why in {
        "share_gpus": "by which towers come and go; expected --elastic_batch=per_tower",
        "split_ratios": "which gives towers unequal parts; expected "
        "--elastic_batch=global and the examples of all towers",
    }.items():
        if is_given(settings, name):
            raise ValueError(f"{received} {settings.as_flag(name)}, {why}.")
    if settings.finds_count:
        raise ValueError(
            f"{received} --num_gpus=auto, which compares numbers of towers by the same "
            "batch; expected --elastic_batch=global."
        )


def check_whole_batch(settings: Settings, program: str) -> None:
    """Checks that a program is told the batch of all towers.

    Raises:
        ValueError: It is not.
    """
    if settings.batch_at_start:
        raise ValueError(
            f"Received {settings.as_flag('elastic_batch')}; expected --batch_size to "
            f"be the examples of all towers in {program}, so leave it out."
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
        ("update", settings.asynchronous),
        ("enable_xla", settings.enable_xla == "true"),
    ):
        if wanted and refused:
            raise ValueError(
                f"Received {settings.as_flag(flag)} and {settings.as_flag(wanted[0])}; "
                "expected one of them, as they do not go together."
            )
    if settings.micro_batch_count > settings.batch_size:
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


def read_shares(settings: Settings) -> tuple[float, float, float] | None:
    """Reads --share_gpus.

    Returns:
        The part of the devices' memory that is sure, its limit, and for how many
        seconds to wait for what is sure; `None` if nothing is shared.

    Raises:
        ValueError: The flag has another form.
    """
    if settings.share_gpus is None:
        return None
    number = r"(\d+(?:\.\d*)?|\.\d+)"
    match = re.fullmatch(f"{number}(?::{number})?(?::{number})?", settings.share_gpus)
    least, most, seconds = (
        (float(match[1]), float(match[2] or 1), float(match[3] or JOIN_SECONDS))
        if match
        else (0.0, 0.0, 0.0)
    )
    if not (0 < least <= most <= 1 and 0 < seconds < math.inf):
        raise ValueError(
            f"Received {settings.as_flag('share_gpus')}; expected parts of the GPUs' "
            "memory, the least and the most, and perhaps seconds, such as "
            "--share_gpus=0.25:0.75 or --share_gpus=0.25:0.75:60."
        )
    return least, most, seconds


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
