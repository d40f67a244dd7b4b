"""Tries out TensorFlow and its devices, in a process that may fail, crash or hang.

    python -m towers.doctor.probe '{"num_gpus": null}'

Writes a line of JSON, [name, value], for each thing it has found, and one before each
thing that it does, so that what it hangs in is known. `devices.py` reads them.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from towers.doctor.finding import in_a_line
from towers.doctor.gpus import built
from towers.program import keras_settings

_COPY_MB = 32
_REPEATS = 5
# What can be told apart in a table; pairs grow by the square.
_MOST_DEVICES = 9

Say = Callable[[str, Any], None]


def main(options: str) -> None:
    """Finds out as much as it can.

    Args:
        options: {"num_gpus": towers to try, null for all GPUs or else two}, as JSON.
    """
    # What libraries print is no line of ours.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(name, value):
        print(json.dumps([name, value]), file=lines, flush=True)

    try:
        _try_out(say, **json.loads(options))
    except Exception as error:
        say("error", in_a_line(error))


def _try_out(say: Say, num_gpus: int | None) -> None:
    say("does", "the reading of Keras's settings")
    keras_settings.override()
    say("does", "the import of TensorFlow")
    import tensorflow as tf

    say("build", built.of_tensorflow())
    say("does", "TensorFlow's search for GPUs")
    gpus = len(tf.config.list_physical_devices("GPU"))
    say("gpus", gpus)
    say("does", "the set-up of the towers")
    from towers.devices.configuration import configure
    from towers.devices.names import HOST

    placed = configure(
        num_gpus or (None if gpus else 2),
        # An operation that a device cannot do is to fail.
        soft_placement=False,
    )
    tf.config.experimental.enable_tensor_float_32_execution(False)
    say("towers", placed.towers)
    for device in placed.towers:
        say("does", f"a computation on {device}")
        try:
            say("computed", [device, compute(device)])
        except Exception as error:
            say("failed", [device, in_a_line(error)])
    say("does", "copies between towers")
    host = [] if HOST in placed.towers else [HOST]
    say("copies", copies([*host, *placed.towers][:_MOST_DEVICES], say))


def compute(device: str) -> float:
    """Computes a convolution and a matrix product, by cuDNN and cuBLAS on a GPU.

    Returns the largest difference from NumPy's, by the largest value.
    """
    import tensorflow as tf

    random = np.random.default_rng(0)
    images = random.normal(size=(8, 16, 16, 4)).astype("float32")
    kernel = random.normal(size=(3, 3, 4, 8)).astype("float32")
    weights = random.normal(size=(14 * 14 * 8, 32)).astype("float32")
    with tf.device(device):
        found = tf.nn.relu(tf.nn.conv2d(tf.identity(images), kernel, 1, "VALID"))
        found = tf.matmul(tf.reshape(found, (len(images), -1)), weights).numpy()
    windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), axis=(1, 2))
    expected = np.einsum("nijcab,abco->nijo", windows, kernel.astype("float64"))
    expected = np.maximum(expected, 0).reshape(len(images), -1) @ weights
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def copies(devices: Sequence[str], say: Say) -> list[list[Any]]:
    """Copies an array from each device to each.

    Args:
        devices: The devices.
        say: Hears of each copy before it is made.

    Returns:
        [from, to, MB/s (median), whether it arrived unchanged] for each pair.
    """
    import tensorflow as tf

    array = np.random.default_rng(0).normal(size=_COPY_MB * 2**18).astype("float32")
    rows = []
    for source in devices:
        with tf.device(source):
            original = tf.constant(array)
        for to in devices:
            say("does", f"a copy from {source} to {to}")
            times_s = []
            for _ in range(_REPEATS + 1):
                # From memory of TensorFlow's own, and new: TensorFlow keeps what was
                # copied to another device, and would not copy it again.
                value = _deep_copy(original, source)
                tf.test.experimental.sync_devices()
                begin_s = time.perf_counter()
                copied = _copy(value, source, to)
                tf.test.experimental.sync_devices()
                times_s.append(time.perf_counter() - begin_s)
            # The first one takes memory.
            rate = _COPY_MB / statistics.median(times_s[1:])
            rows.append([source, to, rate, np.array_equal(copied.numpy(), array)])
    return rows


def _copy(value, source: str, to: str):
    import tensorflow as tf

    # In one memory, TensorFlow would hand over the same array.
    if source == to or ("CPU" in source and "CPU" in to):
        return _deep_copy(value, to)
    with tf.device(to):
        return tf.identity(value)


def _deep_copy(value, device: str):
    import tensorflow as tf

    with tf.device(device):
        return tf.raw_ops.DeepCopy(x=value)


if __name__ == "__main__":
    main(sys.argv[1])
