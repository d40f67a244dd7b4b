"""Lets several runs of a machine share its GPUs: each holds some of the places.

A place is the device of one tower: a GPU or a part of one, such as "GPU-5b8c.../0", or
a logical CPU, such as "cpu:0". `Registry` gives a run the places that it should hold;
`Others` finds the places that programs outside of sharing fill.
"""

from towers.devices.sharing.errors import RegistryError
from towers.devices.sharing.others import Others
from towers.devices.sharing.registry import Registry

__all__ = ["Others", "Registry", "RegistryError"]
