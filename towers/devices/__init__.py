"""Turns a wish for devices into device strings, before TensorFlow initialises.

`configure` decides which GPUs are visible, how their memory is taken and what
stands in for GPUs where there are none. It must come before anything runs on
TensorFlow, and leaves TensorFlow uninitialised, so that collectives between hosts
can still be set up after it. `resolve` is for the time after that: it turns a
`gpus` argument into strings for devices that exist. `table` says it in words.

Everything after this module works on the strings alone, so that logical CPUs can
test it.
"""

import collections
import dataclasses
import functools
import numbers
import os
import platform
import re
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import tensorflow as tf

from towers.program import startup, words

HOST = "/device:CPU:0"

_TABLE_WIDTH = 100

_DEVICE = re.compile(
    r"(?:/job:localhost/replica:0/task:0)?/?(?:device:)?(CPU|GPU):(\d+)", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of one process, as configured.

    Attributes:
        towers: One device string for each tower, such as "/device:GPU:0".
        home: Device of the shared variables.
        physical: For each tower on a GPU, the index of that GPU among all that
            TensorFlow found; empty for towers on the CPU.
        local_parameter_device: The wish `home` comes from, "cpu" or "gpu"; `None` if
            there was none.
        memory: What one tower may use, in words.
        note: What the user should know besides, as sentences; may be empty.
    """

    towers: tuple[str, ...]
    home: str
    physical: tuple[int, ...] = ()
    local_parameter_device: str | None = None
    memory: str = "shared with the host"
    note: str = ""


def configure(
    num_gpus: int | None = None,
    *,
    gpu_indices: Sequence[int] | None = None,
    allow_growth: bool | None = None,
    gpu_memory_limit_mb: int | None = None,
    gpu_split: int = 1,
    local_parameter_device: str | None = None,
    soft_placement: bool = True,
    log_device_placement: bool = False,
) -> Devices:
    """Chooses and sets up the devices of this process.

    Without a GPU, logical CPUs stand in for the towers. When TensorFlow is
    initialised already, what it has is accepted if it fits the wish.

    Args:
        num_gpus: GPUs to use; None means all visible ones, or one CPU tower where
            there are none. More than there are is an error where there are any.
        gpu_indices: Which GPUs to use, by TensorFlow's index, in the order of the
            towers. None means the first `num_gpus`.
        allow_growth: Whether TensorFlow takes a GPU's memory as needed (True) or
            all at once (False). None means True unless there is a limit.
        gpu_memory_limit_mb: Most memory one tower may take on its GPU, in MB.
        gpu_split: Logical GPUs, and so towers, on each GPU; above 1 it needs a
            limit. Logical CPUs that stand in are multiplied likewise.
        local_parameter_device: Home of the shared variables: "cpu", or "gpu" for
            the first tower's device (also where that is a logical CPU). None means
            the first tower's GPU, or the CPU where towers are on no GPU.
        soft_placement: Whether an op that its device lacks may run elsewhere.
        log_device_placement: Whether TensorFlow logs where each op runs.

    Returns:
        The devices, len(towers) == number of GPUs times `gpu_split`.

    Raises:
        ValueError: If the wish contradicts itself or the machine.
        RuntimeError: If TensorFlow was initialised before, with other devices.
    """
    _check_counts(num_gpus, gpu_memory_limit_mb, gpu_split)
    _check_indices(num_gpus, gpu_indices)
    _check_memory_wish(allow_growth, gpu_memory_limit_mb, gpu_split)
    if local_parameter_device not in (None, "cpu", "gpu"):
        raise ValueError(
            'local_parameter_device must be "cpu", "gpu" or None, but '
            f"{local_parameter_device!r} was received; choose one of them."
        )
    startup.prepare_gpus()
    with startup.quiet_gpus():
        gpus = tf.config.list_physical_devices("GPU")
    visible = tf.config.get_visible_devices("GPU")
    chosen = _choose(len(gpus), [gpus.index(g) for g in visible], num_gpus, gpu_indices)
    if chosen:
        _check_fits_memory(chosen, gpu_memory_limit_mb, gpu_split)
        growth = gpu_memory_limit_mb is None and allow_growth is not False
        _set_up_gpus(gpus, chosen, growth, gpu_memory_limit_mb, gpu_split)
        towers, physical = _name_gpus(gpus, chosen, gpu_split)
        memory, note = _memory_in_words(growth, gpu_memory_limit_mb), ""
    else:
        towers = _set_up_cpus((num_gpus or 1) * gpu_split)
        physical, memory = (), Devices.memory
        note = _stand_in_note(len(towers), allow_growth, gpu_memory_limit_mb)
    tf.config.set_soft_device_placement(soft_placement)
    tf.debugging.set_log_device_placement(log_device_placement)
    on_first = local_parameter_device == "gpu"
    if local_parameter_device is None:
        # To and from the host, they would take longer than a step.
        on_first = bool(chosen)
    return Devices(
        towers=towers,
        home=towers[0] if on_first else HOST,
        physical=physical,
        local_parameter_device=local_parameter_device,
        memory=memory,
        note=note,
    )


def resolve(gpus: int | Sequence[int | str] | None = None) -> tuple[str, ...]:
    """Turns a `gpus` argument into the strings of devices that exist.

    This initialises TensorFlow. Numbers mean GPUs, or logical CPUs where
    TensorFlow sees no GPU.

    >>> resolve(["cpu:0"])
    ('/device:CPU:0',)

    Args:
        gpus: None for all; how many, counted from the first; or a list of indices
            and of strings such as "/gpu:0", "GPU:0" or "/device:GPU:0".

    Returns:
        One string for each tower, such as "/device:GPU:0".

    Raises:
        ValueError: If a device does not exist, comes twice or is not understood.
    """
    existing = _logical_devices()
    numbered = [d for d in existing if ":GPU:" in d] or [
        d for d in existing if ":CPU:" in d
    ]
    if gpus is None:
        return tuple(numbered)
    if _is_int(gpus):
        if not 1 <= gpus <= len(numbered):
            raise ValueError(
                f"gpus={gpus} was received, but a count must be from 1 to "
                f"{len(numbered)} here, for {_listed(numbered)}; "
                f"{_more_devices(numbered)}."
            )
        return tuple(numbered[:gpus])
    if not isinstance(gpus, Sequence) or isinstance(gpus, str | bytes) or not gpus:
        raise ValueError(
            f"gpus must be None, a count or a list of indices or device strings, but "
            f"{gpus!r} was received; write for example gpus=2 or "
            f"gpus=[{numbered[0]!r}]."
        )
    devices = tuple(_resolve_one(each, numbered, existing) for each in gpus)
    _check_unique("gpus", gpus, devices)
    return devices


def is_gpu(device: str) -> bool:
    """Tells whether a device string, such as "/device:GPU:0", names a GPU.

    TensorFlow's own, such as "/job:localhost/replica:0/task:0/device:GPU:0", will do.
    """
    return "GPU" in device


def table(devices: Devices, per_tower_batch: Sequence[int] | None = None) -> str:
    """Describes the towers in plain text of at most 100 columns.

    Args:
        devices: What `configure` returned.
        per_tower_batch: Each tower's share of the global batch, in examples.

    Returns:
        Lines without a final newline: a row for each tower, then the home of the
        variables, the numbering of the GPUs and the note.

    Raises:
        ValueError: If there is not one share for each tower.
    """
    if per_tower_batch is not None and len(per_tower_batch) != len(devices.towers):
        raise ValueError(
            f"per_tower_batch has {words.count(len(per_tower_batch), 'share')} for "
            f"{words.count(len(devices.towers), 'tower')}; give one for each tower."
        )
    rows = _gpu_rows(devices) if devices.physical else _cpu_rows(devices)
    if per_tower_batch is not None:
        for row, share in zip(rows, per_tower_batch, strict=True):
            row["share"] = str(share)
    lines = _aligned(rows)
    if per_tower_batch is not None:
        lines += _wrapped(
            f"Each step takes {words.count(sum(per_tower_batch), 'example')}, shared "
            "out as above."
        )
    lines += _wrapped(f"Variables live on {devices.home}, {_home_in_words(devices)}.")
    if devices.physical:
        lines += _wrapped(_numbering(os.environ))
    if devices.note:
        lines += _wrapped(f"Note: {devices.note}")
    return "\n".join(lines)


# The wish, checked before any device is touched.


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _check_counts(
    num_gpus: int | None, gpu_memory_limit_mb: int | None, gpu_split: int
) -> None:
    for name, value, fix in (
        ("num_gpus", num_gpus, "leave it out to use all GPUs"),
        ("gpu_memory_limit_mb", gpu_memory_limit_mb, "leave it out for no limit"),
        ("gpu_split", gpu_split, "use 1 for whole GPUs"),
    ):
        if value is None and name != "gpu_split":
            continue
        if not _is_int(value) or value < 1:
            raise ValueError(
                f"{name} must be a whole number of at least 1, but {value!r} was "
                f"received; {fix}."
            )


def _check_indices(num_gpus: int | None, gpu_indices: Sequence[int] | None) -> None:
    if gpu_indices is None:
        return
    if (
        not isinstance(gpu_indices, Sequence)
        or not gpu_indices
        or not all(_is_int(index) and index >= 0 for index in gpu_indices)
    ):
        raise ValueError(
            f"gpu_indices must be a list of GPU numbers from 0, but {gpu_indices!r} "
            "was received; write for example [0, 2], or leave it out to use all GPUs."
        )
    _check_unique("gpu_indices", gpu_indices, gpu_indices)
    if num_gpus is not None and num_gpus != len(gpu_indices):
        raise ValueError(
            f"num_gpus={num_gpus} was received with gpu_indices={list(gpu_indices)}, "
            f"which has {len(gpu_indices)}; leave one of the two out."
        )


def _check_memory_wish(
    allow_growth: bool | None, gpu_memory_limit_mb: int | None, gpu_split: int
) -> None:
    if allow_growth not in (None, True, False):
        raise ValueError(
            f"allow_growth must be True, False or None, but {allow_growth!r} was "
            "received; leave it out to let memory grow unless there is a limit."
        )
    if allow_growth and gpu_memory_limit_mb is not None:
        raise ValueError(
            f"allow_growth=True was received with gpu_memory_limit_mb="
            f"{gpu_memory_limit_mb}, but TensorFlow takes limited memory at once; "
            "leave one of the two out."
        )
    if gpu_split > 1 and gpu_memory_limit_mb is None:
        raise ValueError(
            f"gpu_split={gpu_split} was received without gpu_memory_limit_mb, but "
            "TensorFlow needs a limit for each logical GPU; add gpu_memory_limit_mb, "
            f"at most 1/{gpu_split} of a GPU's memory."
        )


def _check_unique(
    name: str, received: Sequence[object], values: Sequence[object]
) -> None:
    repeated = [v for v, n in collections.Counter(values).items() if n > 1]
    if repeated:
        raise ValueError(
            f"{name}={list(received)} was received, which names {repeated[0]} more "
            "than once; name each device once."
        )


# The machine.


def _choose(
    found: int,
    visible: Sequence[int],
    num_gpus: int | None,
    gpu_indices: Sequence[int] | None,
) -> tuple[int, ...]:
    """Chooses among the GPUs by index; nothing means towers on the CPU.

    Args:
        found: How many GPUs TensorFlow found.
        visible: Indices of those not hidden by `tf.config.set_visible_devices`.
        num_gpus: As for `configure`.
        gpu_indices: As for `configure`.

    Returns:
        Indices of the GPUs, in the order of the towers.

    Raises:
        ValueError: If the machine has not what was wished for.
    """
    if gpu_indices is not None:
        absent = [index for index in gpu_indices if index >= found]
        if absent and not found:
            raise ValueError(
                f"gpu_indices={list(gpu_indices)} was received, but TensorFlow finds "
                f"no GPU; use num_gpus={len(gpu_indices)} for logical CPUs instead."
            )
        if absent:
            raise ValueError(
                f"gpu_indices={list(gpu_indices)} was received, but there is no GPU "
                f"{absent[0]}; TensorFlow finds {found}, so choose from "
                f"{', '.join(map(str, range(found)))}."
            )
        return tuple(int(index) for index in gpu_indices)
    if visible and num_gpus is not None and num_gpus > len(visible):
        raise ValueError(
            f"num_gpus={num_gpus} was received, but TensorFlow sees {len(visible)} on "
            f"this machine; use at most {len(visible)}, or make more visible with "
            "CUDA_VISIBLE_DEVICES."
        )
    return tuple(visible[:num_gpus])


def _set_up_gpus(
    gpus: Sequence[tf.config.PhysicalDevice],
    chosen: Sequence[int],
    growth: bool,
    limit_mb: int | None,
    split: int,
) -> None:
    """Makes the chosen GPUs visible and sets how their memory is taken."""
    mine = [gpus[index] for index in sorted(chosen)]
    for gpu in mine:
        if limit_mb is None and tf.config.get_logical_device_configuration(gpu):
            raise ValueError(
                f"{gpu.name} was given logical devices by tf.config before, which "
                "have a memory limit; pass gpu_memory_limit_mb, or drop that call."
            )
    visible = tf.config.get_visible_devices("GPU")
    try:
        try:
            tf.config.set_visible_devices(mine, "GPU")
        except RuntimeError:
            # Too late to hide any, and no harm while those wished for are there.
            if not set(mine) <= set(visible):
                raise
        for gpu in mine:
            if limit_mb is None:
                tf.config.experimental.set_memory_growth(gpu, growth)
            else:
                part = tf.config.LogicalDeviceConfiguration(memory_limit=limit_mb)
                tf.config.set_logical_device_configuration(gpu, [part] * split)
    except RuntimeError as error:
        raise _too_late(f"the GPUs {list(chosen)}") from error
    cpu = tf.config.list_physical_devices("CPU")[0]
    if growth and tf.config.get_logical_device_configuration(cpu):
        # TensorFlow drops the growth of GPUs as soon as any device, even the CPU,
        # is split (Context._compute_device_options); the variable still counts.
        os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")


def _name_gpus(
    gpus: Sequence[tf.config.PhysicalDevice], chosen: Sequence[int], split: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names the logical GPUs of the chosen ones.

    TensorFlow numbers them by physical GPU, whatever the order of `chosen`: the
    GPUs [2, 0] become GPU:0 for 0 and GPU:1 for 2.

    Returns:
        For each tower its device string, and the index of its physical GPU.
    """
    first, count = {}, 0
    for gpu in gpus:
        if gpu in tf.config.get_visible_devices("GPU"):
            first[gpus.index(gpu)] = count
            count += len(tf.config.get_logical_device_configuration(gpu) or [None])
    towers = [(first[index] + part, index) for index in chosen for part in range(split)]
    return (
        tuple(f"/device:GPU:{logical}" for logical, _ in towers),
        tuple(index for _, index in towers),
    )


def _set_up_cpus(count: int) -> tuple[str, ...]:
    """Splits the CPU into at least `count` logical CPUs and names that many."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    existing = len(tf.config.get_logical_device_configuration(cpu) or [None])
    if existing < count:
        parts = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        try:
            tf.config.set_logical_device_configuration(cpu, parts)
        except RuntimeError as error:
            raise _too_late(f"{count} logical CPUs") from error
        _divide_threads(count)
    return tuple(f"/device:CPU:{index}" for index in range(count))


def _divide_threads(towers: int) -> None:
    """Gives each tower its part of the cores, unless the user has divided them.

    Otherwise each operation of each tower would spread over all cores, and towers that
    run side by side would wait for one another there: a step of a small network then
    takes half as long again (BENCHMARKS.md).
    """
    threads = tf.config.threading
    chosen = threads.get_intra_op_parallelism_threads()
    if not (chosen or "TF_NUM_INTRAOP_THREADS" in os.environ):
        cores = os.cpu_count() or 1
        threads.set_intra_op_parallelism_threads(max(1, cores // towers))


def _too_late(wish: str) -> RuntimeError:
    return RuntimeError(
        "TensorFlow is initialised already, with other devices or memory settings "
        f"than {wish}; restart the program (in a notebook, the kernel), "
        "and call towers.configure() before anything else uses TensorFlow, such as a "
        "model that is built."
    )


# nvidia-smi, which is asked only for what TensorFlow cannot tell without
# initialising, and may be absent.


@dataclasses.dataclass(frozen=True)
class _SmiGpu:
    """What nvidia-smi says of one GPU."""

    index: int
    uuid: str
    memory_mb: int


@functools.cache
def _smi_gpus() -> tuple[_SmiGpu, ...]:
    """Asks nvidia-smi; nothing if it cannot be asked or a GPU is cut up (MIG)."""
    query = "index,uuid,memory.total,mig.mode.current"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
        return _parse_smi(answer)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def _parse_smi(answer: str) -> tuple[_SmiGpu, ...]:
    rows = [[f.strip() for f in line.split(",")] for line in answer.splitlines()]
    if any(mig == "Enabled" for *_, mig in rows):
        # CUDA then sees instances, whose memory and order are not the GPUs'.
        return ()
    return tuple(
        _SmiGpu(int(index), uuid, int(memory)) for index, uuid, memory, _ in rows
    )


def smi_gpu(index: int) -> _SmiGpu | None:
    """Returns what nvidia-smi says of TensorFlow's GPU of an index; None if unsure."""
    return _find_in_smi(index, os.environ)


def _find_in_smi(index: int, environ: Mapping[str, str]) -> _SmiGpu | None:
    """Finds TensorFlow's GPU of an index at nvidia-smi, or None if unsure."""
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return None
    entry = str(index)
    if "CUDA_VISIBLE_DEVICES" in environ:
        entries = environ["CUDA_VISIBLE_DEVICES"].split(",")
        entry = entries[index].strip() if index < len(entries) else ""
    matches = [
        gpu
        for gpu in _smi_gpus()
        # CUDA accepts the beginning of a UUID.
        if entry == str(gpu.index)
        or (entry[:4] == "GPU-" and gpu.uuid.startswith(entry))
    ]
    return matches[0] if len(matches) == 1 else None


def _check_fits_memory(chosen: Sequence[int], limit_mb: int | None, split: int) -> None:
    if limit_mb is None:
        return
    for index in chosen:
        gpu = smi_gpu(index)
        if gpu is not None and split * limit_mb > gpu.memory_mb:
            raise ValueError(
                f"gpu_memory_limit_mb={limit_mb} was received for gpu_split={split}, "
                f"but GPU {index} has {gpu.memory_mb} MB; use at most "
                f"{gpu.memory_mb // split}, less what the driver needs."
            )


# The table.


def _memory_in_words(growth: bool, limit_mb: int | None) -> str:
    if limit_mb is not None:
        return f"at most {limit_mb} MB"
    return "grows as needed" if growth else "all of it"


def _home_in_words(devices: Devices) -> str:
    wish = devices.local_parameter_device
    if wish is None and devices.physical:
        return "the first tower's GPU, as towers are on GPUs"
    if wish is None:
        return "the host, as no tower is on a GPU"
    return f"{'the host' if wish == 'cpu' else 'the first tower'}, as was asked for"


def _stand_in_note(count: int, allow_growth: bool | None, limit_mb: int | None) -> str:
    note = "TensorFlow sees no GPU, so " + (
        "the one tower runs on the CPU."
        if count == 1
        else f"{count} logical CPUs of this host stand in: the numbers are those of "
        f"{count} towers, the speed is not."
    )
    idle = [
        name
        for name, value in (
            ("allow_growth", allow_growth),
            ("gpu_memory_limit_mb", limit_mb),
        )
        if value is not None
    ]
    if idle:
        verb = "has" if len(idle) == 1 else "have"
        note += f" Without a GPU, {' and '.join(idle)} {verb} no effect."
    return note


def _gpu_rows(devices: Devices) -> list[dict[str, str]]:
    gpus = tf.config.list_physical_devices("GPU")
    rows = []
    for tower, (device, index) in enumerate(
        zip(devices.towers, devices.physical, strict=True)
    ):
        details = tf.config.experimental.get_device_details(gpus[index])
        model = details.get("device_name", "GPU of unknown model")
        if "compute_capability" in details:
            model += " (cc {}.{})".format(*details["compute_capability"])
        smi = smi_gpu(index)
        rows.append(
            {
                "tower": str(tower),
                "device": device,
                "smi": str(smi.index) if smi else "?",
                "model": model,
                "memory": f"{smi.memory_mb} MB" if smi else "?",
                "may use": devices.memory,
            }
        )
    return rows


def _cpu_rows(devices: Devices) -> list[dict[str, str]]:
    model = _cpu_model()
    memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    return [
        {
            "tower": str(tower),
            "device": device,
            "model": model,
            "memory": f"{memory_mb} MB",
            "may use": devices.memory,
        }
        for tower, device in enumerate(devices.towers)
    ]


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


_RIGHT_ALIGNED = ("tower", "smi", "memory", "share")


def _aligned(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Sets rows of equal keys out in columns, the model cut to what fits."""
    cells = [{key: key for key in rows[0]}, *rows]
    cells = [
        {key: text.encode("ascii", "replace").decode() for key, text in row.items()}
        for row in cells
    ]
    widths = {key: max(len(row[key]) for row in cells) for key in rows[0]}
    too_wide = sum(widths.values()) + 2 * (len(widths) - 1) - _TABLE_WIDTH
    if too_wide > 0:
        widths["model"] = max(widths["model"] - too_wide, len("model"))
    return [
        "  ".join(
            row[key].rjust(width)
            if key in _RIGHT_ALIGNED
            else row[key][:width].ljust(width)
            for key, width in widths.items()
        ).rstrip()
        for row in cells
    ]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _TABLE_WIDTH, break_on_hyphens=False)


def _numbering(environ: Mapping[str, str]) -> str:
    """Says how CUDA's, and so TensorFlow's, numbers relate to nvidia-smi's."""
    order = environ.get("CUDA_DEVICE_ORDER")
    if order != "PCI_BUS_ID":
        return (
            f"Numbering: CUDA_DEVICE_ORDER={order}, so CUDA's numbers may differ from "
            "nvidia-smi's, which are unknown here."
        )
    text = "Numbering: CUDA_DEVICE_ORDER=PCI_BUS_ID, so CUDA counts as nvidia-smi does"
    if "CUDA_VISIBLE_DEVICES" in environ:
        text += (
            f", and from 0 among CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']}"
        )
    return (
        text
        + "; TensorFlow counts from 0 among the GPUs chosen, and the column smi has "
        "nvidia-smi's number."
    )


# Devices that exist.


def _canonical(text: str) -> str | None:
    match = _DEVICE.fullmatch(text.strip())
    return f"/device:{match[1].upper()}:{int(match[2])}" if match else None


def _logical_devices() -> list[str]:
    """Lists this process's CPUs and GPUs.

    In a cluster the names carry a job and the other hosts' devices are listed
    too: without the job these are repeats, dropped here.
    """
    names = (d.name.rpartition("/")[2] for d in tf.config.list_logical_devices())
    return [d for d in dict.fromkeys(f"/{name}" for name in names) if _canonical(d)]


def _resolve_one(
    wish: int | str, numbered: Sequence[str], existing: Sequence[str]
) -> str:
    if _is_int(wish) and 0 <= wish < len(numbered):
        return numbered[wish]
    device = _canonical(wish) if isinstance(wish, str) else None
    if device in existing:
        return device
    if device is None and not _is_int(wish):
        raise ValueError(
            f"{wish!r} in gpus is neither an index nor a device string; choose from "
            f"{_listed(existing)}."
        )
    raise ValueError(
        f"gpus names {wish!r}, which does not exist here; choose from "
        f"{_listed(numbered if _is_int(wish) else existing)}, or "
        f"{_more_devices(numbered)}."
    )


def _listed(devices: Sequence[str]) -> str:
    return ", ".join(devices)


def _more_devices(numbered: Sequence[str]) -> str:
    if ":GPU:" in numbered[0]:
        return "make more GPUs visible with CUDA_VISIBLE_DEVICES"
    return (
        "restart the program (in a notebook, the kernel), and make more logical CPUs "
        "with towers.configure(num_gpus=...) before a model is built"
    )
