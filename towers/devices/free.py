"""Chooses GPUs that no process uses.

Two programs that start at once would choose the same GPU. So a program holds a lock
file of this user from its choice until TensorFlow has initialised its devices: from
then on, the driver lists the process.
"""

import contextlib
import os
from collections.abc import Iterator

import tensorflow as tf

from towers.devices.sharing import machine
from towers.machine import nvml
from towers.processes.described import describe_holder
from towers.program import locks, voice, words

_LOCK = "free.lock"
# TensorFlow takes seconds to initialise its devices.
_LOCK_S = 120.0


def choose(count: int | None, driver: nvml.Driver | None = None) -> list[int]:
    """Chooses GPUs that no process uses, and reports the choice.

    A process that only draws, such as a desktop's, does not count.

    Args:
        count: The number of GPUs; `None` for all that are free.
        driver: The driver to ask.

    Returns:
        TensorFlow's indices.

    Raises:
        ValueError: Too few GPUs are free, or the driver does not list their processes.
    """
    driver = driver or nvml.Driver()
    cards = [
        nvml.gpu(index) for index in range(len(tf.config.list_physical_devices("GPU")))
    ]
    if not cards:
        raise ValueError(
            "Received --gpu_indices=free, but TensorFlow finds no GPU; expected "
            "--num_gpus, for logical CPUs."
        )
    now = {gpu.uuid: gpu for gpu in driver.gpus() if gpu.used_mb is not None}
    free, holders = [], []
    for index, card in enumerate(cards):
        gpu = card and now.get(card.uuid)
        if gpu is None:
            raise ValueError(_unknown(index, driver))
        pids = [holder.pid for holder in gpu.holders if holder.computes]
        if not pids and gpu.unseen_mb < nvml.UNSEEN_MB:
            free.append(index)
            continue
        who = ", ".join(str(describe_holder(pid)) for pid in pids)
        who = who or "processes that cannot be seen from here"
        holders.append(f"GPU {card.index} is held by {who}")
    if len(free) < (count or 1):
        wanted = words.count(count, "GPU") if count else "a GPU"
        raise ValueError(
            f"Received --gpu_indices=free for {wanted}, but "
            f"{len(free) or 'none'} of {len(cards)} "
            f"{'is' if len(free) < 2 else 'are'} free; wait, or expect fewer"
            f"{': ' if holders else ''}{'; '.join(holders)}."
        )
    taken = free[:count]
    numbers = ", ".join(str(cards[index].index) for index in taken)
    choice = f"Of {words.count(len(cards), 'GPU')}, the run takes {numbers}"
    voice.say("; ".join([choice, *holders]) + ".")
    return taken


def _unknown(index: int, driver: nvml.Driver) -> str:
    """Returns an error message for a GPU whose users are unknown, with the reason."""
    if any(gpu.cut_up for gpu in driver.gpus()):
        return (
            "Received --gpu_indices=free on a machine with a GPU that is cut up into "
            "slices (MIG), of which a process has one; expected none, so choose a "
            "slice of `towers doctor --gpus` by CUDA_VISIBLE_DEVICES=MIG-..."
        )
    reason = f" ({driver.refuses})" if driver.refuses else ""
    return (
        f"Received --gpu_indices=free, but NVIDIA's driver does not tell who uses GPU "
        f"{index}{reason}; expected numbers, such as --gpu_indices=0."
    )


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Inside, no other program of this user chooses free GPUs.

    Initialise TensorFlow's devices inside: then the driver lists this process.
    """
    folder = machine.usual_folder()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, _LOCK)
    message = "Waiting until another program has taken its free GPUs."
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.waited_for(path, _LOCK_S, message))
        except TimeoutError as error:
            raise ValueError(
                f"Received --gpu_indices=free, but {error}; end that process, or "
                "expect numbers, such as --gpu_indices=0."
            ) from error
        yield
