"""TensorFlow's runtime: devices, determinism, NCCL, data sets, the profiler's files."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.dataset_metadata_pb2 import Metadata
from tensorflow.core.framework.model_pb2 import ModelProto, NodeClass
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import context
from tensorflow.python.framework import config
from tensorflow.python.ops import nccl_ops
from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

__all__ = [
    "Metadata",
    "ModelProto",
    "NodeClass",
    "XSpace",
    "dataset_of",
    "device_memory_limits",
    "functions_of",
    "inputs_of",
    "is_deterministic",
    "metadata_of",
    "nccl_sums",
]


def is_deterministic() -> bool:
    """Tells whether `tf.config.experimental.enable_op_determinism` was called."""
    return config.is_op_determinism_enabled()


def device_memory_limits() -> dict[str, int]:
    """Returns the bytes that TensorFlow may allocate on each device.

    For a device without a limit of the user's, no public function tells.

    Returns:
        The limits, by device string such as "/device:GPU:0".
    """
    context.ensure_initialized()
    found = pywrap_tfe.TFE_ContextListDevices(context.context()._handle)
    try:
        return {
            f"/{pywrap_tf_session.TF_DeviceListName(found, i).rpartition('/')[2]}": (
                pywrap_tf_session.TF_DeviceListMemoryBytes(found, i)
            )
            for i in range(pywrap_tf_session.TF_DeviceListCount(found))
        }
    finally:
        pywrap_tf_session.TF_DeleteDeviceList(found)


def nccl_sums(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the sum of tensors on different GPUs, on each of these GPUs."""
    return nccl_ops.all_sum(tensors)


def dataset_of(iterator: tf.data.Iterator) -> tf.data.Dataset | None:
    """Returns the data set that an iterator goes through."""
    return iterator._dataset


def functions_of(dataset: tf.data.Dataset) -> Sequence[Any]:
    """Returns the functions of a data set's last transformation.

    Each has a `function` with a `name` in bytes.
    """
    return dataset._functions()


def inputs_of(dataset: tf.data.Dataset) -> Sequence[tf.data.Dataset]:
    """Returns the data sets that a data set's last transformation reads."""
    return dataset._inputs()


def metadata_of(dataset: tf.data.Dataset) -> Metadata:
    """Returns what a data set's last transformation was given, such as its name."""
    return dataset._metadata
