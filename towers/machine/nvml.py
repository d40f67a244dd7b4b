"""Asks NVIDIA's driver about whole GPUs, whoever uses them, as nvidia-smi does.

It may be absent. It is asked only for what TensorFlow cannot tell, or not without
initialising.
"""

import concurrent.futures
import functools
import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from towers.program.voice import warn

T = TypeVar("T")

# It answers in milliseconds; where nothing else uses a GPU, it may start it first.
_LIMIT_S = 20.0
# Set when it has not answered: then it is not asked again.
_hangs = threading.Event()
# Of what processes computed, the last seconds count.
_RECENT_S = 2.0
_VENDOR, _DISPLAY = "0x10de", "0x03"  # of the PCI bus

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


UNSEEN_MB = 100
"""More than an idle GPU shows as held, and less than a process that computes holds."""

COMPUTING = "Compute", "MPSCompute"
"""Kinds of processes that compute; those of the second share a GPU by MPS."""


class Gpu(NamedTuple):
    """A GPU of this machine.

    Attributes:
        index: Its number, as nvidia-smi counts.
        uuid: Its UUID, such as "GPU-5b8c...".
        memory_mb: All memory that it has.
    """

    index: int
    uuid: str
    memory_mb: int


class Use(NamedTuple):
    """Who uses a GPU.

    Attributes:
        memory: The part of its memory that is taken, 0 to 1, by whomever.
        memory_of: What each process takes of it, by its number.
        compute_of: The part of the last moments in which each computed, 0 to 1;
            without those that did not, or if the driver does not tell.
    """

    memory: float
    memory_of: dict[int, float]
    compute_of: dict[int, float]


class Holders(NamedTuple):
    """Who holds memory of a GPU.

    Attributes:
        pids: Processes that compute, by their numbers.
        unseen_mb: Memory that is held, but by none of the processes that are listed,
            as those of a container are not.
    """

    pids: tuple[int, ...]
    unseen_mb: int


class Driver:
    """NVIDIA's management library, by nvidia-ml-py.

    It may be missing, refuse to answer or hang: what it would tell is then left out.

    Attributes:
        faults: Why a value was left out, by name.
        absent: Whether this machine has no driver of NVIDIA: its library is not there.
    """

    def __init__(self, nvml: Any = None):
        """Initializes the library.

        Args:
            nvml: What stands in for the module `pynvml` of nvidia-ml-py.
        """
        self.faults: dict[str, str] = {}
        self.absent = False
        self._refuses = None
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
        except ImportError:
            self._refuses = "nvidia-ml-py is not installed"
            return
        _ask(self._begin, None)

    def _begin(self):
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            self._refuses = str(error)
            missing = getattr(self._nvml, "NVMLError_LibraryNotFound", ())
            self.absent = isinstance(error, missing)

    @property
    def refuses(self) -> str | None:
        """Why it tells nothing; `None` if it answers."""
        if self._refuses is None and _hangs.is_set():
            return f"it has not answered within {_LIMIT_S:g} s"
        return self._refuses

    def ask(self, question: Callable[[Any], T], unknown: T) -> T:
        """Asks for what has no method here.

        Args:
            question: Takes the module `pynvml`, whose errors it may raise.
            unknown: What to return if the driver does not tell.
        """

        def answer():
            # The second one is of a function that this driver does not have yet.
            error = self._nvml.NVMLError
            other = getattr(self._nvml, "NVMLLibraryMismatchError", error)
            try:
                return question(self._nvml)
            except (error, other):
                return unknown

        return unknown if self._refuses else _ask(answer, unknown)

    def memory(self, handle: Any) -> Any | None:
        """Returns the memory of a GPU: its `total`, `used` and `free` bytes.

        What the driver keeps for itself is not `used`, unless it is older than 510.

        Args:
            handle: NVML's handle of the GPU, or of a slice.
        """
        found = self.ask(
            lambda nvml: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2), None
        )
        if found is None:
            found = self.ask(lambda nvml: nvml.nvmlDeviceGetMemoryInfo(handle), None)
        return found

    def processes(
        self, handle: Any, kinds: Sequence[str] = (*COMPUTING, "Graphics")
    ) -> dict[int, int | None]:
        """Returns the processes that hold memory of a GPU, and how many bytes each.

        A size is `None` if the driver does not tell.

        Args:
            handle: NVML's handle of the GPU, or of a slice.
            kinds: Which processes; a desktop's are of kind "Graphics".
        """
        held: dict[int, int | None] = {}
        for kind in kinds:
            name = f"nvmlDeviceGet{kind}RunningProcesses"
            found = self.ask(lambda nvml, name=name: getattr(nvml, name)(handle), None)
            if found is None:  # as of a driver before 510
                found = self.ask(
                    lambda nvml, name=f"{name}_v2": (
                        # Not all versions of nvidia-ml-py have it.
                        getattr(nvml, name)(handle) if hasattr(nvml, name) else []
                    ),
                    [],
                )
            # A process may be of two kinds, with the same memory.
            held |= {each.pid: each.usedGpuMemory for each in found}
        return held

    def holders(self, uuid: str) -> Holders | None:
        """Tells who holds memory of a GPU; `None` if the driver does not tell.

        Args:
            uuid: Its UUID.
        """
        handle = self.ask(lambda nvml: nvml.nvmlDeviceGetHandleByUUID(uuid), None)
        memory = None if handle is None else self.memory(handle)
        if memory is None:
            return None
        pids = self.processes(handle, COMPUTING)
        listed = self.processes(handle).values()
        if None in listed:
            listed = [memory.used]  # whatever they hold
        return Holders(tuple(pids), max(0, memory.used - sum(listed)) // 2**20)

    def has_slices(self) -> bool:
        """Tells whether a GPU of this machine is cut up (MIG)."""
        count = self.ask(lambda nvml: nvml.nvmlDeviceGetCount(), 0)
        return any(
            self.ask(
                lambda nvml, index=index: self._is_cut_up(
                    nvml.nvmlDeviceGetHandleByIndex(index)
                ),
                False,
            )
            for index in range(count)
        )

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
        return _ask(lambda: self._read(uuid), {})

    def _read(self, uuid):
        values = {}
        for name, ask in _WAYS.items():
            try:
                gpu = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
                values[name] = float(ask(self._nvml, gpu))
            except self._nvml.NVMLError as error:
                self.faults[name] = str(error)
        return values

    def use(self, uuid: str) -> Use | None:
        """Tells who uses a GPU; `None` if the driver does not tell.

        Args:
            uuid: Its UUID.
        """
        return self.ask(lambda nvml: self._use(nvml, uuid), None)

    def _use(self, nvml, uuid):
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2)
        found = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        taken = {each.pid: each.usedGpuMemory for each in found}
        if None in taken.values():  # as on Windows
            return None
        memory_of = {pid: used / memory.total for pid, used in taken.items()}
        return Use(memory.used / memory.total, memory_of, self._compute_of(gpu))

    def _compute_of(self, gpu):
        since = int((time.time() - _RECENT_S) * 1e6)
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(gpu, since)
        except self._nvml.NVMLError:
            return {}  # also where none has computed
        # Some drivers give older ones, too.
        recent = [each for each in samples if each.timeStamp > since]
        recent.sort(key=lambda each: each.timeStamp)
        return {each.pid: each.smUtil / 100 for each in recent}

    def gpus(self) -> tuple[Gpu, ...]:
        """Lists the GPUs; none if the driver does not tell, or one is cut up (MIG)."""
        return self.ask(self._gpus, ())

    def _gpus(self, nvml):
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            if self._is_cut_up(gpu):
                # CUDA then sees instances: other memory, another order.
                return ()
            memory_mb = nvml.nvmlDeviceGetMemoryInfo(gpu).total // 2**20
            found.append(Gpu(index, nvml.nvmlDeviceGetUUID(gpu), memory_mb))
        return tuple(found)

    def _is_cut_up(self, gpu):
        try:
            current, _ = self._nvml.nvmlDeviceGetMigMode(gpu)
        except self._nvml.NVMLError:
            return False  # a kind of GPU that cannot be
        return current == self._nvml.NVML_DEVICE_MIG_ENABLE


def _ask(question: Callable[[], T], unknown: T) -> T:
    """Asks in a thread of its own, as a driver that hangs would keep this one for ever.

    Args:
        question: Asks the driver.
        unknown: The answer of one that hangs.
    """
    if _hangs.is_set():
        return unknown
    answer = concurrent.futures.Future()

    def ask():
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="nvml", daemon=True).start()
    try:
        return answer.result(_LIMIT_S)
    except TimeoutError:
        _hangs.set()
        warn(
            f"NVIDIA's driver has not answered within {_LIMIT_S:g} s; what it would "
            "tell of the GPUs is left out, and it is not asked again."
        )
        return unknown


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """Lists the GPUs of this machine; see `Driver.gpus`."""
    return Driver().gpus()


def gpu(index: int, environ: Mapping[str, str] = os.environ) -> Gpu | None:
    """Finds the GPU that TensorFlow has by an index; `None` if unsure.

    Args:
        index: TensorFlow's, among the physical GPUs.
        environ: The variables by which CUDA numbers GPUs.
    """
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return None
    entry = str(index)
    if "CUDA_VISIBLE_DEVICES" in environ:
        entries = environ["CUDA_VISIBLE_DEVICES"].split(",")
        entry = entries[index].strip() if index < len(entries) else ""
    matches = [
        each
        for each in gpus()
        # CUDA accepts the beginning of a UUID.
        if entry == str(each.index)
        or (entry[:4] == "GPU-" and each.uuid.startswith(entry))
    ]
    return matches[0] if len(matches) == 1 else None


def has_gpus(root: Path = Path("/")) -> bool:
    """Tells whether this machine shows a GPU of NVIDIA's, by a file or its driver."""
    if on_bus(root) or device_files(root):
        return True
    return Driver().ask(lambda nvml: nvml.nvmlDeviceGetCount(), 0) > 0


def on_bus(root: Path) -> int:
    """Returns how many GPUs the PCI bus has; a container sees those of the host."""
    return sum(
        _read(folder / "vendor") == _VENDOR
        and _read(folder / "class").startswith(_DISPLAY)
        for folder in (root / "sys/bus/pci/devices").glob("*")
    )


def device_files(root: Path) -> int:
    """Returns how many files /dev/nvidia0, ... there are."""
    return len([*(root / "dev").glob("nvidia[0-9]*")])


def _read(path):
    try:
        return path.read_text().strip()
    except OSError:
        return ""
