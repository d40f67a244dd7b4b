"""The devices of a run, as settings describe them."""

import atexit
import os
from typing import Any

import keras
import tensorflow as tf

from towers.cluster import process_group
from towers.devices import Devices, configure
from towers.elastic import balance
from towers.elastic.shares import Shares, share
from towers.program import words
from towers.train.settings import Settings


def configure_devices(settings: Settings) -> Devices:
    """Sets up the devices, the random seeds and the type to compute in."""
    num_gpus, indices = settings.num_gpus, None
    if settings.gpu_indices:
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
) -> tuple[Devices, Shares | None]:
    """Leaves some devices to other runs, if --share_gpus says so; waits for its own.

    Raises:
        RegistryError: Other runs have too many.
    """
    fractions = settings.shared_fractions
    if fractions is None:
        return devices, None
    hosts = process_group.joined()
    if process_group.member() is not None or (hosts is not None and hosts.count > 1):
        raise ValueError(
            f"Received {settings.as_flag('share_gpus')} on several hosts; expected it "
            "on one host, as the towers of one alone can come and go."
        )
    name = settings.absolute_model_dir
    shares = share(devices.every, *fractions, name, settings.join_seconds)
    # They go to others also where an error ends the program.
    atexit.register(shares.leave)
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
    if len(ratios) != towers:
        raise ValueError(
            f"Received {settings.as_flag('split_ratios')} for "
            f"{words.count(towers, 'tower')}; expected one ratio for each, so give "
            f"{towers} of them, or --num_gpus={len(ratios) * stages}."
        )
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
