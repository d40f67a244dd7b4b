"""Chooses GPUs that nobody uses."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

import tensorflow as tf

from towers.devices.sharing import machine
from towers.machine import nvml
from towers.processes.described import describe
from towers.program import voice, words

# The part of its memory that a free GPU may lack: the driver's own, and a display's.
_TAKEN = 0.1
_LOCK = "free.lock"


def choose(count: int | None, driver: nvml.Driver | None = None) -> list[int]:
    """Chooses among TensorFlow's GPUs those that no process uses, and says which.

    Args:
        count: How many; `None` for all that are free.
        driver: What to ask.

    Returns:
        TensorFlow's indices.

    Raises:
        ValueError: Too few are free, or the driver does not tell who uses them.
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
    free, holders = [], []
    for index, card in enumerate(cards):
        use = card and driver.use(card.uuid)
        if use is None:
            raise ValueError(
                f"Received --gpu_indices=free, but NVIDIA's driver does not tell who "
                f"uses GPU {index}; expected numbers, such as --gpu_indices=0."
            )
        if not use.memory_of and use.memory <= _TAKEN:
            free.append(index)
            continue
        who = ", ".join(str(describe(pid)) for pid in use.memory_of)
        who = who or "processes that cannot be seen from here"
        holders.append(f"GPU {card.index} is held by {who}")
    if len(free) < (count or 1):
        wanted = words.count(count, "GPU") if count else "a GPU"
        raise ValueError(
            f"Received --gpu_indices=free for {wanted}, but "
            f"{len(free) or 'none'} of {len(cards)} "
            f"{'is' if len(free) < 2 else 'are'} free; wait, or expect fewer: "
            f"{'; '.join(holders)}."
        )
    taken = free[:count]
    numbers = ", ".join(str(cards[index].index) for index in taken)
    said = f"Of {words.count(len(cards), 'GPU')}, the run takes {numbers}"
    voice.say("; ".join([said, *holders]) + ".")
    return taken


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Inside, no other program of this user chooses free GPUs.

    TensorFlow's devices have to be initialised inside: then the driver sees this one.
    """
    with open(os.path.join(machine.usual_folder(), _LOCK), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
