"""TensorFlow's runtime: devices, collectives, determinism, the profiler's files."""

import contextlib
import copy
import functools
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import context
from tensorflow.python.framework import config
from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

__all__ = [
    "DeviceGroup",
    "XSpace",
    "all_gather",
    "all_reduce",
    "device_memory_limits",
    "forget_scalars",
    "has_devices",
    "is_deterministic",
    "now",
    "of_tasks",
    "optimizing_for_cpus",
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
def optimizing_for_cpus() -> Iterator[None]:
    """Inside, TensorFlow optimizes a new graph as far as CPUs gain by it.

    Grappler, TensorFlow's optimizer of graphs, goes over a graph twice by default. In
    the graph of a training step, the second pass changes almost nothing: one of 1,978
    nodes of a ResNet-50. With 8 towers, it takes a fifth of the time to the first step.
    In a transformer, only the second pass computes some shapes ahead. Two parts of a
    pass, for layouts and for the memory of GPUs, change nothing on CPUs. With 8 towers,
    they take 0.6 of 7.6 s to the first step of a ResNet-50.
    """
    current = context.context()
    before = current.function_call_options
    options = copy.copy(before)
    options.config_proto_serialized = _for_cpus(before.config_proto_serialized)
    current.function_call_options = options
    try:
        yield
    finally:
        # Setting an option of TensorFlow has put others in their place.
        if current.function_call_options is options:
            current.function_call_options = before


@functools.cache
def _for_cpus(serialized):
    """Returns a configuration of TensorFlow's graph optimizer without what GPUs need.

    An option that the user has set stays.
    """
    config = tf.compat.v1.ConfigProto.FromString(serialized)
    rewrites = config.graph_options.rewrite_options
    rewrites.meta_optimizer_iterations = rewrites.ONE
    if rewrites.layout_optimizer == rewrites.DEFAULT:
        rewrites.layout_optimizer = rewrites.OFF
    if rewrites.memory_optimization == rewrites.DEFAULT_MEM_OPT:
        rewrites.memory_optimization = rewrites.NO_MEM_OPT
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


def has_devices() -> bool:
    """Checks whether TensorFlow has listed its devices, and so read its flags."""
    return context.context()._physical_devices is not None


def forget_scalars() -> None:
    """Frees the tensors that TensorFlow caches for Python numbers.

    For each int and float that becomes a tensor eagerly, such as the step of a summary,
    TensorFlow would keep some 650 bytes until the process ends.
    """
    pywrap_tfe.TFE_ClearScalarCache()


class DeviceGroup(NamedTuple):
    """Devices that run collectives together, each an operation of its own.

    Attributes:
        size: Number of devices, of all tasks.
        key: An int32 that belongs to these devices alone.
    """

    size: int
    key: int


def of_tasks(count: int) -> DeviceGroup:
    """Returns the group of the first CPU of each task of a cluster."""
    return DeviceGroup(count, 1)


def all_reduce(
    tensor: tf.Tensor,
    group: DeviceGroup,
    key: tf.Tensor | int,
    order: tf.Variable,
    nccl: bool = False,
) -> tf.Tensor:
    """Adds a tensor over the devices of a group, with the same bits on all.

    Args:
        tensor: A tensor on a device of the group, of the same type and shape on all:
            float16, bfloat16, float32, float64, int32 or int64.
        group: The devices.
        key: An int32 for one type and one shape; TensorFlow keeps it for ever.
        order: Collectives with the same variable run one after another.
        nccl: Whether NCCL adds the tensors, which are on GPUs.
    """
    return tf.raw_ops.CollectiveReduceV2(
        input=tensor,
        instance_key=key,
        merge_op="Add",
        final_op="Id",
        # By default the ring sends the whole tensor from one task to the next.
        max_subdivs_per_device=8,
        **_common(group, order, "nccl" if nccl else "ring"),
    )


def all_gather(
    tensor: tf.Tensor, group: DeviceGroup, key: tf.Tensor | int, order: tf.Variable
) -> tf.Tensor:
    """Concatenates the rows of all devices, which have the same number of rows.

    Args:
        tensor: float16, float32, float64, int32 or int64; see `all_reduce`.
        group: See `all_reduce`.
        key: See `all_reduce`.
        order: See `all_reduce`.
    """
    return tf.raw_ops.CollectiveGatherV2(
        input=tensor, instance_key=key, **_common(group, order, "ring")
    )


def _common(group: DeviceGroup, order: tf.Variable, hint: str) -> dict:
    return {
        "group_size": group.size,
        "group_key": group.key,
        "ordering_token": [order.handle],
        "communication_hint": hint,
    }


def random_seed() -> int | None:
    """Returns the last argument of `tf.random.set_seed`, if any."""
    return context.global_seed()
