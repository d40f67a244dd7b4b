"""Asks NVIDIA's driver how a whole GPU is, whoever uses it, as nvidia-smi does."""

import importlib
from typing import Any

_WAYS = {
    # The second version counts as nvidia-smi does: without what is reserved.
    "used_mb": lambda nvml, gpu: (
        nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2).used / 2**20
    ),
    "utilization": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "temperature_c": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(
        gpu, nvml.NVML_TEMPERATURE_GPU
    ),
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
}


class Driver:
    """NVIDIA's management library, by nvidia-ml-py.

    It may be missing or refuse to answer: values are then left out.

    Attributes:
        faults: Why a value was left out, by name.
    """

    def __init__(self, nvml: Any = None):
        """Initializes the library.

        Args:
            nvml: What stands in for the module `pynvml` of nvidia-ml-py.
        """
        self.faults: dict[str, str] = {}
        self._refuses = None
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
        except ImportError:
            self._refuses = "nvidia-ml-py is not installed"
            return
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            self._refuses = str(error)

    def read(self, uuid: str | None) -> dict[str, float]:
        """Reads what a GPU does now.

        Args:
            uuid: Its UUID; `None` if unknown.

        Returns:
            `used_mb`: memory that all processes take; `utilization`: part of the last
            moments in which it computed, 0 to 1; `temperature_c`; `power_w`.
        """
        unknown = "nvidia-smi's number of the GPU is unknown"
        if reason := self._refuses or (None if uuid else unknown):
            self.faults |= dict.fromkeys(_WAYS, reason)
            return {}
        values = {}
        for name, ask in _WAYS.items():
            try:
                gpu = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
                values[name] = float(ask(self._nvml, gpu))
            except self._nvml.NVMLError as error:
                self.faults[name] = str(error)
        return values
