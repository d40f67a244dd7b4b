"""The devices of a run: set up, shared with other runs, and divided between towers."""

import os
from collections.abc import Sequence

import keras
import tensorflow as tf

from towers.collectives.joined_hosts import this_host
from towers.devices.configuration import Devices, configure
from towers.elastic import requests
from towers.elastic.generations import WishSource
from towers.hosts import group
from towers.machine import nvml
from towers.model.options import UPDATES, Stages, UpdateOptions
from towers.program import forks, voice, words
from towers.program.features import feature
from towers.train import tower_flags
from towers.train.settings import Settings


def configure_devices(settings: Settings) -> Devices:
    """Sets up the devices, the random seeds and the type to compute in."""
    configured = _configure_free if settings.finds_free else _configure
    devices = configured(settings)
    _say_doubts(settings, devices)
    return devices


def _configure_free(settings):
    hosts = group.join_as_started("auto")
    if hosts is not None and hosts.count_here > 1:
        # TensorFlow waits for all hosts as it initialises, and one of them would wait
        # for the lock.
        raise ValueError(
            f"Received --gpu_indices=free for {hosts.count_here} hosts on this "
            "machine, which would wait for one another; expected numbers for each, "
            "such as --gpu_indices=0, or towers launch, which divides the GPUs."
        )
    if not tf.config.list_physical_devices("GPU"):
        _say_doubts(settings, None)  # before an error says that there is none
    with feature("devices.free").one_at_a_time():
        devices = _configure(settings)
        # From here on, others see that these GPUs are used.
        tf.config.list_logical_devices()
    return devices


def _say_doubts(settings, devices):
    """Says of GPUs that are there why they are not used, or only poorly."""
    if not nvml.has_gpus():
        return
    # What others hold of those that are shared, or that were free, is no news.
    others_may_hold = settings.finds_free or settings.share_gpus is not None
    cards = map(nvml.gpu, devices.every.physical if devices else ())
    for line in feature("doctor.gpus.at_start").doubts(
        feature("doctor.gpus.built").of_tensorflow(),
        len(tf.config.list_physical_devices("GPU")),
        {card.uuid for card in cards if card is not None},
        looks_at_memory=not others_may_hold,
    ):
        voice.warn(line)


def with_free_gpus(settings: Settings) -> Settings:
    """Returns settings with the numbers of GPUs that are free, if they ask for these.

    It is for a program whose processes use them, one after another.

    Raises:
        ValueError: Too few are free.
    """
    if not settings.finds_free:
        return settings
    with feature("devices.free").one_at_a_time():
        indices = feature("devices.free").choose(settings.fixed_gpus)
    return settings.but(gpu_indices=tuple(map(str, indices)), num_gpus=None)


def _configure(settings):
    num_gpus, indices = settings.fixed_gpus, None
    if settings.finds_free:
        indices = feature("devices.free").choose(settings.max_gpus or num_gpus)
        num_gpus = settings.max_gpus and num_gpus
        if num_gpus is not None:
            indices = indices[:num_gpus]
    elif settings.finds_count:
        num_gpus = feature("train.parts.auto_count").find(settings)
    elif settings.gpu_indices:
        indices = [int(index) for index in settings.gpu_indices]
    elif num_gpus is None and not tf.config.list_physical_devices("GPU"):
        # Two, so that towers can be seen at work on any machine.
        ratios = None if settings.finds_ratios else settings.split_ratios
        num_gpus = len(ratios or (1, 1)) * settings.stages
        num_gpus = min(num_gpus, settings.max_gpus or num_gpus)
        if settings.share_gpus is not None:
            num_gpus = settings.max_gpus or num_gpus
    devices = configure(
        num_gpus,
        gpu_indices=indices,
        allow_growth=settings.allow_growth,
        gpu_memory_limit_mb=settings.gpu_memory_limit_mb,
        gpu_memory_fraction=settings.gpu_memory_fraction,
        gpu_split=settings.gpu_split,
        local_parameter_device=settings.local_parameter_device,
        soft_placement=settings.soft_placement,
        log_device_placement=settings.log_device_placement,
        hosts="auto",
        max_gpus=settings.max_gpus,
    )
    keras.utils.set_random_seed(settings.seed)
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()
    policies = {"fp32": "float32", "fp16": "mixed_float16", "bf16": "mixed_bfloat16"}
    keras.config.set_dtype_policy(policies[settings.dtype])
    return devices


def share_devices(
    settings: Settings, devices: Devices
) -> tuple[Devices, WishSource | None]:
    """Leaves some devices to other runs, if --share_gpus says so; waits for its own.

    Raises:
        RegistryError: Other runs have too many.
    """
    asked = tower_flags.read_shares(settings)
    if asked is None:
        return devices, None
    hosts = group.joined()
    if hosts is not None and hosts.count > 1:
        raise ValueError(
            f"Received {settings.as_flag('share_gpus')} on several hosts; expected it "
            "on one host, as the towers of one alone can come and go."
        )
    name = settings.absolute_model_dir
    share = feature("elastic.shares").share
    least, most, seconds = asked
    shares = share(devices.every, least, most, name, seconds)
    # They go to others also where an error ends the program.
    forks.at_exit(shares.leave)
    return devices.with_towers(shares.first), shares


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
    if hosts is not None and hosts.count > 1:
        raise ValueError(
            "Received --split_ratios=auto on several hosts; expected one ratio for "
            "each tower of a host, as auto measures the towers of one host alone."
        )
    if settings.clean:
        return None
    file = os.path.join(settings.absolute_model_dir, requests.RATIOS)
    return feature("elastic.balance").recall(file, devices.towers)


def with_whole_batch(settings: Settings, split_ratios: Sequence[int]) -> Settings:
    """Returns settings with the batch of all towers, if they have that of one.

    Hosts call it together.

    Args:
        settings: The settings.
        split_ratios: Of the towers of this host.
    """
    if not (settings.batch_per_tower or settings.batch_at_start):
        return settings
    towers = sum(this_host().exchange(len(split_ratios)))
    return settings.but(batch_size=settings.batch_size * towers)


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
    name = settings.update
    return UPDATES[name](**options[name])


def stages(settings: Settings) -> Stages:
    """Reads how devices share the model, as an argument of `multi_gpu_model`."""
    pairs = (entry.rpartition("=") for entry in settings.placement or ())
    placement = {pattern: int(stage) for pattern, _, stage in pairs}
    return Stages(settings.stages, placement or "auto", settings.pipeline_schedule)
