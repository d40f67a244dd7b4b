"""How towers divide a batch, and devices a model, as settings describe it."""

import os
from collections.abc import Sequence
from typing import Any

from towers.cluster import process_group
from towers.collectives.hosts import this_host
from towers.devices import Devices
from towers.elastic import balance
from towers.program import words
from towers.train import tower_flags
from towers.train.settings import Settings


def split_ratios(settings: Settings, devices: Devices) -> tuple[int, ...]:
    """Reads how much of a batch each tower gets, relative to the others."""
    count, stages = len(devices.towers), settings.stages
    if count % stages:
        raise ValueError(
            f"Received {settings.as_flag('stages')} for "
            f"{words.count(count, 'device')}; "
            "expected a number that divides that of the devices."
        )
    towers, ratios = count // stages, settings.split_ratios
    if settings.finds_ratios:
        ratios = _found_ratios(settings, devices)
    if not ratios:
        return (1,) * towers
    tower_flags.check_ratios(settings, towers)
    return tuple(map(int, ratios))


def _found_ratios(settings, devices):
    """Returns what --split_ratios=auto has found before, if it has."""
    hosts = process_group.joined()
    if process_group.member() is not None or (hosts is not None and hosts.count > 1):
        raise ValueError(
            "Received --split_ratios=auto on several hosts; expected one ratio for "
            "each tower of a host, as auto measures the towers of one host alone."
        )
    if settings.clean:
        return None
    file = os.path.join(settings.absolute_model_dir, balance.FILE)
    return balance.recall(file, devices.towers)


def with_whole_batch(settings: Settings, split_ratios: Sequence[int]) -> Settings:
    """Returns settings with the batch of all towers, if they have that of one.

    Hosts call it together.

    Args:
        settings: The settings.
        split_ratios: Of the towers of this host.
    """
    one = settings.batch_size_per_tower
    if settings.batch_per_tower:
        one = settings.batch_size
    if one is None:
        return settings
    towers = sum(this_host().tell_all(len(split_ratios)))
    return settings.but(batch_size=one * towers)


def stages(settings: Settings) -> dict[str, Any]:
    """Reads how devices share the model, as arguments of `multi_gpu_model`."""
    pairs = (entry.rpartition("=") for entry in settings.placement or ())
    placement = {pattern: int(stage) for pattern, _, stage in pairs}
    return {
        "stages": settings.stages,
        "placement": placement or "auto",
        "micro_batches": settings.micro_batches,
        "pipeline_schedule": settings.pipeline_schedule,
        "recompute": settings.recompute,
    }
