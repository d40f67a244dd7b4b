"""The devices that runs share, and what of the machine each run gets."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from towers.doctor.gpus import checks as nvidia
from towers.launch import gpus
from towers.launch.gpus import VISIBLE
from towers.machine.limits import MEMORY_SHARE, cpu_count
from towers.program import voice, words
from towers.queue.runs import Run

# Of a GPU's memory, what a process takes beside the limit that TensorFlow keeps to:
# CUDA's context, cuDNN, cuBLAS.
_CONTEXT_MB = 700
# A GPU is free if others leave so much of its memory.
_FREE = 0.9


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that runs share.

    Attributes:
        name: Its name in CUDA_VISIBLE_DEVICES; of a logical CPU, its number.
        is_gpu: Whether it is one.
        memory_mb: A GPU's free memory; `None` if it is unknown.
    """

    name: str
    is_gpu: bool = False
    memory_mb: int | None = None

    def __str__(self) -> str:
        return f"{'GPU' if self.is_gpu else 'CPU'} {self.name}"


class Slots:
    """Devices, each of which takes one or several runs at once.

    Attributes:
        devices: All of them.
        cores: How many cores all runs divide.
    """

    def __init__(self, devices: Sequence[Device], runs_per_gpu: int, cores: int):
        """Takes the devices, and how many cores all runs divide.

        Raises:
            ValueError: A GPU is too small for so many runs.
        """
        self.devices, self._each, self.cores = tuple(devices), runs_per_gpu, cores
        for device in self.devices:
            if self._limit_mb(device) == 0:
                raise ValueError(
                    f"Received --runs_per_gpu={runs_per_gpu} for {device}, which has "
                    f"{device.memory_mb:,} MB free; expected more than "
                    f"{_CONTEXT_MB} MB for each run, so give fewer."
                )

    @property
    def count(self) -> int:
        """How many runs of one device there may be at once."""
        return len(self.devices) * self._each

    def check(self, runs: Sequence[Run]) -> None:
        """Checks that there is room for each run.

        Raises:
            ValueError: There is none for one, however long it waits.
        """
        for run in runs:
            if run.devices > len(self.devices):
                name = "max_gpus" if run.settings.max_gpus else "num_gpus"
                raise ValueError(
                    f"{run.name}: Received --{name}={run.devices}, but the queue has "
                    f"{words.count(len(self.devices), 'device')}; expected at most "
                    f"{len(self.devices)}, so give fewer, or more --devices."
                )
            self._check_memory(run)

    def _check_memory(self, run):
        settings = run.settings
        limits = [self._limit_mb(device) for device in self.devices]
        least = min((limit for limit in limits if limit is not None), default=None)
        asked = settings.gpu_memory_limit_mb
        if least is None:
            gpu = self.devices[0].is_gpu
            if self._each > 1 and gpu and asked is None:
                raise ValueError(
                    f"{run.name}: Received --runs_per_gpu={self._each} for GPUs whose "
                    "memory NVIDIA's driver does not tell; expected --gpu_memory as "
                    "well, in MB."
                )
            return
        if settings.allow_growth:
            raise ValueError(
                f"{run.name}: Received --gpu_memory=growth with --runs_per_gpu="
                f"{self._each}, which limits the memory of each run; expected one of "
                "them."
            )
        most = least // settings.gpu_split
        if asked is not None and asked > most:
            raise ValueError(
                f"{run.name}: Received {settings.as_flag('gpu_memory_limit_mb')} with "
                f"--runs_per_gpu={self._each}; expected at most {most}, or none."
            )

    def groups(self, size: int) -> list[tuple[Device, ...]]:
        """Returns groups of this many devices, each as often as it takes runs."""
        whole = len(self.devices) // size * size
        groups = [self.devices[k : k + size] for k in range(0, whole, size)]
        return groups * self._each

    def flags(self, run: Run, taken: Sequence[Device]) -> list[str]:
        """Returns the flags of a run on its devices."""
        settings = run.settings
        limits = [self._limit_mb(device) for device in taken]
        if settings.gpu_memory_limit_mb is None and None not in limits:
            each = min(limits) // settings.gpu_split
            settings = settings.but(gpu_memory=f"{each}")
        return settings.as_lines()

    def environ(
        self, taken: Sequence[Device], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Returns the environment of a run on its devices; what the user sets stays.

        Args:
            taken: Its devices.
            environ: That of the queue.
        """
        share = len(taken) / self.count
        threads = self.cores // self.count
        found = {MEMORY_SHARE: f"{share:.6g}"}
        if taken[0].is_gpu:
            # One CPU device serves all GPUs of a run. Each logical CPU has its own
            # threads.
            threads = self.cores * len(taken) // self.count
            found[VISIBLE] = ",".join(device.name for device in taken)
        number = str(max(1, threads))
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "TF_NUM_INTRAOP_THREADS": number,
            "TF_NUM_INTEROP_THREADS": number,
            **environ,
            **found,
        }

    def _limit_mb(self, device):
        """The most that a tower on a GPU may take; `None` if it is not limited."""
        if self._each == 1 or device.memory_mb is None:
            return None
        return max(0, device.memory_mb // self._each - _CONTEXT_MB)


def of_this_machine(
    asked: int | None, runs_per_gpu: int, environ: Mapping[str, str] = os.environ
) -> Slots:
    """Finds the devices of this machine, and says which are left out.

    Args:
        asked: How many; `None` for all GPUs that are free, or all cores.
        runs_per_gpu: How many runs each takes at once.
        environ: The environment. Where CUDA_VISIBLE_DEVICES names GPUs, all of these
            count as free.

    Raises:
        ValueError: There are fewer, or others hold all of them.
    """
    names = gpus.visible_in(environ)
    cards = {
        name: card
        for card in (nvidia.look(environ=environ).cards if names else ())
        for name in (str(card.index), card.uuid)
    }
    devices = []
    for name in names:
        card = cards.get(name)
        if card and card.free_mb < _FREE * card.memory_mb and VISIBLE not in environ:
            voice.say(
                f"GPU {name} is left out, as others hold "
                f"{card.memory_mb - card.free_mb:,} of its {card.memory_mb:,} MB; name "
                f"it in {VISIBLE} to use it."
            )
        else:
            devices.append(Device(name, True, card and card.free_mb))
    if names and len(devices) < (asked or 1):
        wanted = f"--devices={asked}" if asked else "no --devices"
        raise ValueError(
            f"Received {wanted}, but {words.count(len(devices), 'GPU')} of "
            f"{len(names)} can be used; expected fewer, or {VISIBLE} with GPUs to use "
            "although others hold their memory."
        )
    if not names:
        devices = [Device(str(number)) for number in range(asked or cpu_count())]
    return Slots(devices[:asked], runs_per_gpu, cpu_count())
