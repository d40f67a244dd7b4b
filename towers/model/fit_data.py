"""What `fit` is given to train on: how many batches, and of which size."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from towers.loop import loop
from towers.plan import Share

# Of what a data set refers to outside of itself, such as a table: it stays there.
_IGNORE = 1


def batch_size(options: Mapping[str, Any]) -> int | None:
    """Returns the batch size of the data of `fit`, if it is known."""
    data = options["x"]
    if (pipeline := getattr(data, "pipeline", None)) is not None:
        return pipeline.batch_size
    if isinstance(data, tf.data.Dataset):
        return length(data.element_spec)
    if (examples := _examples(options)) is None:
        return None
    steps = options["steps_per_epoch"]
    return options["batch_size"] or (math.ceil(examples / steps) if steps else 32)


def count(options: Mapping[str, Any]) -> int | None:
    """Returns the number of batches of the data of `fit`, if it is known."""
    data = options["x"]
    if isinstance(data, keras.utils.PyDataset):
        return data.num_batches
    if isinstance(data, tf.data.Dataset):
        cardinality = int(data.cardinality())
        return cardinality if cardinality >= 0 else None
    if (examples := _examples(options)) is None:
        return None
    return math.ceil(examples / batch_size(options))


def of_host(data: Any, share: Share) -> Any:
    """Returns data of which a host is given its rows only, where they can tell these.

    Args:
        data: What `fit` or another method is given. What
            `towers.input_pipeline.make_dataset` has made can tell.
        share: What the host computes of each batch.
    """
    pipeline = getattr(data, "pipeline", None)
    if pipeline is None or pipeline.share is not None:
        return data
    known = getattr(data, "of_host", None)
    if known is None or known.pipeline.share != share:
        # Kept, as it counts epochs.
        data.of_host = dataclasses.replace(pipeline, share=share).dataset()
    return data.of_host


def unopened(data: Any) -> Any:
    """Returns a data set that has a shuffle of its own, as if never opened.

    Where one fit follows another, each then opens it as a process does that has just
    begun. What is no `tf.data.Dataset`, or cannot be copied, is returned as it is.
    """
    if not isinstance(data, tf.data.Dataset) or hasattr(data, "pipeline"):
        return data
    try:
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(data),
            external_state_policy=_IGNORE,
        )
        copied = tf.raw_ops.DatasetFromGraph(graph_def=_shuffled_anew(graph.numpy()))
    except (tf.errors.OpError, ValueError, DecodeError):  # too large, say
        return data
    copied = tf.data.experimental.from_variant(copied, data.element_spec)
    return copied.with_options(data.options())


def _shuffled_anew(text: bytes) -> bytes:
    """Has a data set's graph not share what its shuffles draw their orders from."""
    graph = tf.compat.v1.GraphDef.FromString(text)
    for node in (each for each in graph.node if each.op == "Const"):
        for handle in node.attr["value"].tensor.resource_handle_val:
            if "SeedGenerator" in handle.maybe_type_name:
                # Of one that is not there, TensorFlow makes one.
                handle.name = "none"
    return graph.SerializeToString()


def inputs(options: Mapping[str, Any]) -> Any:
    """Returns inputs to build a model with, or their `tf.TypeSpec`s; see `fit`.

    Nothing goes on by that. Of data that can be read only once, `None` is returned.
    """
    data = options["x"]
    if is_arrays(options):
        return keras.tree.map_structure(lambda array: np.asarray(array[:1]), data)
    if isinstance(data, tf.data.Dataset):
        first = loop.without_optionals(data.element_spec)
    elif isinstance(data, keras.utils.PyDataset):
        first = data[0]
    else:
        return None
    return keras.utils.unpack_x_y_sample_weight(first)[0]


def is_arrays(options: Mapping[str, Any]) -> bool:
    """Tells whether the data of `fit` are arrays, which Keras cuts and shuffles."""
    others = tf.data.Dataset, keras.utils.PyDataset
    return not isinstance(options["x"], others) and length(options["x"]) is not None


def length(arrays: Any) -> int | None:
    """Returns the first dimension of arrays, or of their specs, if it is known."""
    first = next(iter(keras.tree.flatten(arrays)), None)
    shape = getattr(first, "shape", None)
    if isinstance(shape, tf.TensorShape):
        shape = shape.rank and shape.as_list()
    return shape[0] if shape else None


def _examples(options):
    """The first dimension of arrays, without what is split off."""
    examples = length(options["x"])
    if examples and options["validation_split"] and options["validation_data"] is None:
        return math.floor(examples * (1 - options["validation_split"]))
    return examples
