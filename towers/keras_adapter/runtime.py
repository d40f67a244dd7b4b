"""TensorFlow's runtime: devices, determinism, NCCL, the profiler's files."""

import contextlib
import copy
import functools
import time
from collections.abc import Iterator, Sequence

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
    "optimizing_graphs_once",
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


@contextlib.contextmanager
def optimizing_graphs_once() -> Iterator[None]:
    """Inside, TensorFlow optimizes a new graph once, not twice.

    Grappler, TensorFlow's optimizer of graphs, goes over a graph twice by default. In
    the graph of a training step, the second pass changes almost nothing: one of 1,978
    nodes of a ResNet-50. With 8 towers, it takes a fifth of the time to the first step.
    In a transformer, only the second pass computes some shapes ahead.
    """
    current = context.context()
    before = current.function_call_options
    options = copy.copy(before)
    options.config_proto_serialized = _optimizing_once(before.config_proto_serialized)
    current.function_call_options = options
    try:
        yield
    finally:
        # Setting an option of TensorFlow has put others in their place.
        if current.function_call_options is options:
            current.function_call_options = before


@functools.cache
def _optimizing_once(serialized):
    """Returns a configuration of TensorFlow with one pass of its graph optimizer."""
    config = tf.compat.v1.ConfigProto.FromString(serialized)
    rewrites = config.graph_options.rewrite_options
    rewrites.meta_optimizer_iterations = rewrites.ONE
    return config


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
