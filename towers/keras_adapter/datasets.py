"""tf.data: what a data set is made of, and what its autotuning counts."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.dataset_metadata_pb2 import Metadata
from tensorflow.core.framework.model_pb2 import ModelProto, NodeClass

__all__ = [
    "Metadata",
    "ModelProto",
    "NodeClass",
    "dataset_of",
    "functions_of",
    "inputs_of",
    "metadata_of",
]


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
