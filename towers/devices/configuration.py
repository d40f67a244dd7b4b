"""Sets up the devices of this process, before TensorFlow initialises.

`configure` decides which GPUs are visible, how TensorFlow allocates their memory, and
which logical CPUs replace GPUs on a machine without any. Call it before anything runs
on TensorFlow; it leaves TensorFlow uninitialised.
"""

import dataclasses
import os
from collections.abc import Sequence

import tensorflow as tf

from towers.devices.names import HOST, is_gpu
from towers.devices.wish import DeviceWish
from towers.hosts import group
from towers.machine import limits, nvml
from towers.program import compilation_cache, startup


@dataclasses.dataclass(frozen=True)
class Devices:
    """The configured devices of one process.

    Attributes:
        towers: One device string for each tower, such as "/device:GPU:0".
        home: The device of the shared variables.
        physical: For each tower on a GPU, the index of its GPU among all that
            TensorFlow finds; empty for towers on the CPU.
        local_parameter_device: The argument that `home` comes from, "cpu" or "gpu";
            `None` if it was not given.
        memory: How much memory a tower may use, in words.
        note: Further sentences for the user; may be empty.
        others: Devices that are set up for later towers; see `TowerModel.resize`.
        physical_others: As `physical`, of `others`.
    """

    towers: tuple[str, ...]
    home: str
    physical: tuple[int, ...] = ()
    local_parameter_device: str | None = None
    memory: str = "shared with the host"
    note: str = ""
    others: tuple[str, ...] = ()
    physical_others: tuple[int, ...] = ()

    @property
    def every(self) -> "Devices":
        """A copy with towers on all devices that are set up."""
        return dataclasses.replace(
            self,
            towers=self.towers + self.others,
            physical=self.physical + self.physical_others,
            others=(),
            physical_others=(),
        )

    def with_towers(self, names: Sequence[str]) -> "Devices":
        """Returns a copy with towers on the named devices, which must be set up."""
        all_devices = self.every
        physical = dict(zip(all_devices.towers, all_devices.physical, strict=False))
        others = [name for name in all_devices.towers if name not in names]
        return dataclasses.replace(
            self,
            towers=tuple(names),
            physical=tuple(physical[name] for name in names if physical),
            others=tuple(others),
            physical_others=tuple(physical[name] for name in others if physical),
            home=names[0] if is_gpu(self.home) else self.home,
        )


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
    hosts: str | None = None,
    max_gpus: int | None = None,
    gpu_memory_fraction: float | None = None,
) -> Devices:
    """Chooses and sets up the devices of this process.

    Without a GPU, it creates logical CPUs. Call it before TensorFlow is used. After
    that, it accepts the existing devices if they match the arguments.

    Args:
        num_gpus: Number of GPUs to use. None: all visible ones, or one CPU if there are
            none. More than there are is an error, unless there are none.
        gpu_indices: TensorFlow's indices of the GPUs to use, in the order of the
            towers. None: the first `num_gpus`.
        allow_growth: Whether TensorFlow takes GPU memory as needed (True) or all at
            once (False). None: as needed, unless there is a limit.
        gpu_memory_limit_mb: Most memory that a tower may take on its GPU, in MB.
        gpu_split: Number of logical GPUs, and so towers, on each GPU. More than 1 needs
            a memory limit. Logical CPUs are multiplied in the same way.
        local_parameter_device: Device of the variables: "cpu", or "gpu" for the first
            tower's device, even if it is a logical CPU. None: the first tower's GPU, or
            the CPU if no tower is on a GPU.
        soft_placement: Whether an operation may run on another device if its own has no
            kernel for it.
        log_device_placement: Whether TensorFlow logs the device of every operation.
        hosts: "auto" to train together with the other processes, if any, of a launcher:
            `towers.launch`, MPI, torchrun, Slurm, Ray Train, or another that sets
            TF_CONFIG. Waits for these processes. None: this process trains alone.
        max_gpus: Number of GPUs to set up, which `TowerModel.resize` may use later. By
            default the number that training begins with.
        gpu_memory_fraction: The part of each GPU's memory that this process may take,
            above 0 and at most 1, divided among the logical GPUs of `gpu_split`. It
            takes this memory at once.

    Returns:
        The devices. `towers` has one device string for each tower.

    Raises:
        ValueError: If the arguments contradict one another or the machine.
        RuntimeError: If TensorFlow was initialised before, with other devices.
    """
    wish = DeviceWish(
        num_gpus,
        gpu_indices,
        allow_growth,
        gpu_memory_limit_mb,
        gpu_split,
        local_parameter_device,
        max_gpus,
        gpu_memory_fraction,
    )
    joined = group.join_as_started(hosts) if hosts is not None else None
    startup.prepare_gpus()
    with startup.quiet_gpus(), compilation_cache.begun():
        gpus = tf.config.list_physical_devices("GPU")
    visible = tf.config.get_visible_devices("GPU")
    chosen = _choose(len(gpus), [gpus.index(gpu) for gpu in visible], wish)
    if chosen:
        _set_up_gpus(gpus, chosen, wish)
        names, physical = _name_gpus(gpus, chosen, gpu_split)
        memory, first = _memory_in_words(wish), wish.begins_with or len(chosen)
        threads_note = set_up()
    else:
        hosts_here = joined.count_here if joined else 1
        count = (wish.most or 1) * gpu_split
        names, threads_note = _set_up_cpus(count, hosts_here)
        physical, memory, first = (), Devices.memory, wish.begins_with or 1
    first *= gpu_split
    towers, others = names[:first], names[first:]
    stand_in = "" if chosen else _stand_in_note(len(towers), wish)
    note = " ".join(filter(None, [stand_in, threads_note]))
    tf.config.set_soft_device_placement(soft_placement)
    tf.debugging.set_log_device_placement(log_device_placement)
    if joined is not None:
        group.world()
    on_first = local_parameter_device == "gpu"
    if local_parameter_device is None:
        # Copying variables to and from the host would take longer than a step.
        on_first = bool(chosen)
    return Devices(
        towers=towers,
        home=towers[0] if on_first else HOST,
        physical=physical[:first],
        local_parameter_device=local_parameter_device,
        memory=memory,
        note=note,
        others=others,
        physical_others=physical[first:],
    )


def _choose(count: int, visible: Sequence[int], wish: DeviceWish) -> tuple[int, ...]:
    """Chooses GPUs by index; an empty choice means towers on the CPU.

    Args:
        count: The number of GPUs that TensorFlow finds.
        visible: Indices of the GPUs not hidden by `tf.config.set_visible_devices`.
        wish: The arguments of `configure`.

    Returns:
        Indices of the GPUs, in the order of the towers.

    Raises:
        ValueError: The machine lacks what the arguments ask for.
    """
    gpu_indices = wish.gpu_indices
    if gpu_indices is not None:
        absent = [index for index in gpu_indices if index >= count]
        if absent and not count:
            raise ValueError(
                f"gpu_indices={list(gpu_indices)} was received, but TensorFlow finds "
                f"no GPU; use num_gpus={len(gpu_indices)} for logical CPUs instead."
            )
        if absent:
            raise ValueError(
                f"gpu_indices={list(gpu_indices)} was received, but there is no GPU "
                f"{absent[0]}; TensorFlow finds {count}, so choose from "
                f"{', '.join(map(str, range(count)))}."
            )
        requested = [int(index) for index in gpu_indices]
        visible = [*requested, *(index for index in visible if index not in requested)]
    if visible and wish.most is not None and wish.most > len(visible):
        name = "num_gpus" if wish.max_gpus is None else "max_gpus"
        raise ValueError(
            f"{name}={wish.most} was received, but TensorFlow sees {len(visible)} on "
            f"this machine; use at most {len(visible)}, or make more visible with "
            "CUDA_VISIBLE_DEVICES."
        )
    return tuple(visible[: wish.most])


def _set_up_gpus(
    gpus: Sequence[tf.config.PhysicalDevice],
    chosen: Sequence[int],
    wish: DeviceWish,
) -> None:
    """Makes the chosen GPUs visible, and sets how TensorFlow takes their memory."""
    limits_mb = {gpus[index]: _limit_mb(index, wish) for index in sorted(chosen)}
    own_gpus = [*limits_mb]
    for gpu, limit_mb in limits_mb.items():
        if limit_mb is None and tf.config.get_logical_device_configuration(gpu):
            raise ValueError(
                f"{gpu.name} was given logical devices by tf.config before, which "
                "have a memory limit; pass gpu_memory_limit_mb, or drop that call."
            )
    visible = tf.config.get_visible_devices("GPU")
    try:
        try:
            tf.config.set_visible_devices(own_gpus, "GPU")
        except RuntimeError:
            # It is too late to hide GPUs, which does no harm if the chosen ones are
            # visible.
            if not set(own_gpus) <= set(visible):
                raise
        for gpu, limit_mb in limits_mb.items():
            if limit_mb is None:
                tf.config.experimental.set_memory_growth(gpu, wish.grows)
            else:
                part = tf.config.LogicalDeviceConfiguration(memory_limit=limit_mb)
                tf.config.set_logical_device_configuration(gpu, [part] * wish.gpu_split)
    except RuntimeError as error:
        raise _too_late(f"the GPUs {list(chosen)}") from error
    cpu = tf.config.list_physical_devices("CPU")[0]
    if wish.grows and tf.config.get_logical_device_configuration(cpu):
        # TensorFlow drops the growth of GPUs as soon as any device, even the CPU,
        # is split (Context._compute_device_options); the variable still counts.
        os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")


def _name_gpus(
    gpus: Sequence[tf.config.PhysicalDevice], chosen: Sequence[int], split: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names the logical GPUs of the chosen GPUs.

    TensorFlow numbers them by physical GPU, whatever the order of `chosen`: the
    GPUs [2, 0] become GPU:0 for 0 and GPU:1 for 2.

    Returns:
        For each tower, its device string and the index of its physical GPU.
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


def _set_up_cpus(count: int, hosts_here: int) -> tuple[tuple[str, ...], str]:
    """Splits the CPU into at least `count` logical CPUs, and names that many.

    Returns:
        The names, and a note on their threads.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    existing = len(tf.config.get_logical_device_configuration(cpu) or [None])
    if existing < count:
        parts = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        try:
            tf.config.set_logical_device_configuration(cpu, parts)
        except RuntimeError as error:
            raise _too_late(f"{count} logical CPUs") from error
    names = tuple(f"/device:CPU:{index}" for index in range(count))
    divides = existing < count or hosts_here > 1
    return names, set_up(count * hosts_here if divides else 1)


def _too_late(wish: str) -> RuntimeError:
    return RuntimeError(
        "TensorFlow is initialised already, with other devices or memory settings "
        f"than {wish}; restart the program (in a notebook, the kernel), "
        "and call towers.configure() before anything else uses TensorFlow, such as a "
        "model that is built."
    )


def _limit_mb(index: int, wish: DeviceWish) -> int | None:
    """Returns the memory limit of each logical GPU of a GPU; `None` without a limit.

    Raises:
        ValueError: The GPU has less memory, or its memory is unknown.
    """
    limit_mb, fraction, split = (
        wish.gpu_memory_limit_mb,
        wish.gpu_memory_fraction,
        wish.gpu_split,
    )
    gpu = nvml.gpu(index) if wish.limit else None
    if fraction is not None:
        if gpu is None:
            raise ValueError(
                f"gpu_memory_fraction={fraction} was received, but the memory of GPU "
                f"{index} is unknown, as NVIDIA's driver does not tell it; use "
                "gpu_memory_limit_mb instead."
            )
        return max(int(fraction * gpu.memory_mb) // split, 1)
    if gpu is not None and split * limit_mb > gpu.memory_mb:
        raise ValueError(
            f"gpu_memory_limit_mb={limit_mb} was received for gpu_split={split}, "
            f"but GPU {index} has {gpu.memory_mb} MB; use at most "
            f"{gpu.memory_mb // split}, less what the driver needs."
        )
    return limit_mb


def _memory_in_words(wish: DeviceWish) -> str:
    if wish.gpu_memory_limit_mb is not None:
        return f"at most {wish.gpu_memory_limit_mb} MB"
    if wish.gpu_memory_fraction is not None:
        part = f"at most {wish.gpu_memory_fraction:.0%}"
        return part if wish.gpu_split == 1 else f"{part} / {wish.gpu_split}"
    return "grows as needed" if wish.grows else "all of it"


def _stand_in_note(count: int, wish: DeviceWish) -> str:
    note = "TensorFlow sees no GPU, so " + (
        "the one tower runs on the CPU."
        if count == 1
        else f"the towers run on {count} logical CPUs of this host: results are "
        f"those of {count} GPUs, the speed is not."
    )
    names = "allow_growth", "gpu_memory_limit_mb", "gpu_memory_fraction"
    idle = [name for name in names if getattr(wish, name) is not None]
    if idle:
        verb = "has" if len(idle) == 1 else "have"
        note += f" Without a GPU, {' and '.join(idle)} {verb} no effect."
    return note


# The number of threads that TensorFlow computes with.
#
# Logical CPUs divide the cores. Otherwise each operation of each tower would use all
# cores, and towers would wait for one another.


def set_up(parts: int = 1) -> str:
    """Limits TensorFlow's threads to the number of CPUs that this process may use.

    TensorFlow starts a thread for each CPU that the process may run on, even if a
    container's quota is smaller: the kernel then stops all threads at once, until the
    next tenth of a second. Numbers of threads that the user has set stay.

    Args:
        parts: Number of towers on the CPUs of this machine. Each gets its part of them.
            Otherwise each operation of each tower would use all cores, and towers that
            run in parallel would wait for one another there: a step of a small network
            then takes half as long again (BENCHMARKS.md).

    Returns:
        A sentence if a quota has made a difference, otherwise an empty string.
    """
    cpus, threading = limits.processors(), tf.config.threading
    inter_op = cpus.count if cpus.limited else 0
    intra_op = max(1, cpus.count // parts) if parts > 1 else inter_op
    # In TensorFlow, 0 means all CPUs that the process may run on.
    changes = [
        wanted and before in (0, wanted) and variable not in os.environ
        for wanted, before, variable in (
            (
                intra_op,
                threading.get_intra_op_parallelism_threads(),
                "TF_NUM_INTRAOP_THREADS",
            ),
            (
                inter_op,
                threading.get_inter_op_parallelism_threads(),
                "TF_NUM_INTEROP_THREADS",
            ),
        )
    ]
    try:
        if changes[0]:
            threading.set_intra_op_parallelism_threads(intra_op)
        if changes[1]:
            threading.set_inter_op_parallelism_threads(inter_op)
    except RuntimeError:
        changes = []  # Once TensorFlow is initialised, its threads stay.
    return cpus.note("Threads" if any(changes) else "Threads of the input")
