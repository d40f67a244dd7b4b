"""Checks which devices a run asks for, and how much memory of them."""

import math

from towers.devices.wish import MOST_DEVICES
from towers.program import words
from towers.train.settings import Settings, is_given


def check(settings: Settings) -> None:
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
