"""Other towers because runs of a machine share its GPUs."""

import math
import os
import time
from collections.abc import Callable, Mapping

from towers.devices.configuration import Devices
from towers.devices.sharing import Others, Registry, RegistryError
from towers.elastic.generations import Wish
from towers.machine import nvml
from towers.program import voice

_KEEPS = (
    "TensorFlow keeps the memory of a GPU that the run leaves until the run ends, so "
    "others get its computing time only. TF_GPU_ALLOCATOR=cuda_malloc_async gives "
    "memory back, which we have not tried."
)
# To look takes a millisecond or so.
_LOOK_EVERY_S = 1.0


class Shares:
    """The places that a run has among those that runs share; a source of `Resize`.

    Attributes:
        first: The devices that the run has got, as it joined.
    """

    def __init__(
        self,
        registry: Registry,
        devices: Mapping[str, str],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Waits until the run has its minimum.

        Args:
            registry: Tells which places are the run's.
            devices: The device of each place.
            seconds: How long to wait at most.
            clock: Returns seconds.

        Raises:
            RegistryError: Others have too much of it.
        """
        self._registry, self._devices, self._clock = registry, devices, clock
        self._held = registry.join(seconds, voice.say)
        self.first = [devices[place] for place in self._held]
        self._looked_s, self._said = clock(), ""
        # What the run cannot have, until it should have something else.
        self._refused: tuple[str, ...] = ()

    def look(self) -> Wish | None:
        """Returns other towers, if the run should have others now."""
        if self._clock() - self._looked_s < _LOOK_EVERY_S:
            return None
        self._looked_s = self._clock()
        try:
            places = self._registry.look()
        except RegistryError as error:
            self._warn(str(error))
            return None
        if {*places} == {*self._held} or places == self._refused:
            return None
        return Wish(
            *("--share_gpus", [self._devices[place] for place in places]),
            applied=lambda: self._hold(places),
            refused=lambda reason: self._refuse(places, reason),
        )

    def _hold(self, places):
        """Tells others that they may have what is left."""
        self._held, self._refused = places, ()
        try:
            self._registry.hold(places)
        except RegistryError as error:
            self._warn(str(error))

    def _refuse(self, places, reason):
        """Keeps what the run has, and says why."""
        self._hold(self._held)
        self._refused = places
        self._warn(reason)

    def _warn(self, reason):
        if reason != self._said:
            self._said = reason
            voice.warn(f"The towers stay as they are: {reason}")

    def leave(self) -> None:
        """Gives up all places; those of a process that has ended are free anyhow."""
        try:
            self._registry.leave()
        except RegistryError as error:
            voice.warn(f"Others see this run until its process has ended: {error}")


def share(
    devices: Devices, minimum: float, limit: float, name: str, seconds: float
) -> Shares:
    """Joins the runs of this machine that share devices.

    Args:
        devices: All devices that are set up.
        minimum: What part of their memory the run is sure of.
        limit: What part it takes at most.
        name: What others call the run.
        seconds: How long to wait for the minimum.

    Raises:
        RegistryError: The run cannot have its minimum.
    """
    count = len(devices.towers)
    # Rounded for what floats make of thirds.
    least = max(1, math.ceil(round(minimum * count, 6)))
    most = max(least, math.floor(round(limit * count, 6)))
    places = _places(devices)
    options = {}
    if devices.physical:
        options["filled"] = Others().filled
        if os.environ.get("TF_GPU_ALLOCATOR") != "cuda_malloc_async":
            voice.say(_KEEPS)
    registry = Registry([*places], least, most, name=name, **options)
    return Shares(registry, places, seconds)


def _places(devices: Devices) -> dict[str, str]:
    """What all runs call a device: by its GPU, and which part of that it is."""
    if not devices.physical:
        return {f"cpu:{k}": device for k, device in enumerate(devices.towers)}
    places: dict[str, str] = {}
    for device, index in zip(devices.towers, devices.physical, strict=True):
        gpu = nvml.gpu(index)
        name = gpu.uuid if gpu else f"gpu:{index}"
        part = sum(place.startswith(f"{name}/") for place in places)
        places[f"{name}/{part} of {devices.physical.count(index)}"] = device
    return places
