"""Device strings, such as "/device:GPU:0".

Other modules use only the strings, so that logical CPUs can test them.
"""

from collections.abc import Sequence

import tensorflow as tf

HOST = "/device:CPU:0"


def short(device: str) -> str:
    """Returns the end of a device's full name, the form that Towers uses."""
    return device[device.rindex("/device") :] if "/device" in device else device


def of_this_process(kind: str | None = None) -> list[str]:
    """Returns the strings of this process's logical devices.

    In a cluster, TensorFlow also lists those of other hosts, which may have more.

    Args:
        kind: "CPU" or "GPU"; `None` for all.
    """
    with tf.init_scope(), tf.device(HOST):
        own = tf.zeros([]).device.removesuffix(HOST)
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    return [
        short(name) for name in names if name.removesuffix(short(name)) in ("", own)
    ]


def is_gpu(device: str) -> bool:
    """Returns whether a device string, such as "/device:GPU:0", names a GPU.

    TensorFlow's full names, such as "/job:localhost/replica:0/task:0/device:GPU:0",
    work, too.
    """
    return "GPU" in device


def nccl_fits(towers: Sequence[str]) -> bool:
    """Returns whether each tower has a whole GPU of its own."""
    gpus = len(tf.config.get_visible_devices("GPU"))
    unsplit = gpus == len(of_this_process("GPU"))
    return len(towers) <= gpus and unsplit and all(map(is_gpu, towers))
