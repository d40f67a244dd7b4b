"""NVIDIA's GPUs: those of the machine, against those that TensorFlow finds, and why."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from towers.doctor import versions
from towers.doctor.devices import DeviceProbe
from towers.doctor.finding import WRONG, Finding, note, ok, wrong
from towers.doctor.gpus.seen import HIDES, SeenMachine, look
from towers.keras_adapter.versions import installed, packages
from towers.machine.nvml import Gpu, Holder
from towers.program.extras import install_command

__all__ = ["SeenMachine", "look"]

# https://docs.nvidia.com/cuda/cuda-toolkit-release-notes, "minor version compatibility"
# (docs/reference/gpus.md)
_LEAST_DRIVER = {"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"}
# The driver that came with it, which compiles kernels that the wheel has no code of.
_COMPILING_DRIVER = {"12.5": "555.42.02"}
# From this version on, cuDNN lacks GPUs of lower compute capabilities, and crashes.
_CUDNN, _WITHOUT_OLD, _OLD = "nvidia-cudnn-cu12", (9, 11), (7, 5)
# From this generation on, some PTX of older ones fails (docs/reference/gpus.md).
_BLACKWELL = 10
_ORDER = "CUDA_DEVICE_ORDER"
_GROWTH, _ALLOCATOR = "TF_FORCE_GPU_ALLOW_GROWTH", "TF_GPU_ALLOCATOR"
_THREADS, _THREAD_MODES = "TF_GPU_THREAD_MODE", ("global", "gpu_private", "gpu_shared")
_OURS = Path(__file__).parents[3]
# Where TensorFlow's log tells why it does not use a GPU.
_REASON = re.compile(
    r"\] (.*(?:dlopen|cuInit|cuda drivers|Ignoring visible gpu|kernel driver).*)"
)


def check_gpus(
    machine: SeenMachine, found: DeviceProbe, environ: Mapping[str, str] = os.environ
) -> Finding:
    """Checks that TensorFlow finds the machine's GPUs; says why, if it does not."""
    figures = {"machine": machine.gpus, "tensorflow": found.gpus}
    if not machine.gpus and not found.gpus:
        return note("none in this machine: logical CPUs stand in for them", **figures)
    if found.gpus is None:
        text = f"{machine.gpus} in this machine; not known to TensorFlow, which fails"
        return wrong(text, **figures)
    text = f"{machine.gpus} in this machine, TensorFlow finds {found.gpus}"
    hides = environ.get(HIDES)
    if machine.cut_up and found.gpus and hides is None:
        return note(
            f"{text}: a GPU is cut up into slices (MIG), of which CUDA gives a process "
            f"one; train on each in a process of its own, with {HIDES}=MIG-..., as "
            "towers doctor --gpus lists them",
            **figures,
        )
    if found.gpus >= machine.gpus:
        names = ", ".join(card.name for card in machine.cards)
        return ok(f"{text}: {names}" if names else text, **figures)
    if hides is not None and (found.gpus or machine.hidden):
        return note(f"{text}, as {HIDES}={hides!r} hides the others", **figures)
    reason = _reason(machine, found, hides)
    return wrong(f"{text}, because {reason}", reason=reason, **figures)


def check_driver(machine: SeenMachine, found: DeviceProbe) -> Finding:
    """Checks that the driver is as new as TensorFlow's CUDA needs it."""
    if not machine.in_use:
        return ok("none is needed without a GPU")
    if not machine.driver and found.gpus:
        why = f", as {machine.fault}" if machine.fault else ""
        return note(f"TensorFlow finds GPUs by it; its version is not known{why}")
    if not machine.driver:
        return wrong(f"not known, as {machine.fault}")
    cuda = _built_for(found)
    least = _LEAST_DRIVER.get(cuda.split(".")[0])
    figures = {"found": machine.driver, "cuda": cuda, "expected": least}
    if least is None:
        return ok(machine.driver, **figures)
    text = f"{machine.driver} (CUDA {cuda} expects at least {least})"
    if _parts(machine.driver) < _parts(least):
        return wrong(f"{text}; install a newer driver", **figures)
    newer = _COMPILING_DRIVER.get(".".join(cuda.split(".")[:2]), least)
    without = {c.capability for c in machine.cards if not _has_code(c, found)}
    if without and _parts(machine.driver) < _parts(newer):
        names = ", ".join(sorted(without))
        return note(
            f"{text}, but for compute capability {names} it has to compile kernels of "
            f"TensorFlow, as drivers do from {newer} on; install a newer driver",
            **figures | {"expected": newer},
        )
    return ok(text, **figures)


def check_kernels(machine: SeenMachine, found: DeviceProbe) -> Finding:
    """Checks that TensorFlow has kernels for the GPUs, as machine code or as PTX."""
    built = (found.build or {}).get("cuda_compute_capabilities", ())
    if not machine.in_use:
        return ok("none are needed without a GPU")
    if not built or not any(card.capability for card in machine.cards):
        return note("not known for which GPUs TensorFlow has kernels")
    figures = {"built": [*built], "cards": [c.capability for c in machine.cards]}
    without = [c for c in machine.cards if c.capability and not _has_code(c, found)]
    text = f"this TensorFlow is built for {', '.join(built)}"
    for card in without:
        name = f"GPU {card.index} ({card.name}, compute capability {card.capability})"
        newer = [ptx for ptx in _ptx(built) if ptx <= _parts(card.capability)]
        if not newer:
            return wrong(
                f"{text}, so it has no kernels for {name}; {_another(card)}", **figures
            )
        generation, _ = _parts(card.capability)
        if generation >= _BLACKWELL and max(newer)[0] < generation:
            return note(
                f"{text}, so it has no kernels for {name}: the driver compiles those "
                "for an older generation as they are first used, which may take 30 "
                "minutes, and some fail with CUDA_ERROR_INVALID_PTX or "
                f"CUDA_ERROR_INVALID_HANDLE; {_another(card)}",
                **figures,
            )
    if without:
        capability = without[0].capability
        return ok(
            f"{text}; for {capability}, the driver compiles kernels as they are first "
            "used",
            **figures,
        )
    return ok(text, **figures)


def check_libraries(machine: SeenMachine, found: DeviceProbe) -> Finding:
    """Checks CUDA's and cuDNN's libraries, which pip or the system has installed."""
    if found.build is None:
        return note("not known, as TensorFlow cannot be imported")
    cuda, cudnn = _built_for(found), found.build.get("cudnn_version", "")
    figures = {"cuda": cuda, "cudnn": cudnn}
    if not cuda and _has_cuda(found):
        return note("TensorFlow does not say for which CUDA it is built", **figures)
    if not cuda:
        return ok("TensorFlow is built without CUDA", **figures)
    text = f"TensorFlow is built for CUDA {cuda} and cuDNN {cudnn}"
    if not machine.in_use:
        return ok(f"{text}, not needed without a GPU", **figures)
    asked = [*versions.requirements("tensorflow", "and-cuda")]
    absent = [each for each in asked if installed(each.name) is None]
    bad = versions.unfit([each for each in asked if each not in absent])
    if bad:
        return wrong(f"{text}, but there is {', '.join(bad)}; {_install()}", **figures)
    has = installed(_CUDNN)
    left_out = [
        c for c in machine.cards if c.capability and _parts(c.capability) < _OLD
    ]
    if left_out and has and _parts(has) >= _WITHOUT_OLD:
        return wrong(
            f"{text}, but cuDNN {has} leaves out compute capability "
            f"{left_out[0].capability}; pip install '{_CUDNN}<9.11'",
            **figures,
        )
    if absent and not found.gpus:
        names = ", ".join(each.name for each in absent)
        return wrong(f"{text}, but pip has no {names}; {_install()}", **figures)
    return ok(f"{text}, as {'the system' if absent else 'pip'} has them", **figures)


def check_settings(environ: Mapping[str, str] = os.environ) -> Finding:
    """Checks what the environment says of GPUs' memory, order and threads."""
    known = (_GROWTH, _ALLOCATOR, _ORDER, HIDES, _THREADS)
    figures = {name: environ[name] for name in known if name in environ}
    growth, allocator, order = map(figures.get, (_GROWTH, _ALLOCATOR, _ORDER))
    threads = figures.get(_THREADS, "global")
    # TensorFlow logs what it does not understand, and goes on without it; with a wrong
    # mode of threads, it does not start.
    bad, doubts = [], []
    if growth in ("true", "false"):
        takes = "as needed" if growth == "true" else "all at once"
        doubts.append(f"{_GROWTH}={growth}: memory is taken {takes} despite any flag")
    elif growth is not None:
        bad.append(f"{_GROWTH}={growth!r} is not understood; expected true or false")
    if allocator not in (None, "", "cuda_malloc_async"):
        expected = "expected cuda_malloc_async, or none"
        bad.append(f"{_ALLOCATOR}={allocator!r} is not understood; {expected}")
    if threads.lower() not in _THREAD_MODES:
        expected = f"expected {', '.join(_THREAD_MODES[:-1])} or {_THREAD_MODES[-1]}"
        bad.append(f"{_THREADS}={threads!r} is not understood; {expected}")
    if order not in (None, "PCI_BUS_ID"):
        doubts.append(f"{_ORDER}={order}: GPUs are numbered not as by nvidia-smi")
    if bad:
        return wrong("; ".join(bad), **figures)
    if doubts:
        return note("; ".join(doubts), **figures)
    listed = ", ".join(f"{name}={value}" for name, value in figures.items())
    return ok(listed or "none: memory grows as needed", **figures)


def check_memory(machine: SeenMachine) -> Finding:
    """Checks the memory that is free on each GPU, and who holds the rest."""
    if not machine.in_use:
        return ok("there is none without a GPU")
    if not machine.cards:
        return note(f"not known, as {machine.fault}")
    free_mb = {card.index: card.free_mb for card in machine.cards}
    text = ", ".join(
        f"GPU {card.index} has {card.free_mb:,} of {card.memory_mb:,} MB free"
        for card in machine.cards
    )
    held = [card for card in machine.cards if card.free_mb < 0.9 * card.memory_mb]
    if not held:
        return ok(text, free_mb=free_mb)
    advice = f"{text}; GPU {held[0].index}'s is held by {_holders(held[0])}"
    if any(card.free_mb < 1024 for card in held):
        return wrong(
            f"{advice}: end it, or choose other GPUs, as by --gpu_indices=free",
            free_mb=free_mb,
        )
    return note(advice, free_mb=free_mb)


def _reason(machine: SeenMachine, found: DeviceProbe, hides: str | None) -> str:
    """Why TensorFlow does not find a GPU that is there, and what to do."""
    if hides is not None:
        return f"{HIDES}={hides!r} names none of them; unset it"
    if not _has_cuda(found):
        return f"this TensorFlow is built without CUDA; {_install()}"
    if not machine.device_files and not machine.cards:
        return (
            f"there is no /dev/nvidia0, so the driver is not loaded, or the container "
            f"was started without docker's --gpus=all ({machine.fault}); or hide the "
            f"GPU by {HIDES}=-1"
        )
    if not machine.cards:
        return machine.fault
    driver = check_driver(machine, found)
    if driver.verdict == WRONG:
        return f"the driver is {driver.text}"
    for check in (check_libraries, check_kernels):
        finding = check(machine, found)
        if finding.verdict == WRONG:
            return finding.text
    if machine.cut_up:
        return (
            "a GPU is set to be cut up (MIG), and has no slice; make one by nvidia-smi "
            "mig -cgi PROFILE -C, or use whole GPUs by nvidia-smi -mig 0"
        )
    logged = _REASON.findall(found.log)
    return f"it says: {logged[0]}" if logged else "of what TensorFlow does not tell"


def _built_for(found: DeviceProbe) -> str:
    return (found.build or {}).get("cuda_version", "")


def _has_cuda(found: DeviceProbe) -> bool:
    return bool((found.build or {}).get("is_cuda_build") or _built_for(found))


def _has_code(card: Gpu, found: DeviceProbe) -> bool:
    """Tells whether TensorFlow's kernels are machine code of a GPU, or all is unknown.

    Code runs on GPUs of the same major capability, from its minor one on.
    """
    built = (found.build or {}).get("cuda_compute_capabilities", ())
    codes = [each.removeprefix("sm_") for each in built if each.startswith("sm_")]
    major, _, minor = card.capability.partition(".")
    return not (built and minor) or any(
        code[:-1] == major and code[-1] <= minor for code in codes
    )


def _ptx(built: Sequence[str]) -> list[tuple[int, int]]:
    """The compute capabilities of the PTX that TensorFlow contains."""
    names = [each.removeprefix("compute_") for each in built if "compute_" in each]
    return [(int(name[:-1]), int(name[-1])) for name in names if name.isdecimal()]


def _another(card: Gpu) -> str:
    """What to do about a GPU that TensorFlow has no kernels for."""
    code = f"sm_{card.capability.replace('.', '')}"
    return (
        f"install a TensorFlow that is built for {code} (docs/reference/gpus.md), or "
        f"leave the GPU out by {HIDES}"
    )


def _install(prefix: Path = Path(sys.prefix), ours: Path = _OURS) -> str:
    """The command that installs CUDA's libraries where this program was started.

    Args:
        prefix: The environment of this Python.
        ours: Where the folder `towers` is: a checkout, or installed packages.
    """
    if prefix == ours / ".venv" and not (prefix / ".ready-gpu").exists():
        return "make GPU=1"
    # For the version that is there, as another one may ask for other libraries;
    # tensorflow-cpu and tf-nightly have none of the same number.
    if version := packages("tensorflow").get("tensorflow"):
        return f"pip install 'tensorflow[and-cuda]=={version}'"
    return install_command("gpu")


def _holders(card: Gpu) -> str:
    names = [_who(holder) for holder in card.holders]
    return ", ".join(names) or "a process that NVIDIA's driver does not name here"


def _who(holder: Holder) -> str:
    """Says what a process is, as far as it can be seen from here."""
    name = f" ({holder.name})" if holder.name else ""
    short = f"process {holder.pid}{name}"
    try:
        from towers.processes.described import describe_holder
    except ImportError:
        return short  # psutil may be what is missing
    process = describe_holder(holder.pid)
    return str(process) if process.command or not name else short


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
