"""Turns a wish for devices into device strings.

`configure` sets devices up before TensorFlow initialises. `resolve` is for the time
after that: it turns a `gpus` argument into strings for devices that exist. `table` says
it in words.
"""

from towers.devices.configuration import Devices, configure
from towers.devices.listing import rows, table
from towers.devices.names import HOST, is_gpu, nccl_fits, resolve, short

__all__ = [
    "HOST",
    "Devices",
    "configure",
    "is_gpu",
    "nccl_fits",
    "resolve",
    "rows",
    "short",
    "table",
]
