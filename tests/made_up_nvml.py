"""NVIDIA's management library as a made-up machine has it."""

import types
from typing import Any

import pynvml

MB = 2**20
NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


class Nvml:
    """nvidia-ml-py with the answers that are given; it refuses all other questions.

    Constants and errors are the real library's. An answer that is an error is raised.
    """

    def __init__(self, **answers: Any):
        """Takes answers by the names of functions, without "nvml"."""
        self.answers = {
            "Init": None,
            "DeviceGetCount": 1,
            "DeviceGetHandleByIndex": lambda index: f"gpu {index}",
            "DeviceGetHandleByUUID": lambda uuid: uuid,
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        """Returns a function, a constant or an error; each is one of the library."""
        real = getattr(pynvml, name)
        if not callable(real) or isinstance(real, type):
            return real

        def ask(*arguments):
            found = self.answers.get(name.removeprefix("nvml"), NOT_SUPPORTED)
            found = found(*arguments) if callable(found) else found
            if isinstance(found, Exception):
                raise found
            return found

        return ask


def memory(used_mb: int, total_mb: int) -> Any:
    """The memory of a GPU, as NVML tells it."""
    free_mb = total_mb - used_mb
    return types.SimpleNamespace(
        used=used_mb * MB, total=total_mb * MB, free=free_mb * MB
    )


def held(pid: int, used_mb: int | None) -> Any:
    """A process that holds memory of a GPU, as NVML tells it."""
    used = None if used_mb is None else used_mb * MB
    return types.SimpleNamespace(pid=pid, usedGpuMemory=used)
