"""TensorFlow's runtime: devices, determinism, NCCL, the profiler's files."""

import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import context
from tensorflow.python.framework import config
from tensorflow.python.ops import nccl_ops
from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

__all__ = [
    "XSpace",
    "device_memory_limits",
    "forget_scalars",
    "is_deterministic",
    "nccl_sums",
    "now",
    "random_seed",
]


def is_deterministic() -> bool:
    """Checks whether `tf.config.experimental.enable_op_determinism` was called."""
    return config.is_op_determinism_enabled()


def now() -> tf.Tensor:
    """Returns the time in seconds, a float64 scalar, when it is computed."""
    if is_deterministic():
        # TensorFlow refuses its own clock in this mode.
        # An array, as TensorFlow would make an eager Python float a float32.
        timestamp = tf.numpy_function(lambda: np.float64(time.time()), [], tf.float64)
        timestamp.set_shape([])
        return timestamp
    return tf.timestamp()


def device_memory_limits() -> dict[str, int]:
    """Returns the bytes that TensorFlow may allocate on each device.

    No public function returns it for a device without a limit set by the user.

    Returns:
        The limits, by device string such as "/device:GPU:0".
    """
    context.ensure_initialized()
    devices = pywrap_tfe.TFE_ContextListDevices(context.context()._handle)
    try:
        return {
            f"/{pywrap_tf_session.TF_DeviceListName(devices, i).rpartition('/')[2]}": (
                pywrap_tf_session.TF_DeviceListMemoryBytes(devices, i)
            )
            for i in range(pywrap_tf_session.TF_DeviceListCount(devices))
        }
    finally:
        pywrap_tf_session.TF_DeleteDeviceList(devices)


def forget_scalars() -> None:
    """Frees the tensors that TensorFlow caches for Python numbers.

    For each int and float that becomes a tensor eagerly, such as the step of a summary,
    TensorFlow would keep some 650 bytes until the process ends.
    """
    pywrap_tfe.TFE_ClearScalarCache()


def nccl_sums(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the sum of tensors on different GPUs, on each of these GPUs."""
    return nccl_ops.all_sum(tensors)


def random_seed() -> int | None:
    """Returns the last argument of `tf.random.set_seed`, if any."""
    return context.global_seed()
