"""How towers divide a batch, and devices a model, as settings describe it."""

import os
from collections.abc import Sequence

from towers.collectives.world import this_host
from towers.devices.configuration import Devices
from towers.elastic import balance
from towers.hosts import group
from towers.model.options import UPDATES, Stages, UpdateOptions
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
    hosts = group.joined()
    if group.member() is not None or (hosts is not None and hosts.count > 1):
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
    towers = sum(this_host().exchange(len(split_ratios)))
    return settings.but(batch_size=one * towers)


def variable_update(
    settings: Settings, device: str | None = None, choice_file: str | None = None
) -> UpdateOptions:
    """Reads how variables are updated, as an argument of `multi_gpu_model`.

    Args:
        settings: The settings.
        device: Where the variables are to be, if copies of them are not on each tower.
        choice_file: Where to keep what "auto" chooses.
    """
    options = {
        "parameter_server": {"device": device},
        "replicated": {
            "all_reduce": settings.all_reduce_alg,
            "shard_optimizer_state": settings.shard_optimizer_state,
        },
        "sharded": {},
        "asynchronous": {"max_staleness": settings.max_staleness, "device": device},
        "auto": {"choice_file": choice_file, "device": device},
    }
    name = settings.variable_update
    return UPDATES[name](**options[name])


def stages(settings: Settings) -> Stages:
    """Reads how devices share the model, as an argument of `multi_gpu_model`."""
    pairs = (entry.rpartition("=") for entry in settings.placement or ())
    placement = {pattern: int(stage) for pattern, _, stage in pairs}
    return Stages(settings.stages, placement or "auto", settings.pipeline_schedule)
