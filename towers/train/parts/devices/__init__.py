"""The devices of a run, as settings describe them."""

from towers.train.parts.devices.configured import (
    configure_devices,
    share_devices,
    with_free_gpus,
)
from towers.train.parts.devices.division import (
    split_ratios,
    stages,
    variable_update,
    with_whole_batch,
)

__all__ = [
    "configure_devices",
    "share_devices",
    "split_ratios",
    "stages",
    "variable_update",
    "with_free_gpus",
    "with_whole_batch",
]
