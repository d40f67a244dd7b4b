"""What `fit` is given to train on: how many batches, and of which size."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from towers.plan import Share


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
