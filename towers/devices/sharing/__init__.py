"""Several runs of a machine share its GPUs: each holds some of the places.

A place is one tower's device: a GPU or a part of one, such as "GPU-5b8c.../0", or a
logical CPU, such as "cpu:0". `Registry` tells a run which ones it should hold; `Others`
tells it which ones are filled by programs that do not take part.
"""

from towers.devices.sharing.errors import RegistryError
from towers.devices.sharing.others import Others
from towers.devices.sharing.registry import Registry

__all__ = ["Others", "Registry", "RegistryError"]
