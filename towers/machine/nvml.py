"""Asks NVIDIA's driver about GPUs, whoever uses them, by NVML (nvidia-ml-py).

It may be absent. It is asked only for what TensorFlow cannot tell, or not without
initialising.
"""

import concurrent.futures
import functools
import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from towers.program.voice import warn

T = TypeVar("T")

# It answers in milliseconds; where nothing else uses a GPU, it may start it first.
_LIMIT_S = 20.0
# Set when it has not answered: then it is not asked again.
_hangs = threading.Event()
_MB = 2**20
# Of what processes computed, the last seconds count.
_RECENT_S = 2.0
_VENDOR, _DISPLAY = "0x10de", "0x03"  # of the PCI bus

_WAYS = {
    # The second version counts as nvidia-smi does: without what is reserved.
    "used_mb": lambda nvml, gpu: (
        nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2).used / _MB
    ),
    "utilization": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "temperature_c": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(
        gpu, nvml.NVML_TEMPERATURE_GPU
    ),
    "power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
}


RESTART = "start the machine anew"
"""What helps if the driver does not answer."""

UNSEEN_MB = 100
"""More than an idle GPU shows as held, and less than a process that computes holds."""

# Kinds of processes; those of the second share a GPU by MPS.
_DRAWING = "Graphics"
_KINDS = "Compute", "MPSCompute", _DRAWING


class Holder(NamedTuple):
    """A process that holds memory of a GPU.

    Attributes:
        pid: Its number.
        memory_mb: What it holds; `None` if the driver does not tell.
        computes: Whether it computes; else it only draws, as a desktop's does.
        name: The driver's name of it, or empty.
    """

    pid: int
    memory_mb: int | None
    computes: bool = True
    name: str = ""


class Gpu(NamedTuple):
    """A GPU of this machine, or a slice of one, as the driver shows it.

    Attributes:
        index: Its number, as nvidia-smi counts.
        uuid: Its UUID, such as "GPU-5b8c..."; empty if the driver does not tell.
        memory_mb: All memory that it has; `None` if the driver does not tell.
        used_mb: The memory that all processes hold; likewise.
        free_mb: The memory that is free; likewise.
        name: Its model, or the kind of slice.
        capability: Its compute capability, such as "9.0"; empty if unknown.
        utilization: The part of the last moments in which it computed, 0 to 1.
        holders: The processes that hold memory of it.
        cut_up: Whether it is cut up into slices (MIG).
        slices: Those slices.
        notes: What else the doctor says of it.
        fault: Why the driver tells nothing of it, if so.
    """

    index: int
    uuid: str = ""
    memory_mb: int | None = None
    used_mb: int | None = None
    free_mb: int | None = None
    name: str = "a GPU"
    capability: str = ""
    utilization: float | None = None
    holders: tuple[Holder, ...] = ()
    cut_up: bool = False
    slices: "tuple[Gpu, ...]" = ()
    notes: tuple[str, ...] = ()
    fault: str = ""

    @property
    def unseen_mb(self) -> int:
        """Memory that is held, but by no process of `holders`, as by a container's."""
        held = [holder.memory_mb for holder in self.holders]
        if self.used_mb is None or None in held:
            return 0
        return max(0, self.used_mb - sum(held))


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


class Driver:
    """NVIDIA's management library, by nvidia-ml-py.

    It may be missing, refuse to answer or hang: what it would tell is then left out.

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
            self._refuses = "nvidia-ml-py is not installed; pip install nvidia-ml-py"
            return
        _ask(self._begin, None)

    def _begin(self):
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            missing = getattr(self._nvml, "NVMLError_LibraryNotFound", ())
            self._refuses = (
                "no NVIDIA driver is found on this machine; install it if there is a "
                "GPU"
                if isinstance(error, missing)
                else f"NVIDIA's driver says {error}; {RESTART}"
            )

    @property
    def refuses(self) -> str | None:
        """Why it tells nothing, and what to do; `None` if it answers."""
        if self._refuses is None and _hangs.is_set():
            return f"NVIDIA's driver gives nothing within {_LIMIT_S:g} s; {RESTART}"
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

    def gpus(self) -> tuple[Gpu, ...]:
        """Lists the GPUs of this machine, whoever uses them, as they are now.

        What the driver does not tell of one is left out.
        """
        count = self.ask(lambda nvml: nvml.nvmlDeviceGetCount(), 0)
        return tuple(self._gpu(index) for index in range(count))

    def _gpu(self, index):
        handle, fault = self.ask(lambda nvml: _handle(nvml, index), (None, ""))
        if handle is None:
            return Gpu(index, fault=fault)
        major, minor = self.ask(
            lambda nvml: nvml.nvmlDeviceGetCudaComputeCapability(handle), (0, 0)
        )
        busy = self.ask(
            lambda nvml: nvml.nvmlDeviceGetUtilizationRates(handle).gpu, None
        )
        gpu = self._part(index, handle)
        return gpu._replace(
            capability=f"{major}.{minor}" if major else "",
            utilization=None if busy is None else busy / 100,
            cut_up=self.ask(lambda nvml: _is_cut_up(nvml, handle), False),
            slices=tuple(self._slices(handle)),
        )

    def _part(self, index, handle):
        """Returns what the driver tells of a GPU, and of a slice alike."""
        memory = self._memory(handle)
        sizes = () if memory is None else (memory.total, memory.used, memory.free)
        gpu = Gpu(
            index,
            _text(self.ask(lambda nvml: nvml.nvmlDeviceGetUUID(handle), "")),
            *(size // _MB for size in sizes),
            holders=tuple(self._holders(handle)),
        )
        name = self.ask(lambda nvml: nvml.nvmlDeviceGetName(handle), gpu.name)
        return gpu._replace(name=_text(name))

    def _memory(self, handle):
        """Asks for the memory of a GPU: its `total`, `used` and `free` bytes.

        What the driver keeps for itself is not `used`, unless it is older than 510.
        """
        memory = self.ask(
            lambda nvml: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2), None
        )
        if memory is None:
            memory = self.ask(lambda nvml: nvml.nvmlDeviceGetMemoryInfo(handle), None)
        return memory

    def _holders(self, handle):
        holders: dict[int, Holder] = {}
        for kind in _KINDS:
            for process in self._processes(handle, kind):
                pid, used = process.pid, process.usedGpuMemory
                name = self.ask(
                    lambda nvml, pid=pid: nvml.nvmlSystemGetProcessName(pid), ""
                )
                used_mb = None if used is None else used // _MB
                # A process may be of two kinds, with the same memory.
                holder = Holder(pid, used_mb, kind != _DRAWING, _text(name))
                holders.setdefault(pid, holder)
        return holders.values()

    def _processes(self, handle, kind):
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        processes = self.ask(lambda nvml: getattr(nvml, name)(handle), None)
        if processes is None:  # as of a driver before 510
            older = f"{name}_v2"
            processes = self.ask(
                # Not all versions of nvidia-ml-py have it.
                lambda nvml: (
                    getattr(nvml, older)(handle) if hasattr(nvml, older) else ()
                ),
                (),
            )
        return processes

    def _slices(self, handle):
        most = self.ask(lambda nvml: nvml.nvmlDeviceGetMaxMigDeviceCount(handle), 0)
        for index in range(most):
            part = self.ask(
                lambda nvml, index=index: nvml.nvmlDeviceGetMigDeviceHandleByIndex(
                    handle, index
                ),
                None,
            )
            if part is not None:  # else this place is empty
                yield self._part(index, part)

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


def _handle(nvml: Any, index: int) -> tuple[Any | None, str]:
    """Returns NVML's handle of a GPU, or why there is none, as of one that is lost."""
    try:
        return nvml.nvmlDeviceGetHandleByIndex(index), ""
    except nvml.NVMLError as error:
        return None, str(error)


def _is_cut_up(nvml: Any, handle: Any) -> bool:
    current, _ = nvml.nvmlDeviceGetMigMode(handle)
    return current == nvml.NVML_DEVICE_MIG_ENABLE


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


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
    """Lists the GPUs of this machine, as they are when it is first asked.

    There are none if the driver does not tell all of them apart, or if one is cut up
    (MIG): CUDA then sees slices, with other memory, in another order.
    """
    listed = Driver().gpus()
    are_whole = all(gpu.uuid and gpu.memory_mb and not gpu.cut_up for gpu in listed)
    return listed if are_whole else ()


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
