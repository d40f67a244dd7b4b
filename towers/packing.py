"""Many tensors as a few flat buffers, one for each type, and back.

What goes from one memory to another goes faster in one piece: a transfer or a sum of a
buffer costs one start, however many variables are in it. Where buffers go is the
caller's business; these functions run on the device that they are called on.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def copy(nest: Any) -> Any:
    """Copies tensors as they are, one by one.

    Args:
        nest: A nest of dense, ragged or sparse tensors, and of `None`.
    """
    return tf.nest.map_structure(
        lambda tensor: None if tensor is None else tf.identity(tensor),
        nest,
        expand_composites=True,
    )


def pack(tensors: Sequence[Any]) -> list[tf.Tensor]:
    """Joins tensors into one flat buffer for each type.

    Args:
        tensors: Tensors of any shapes and types. What is not dense, or `None`, is
            passed over.

    Returns:
        Buffers of rank 1, in the order in which their types come first.
    """
    return [
        tf.concat([tf.reshape(tensors[i], [-1]) for i in places], axis=0)
        for places in _places(tensors)
    ]


def unpack(buffers: Sequence[tf.Tensor], like: Sequence[Any]) -> list[Any]:
    """Takes apart what `pack` has joined.

    Args:
        buffers: What `pack` returned, or sums of it.
        like: What was packed, or tensors and specs of the same types and shapes, which
            have to be known.

    Returns:
        Tensors in the order of `like`, and what was passed over as it is there.
    """
    tensors = list(like)
    for buffer, places in zip(buffers, _places(like), strict=True):
        sizes = [like[i].shape.num_elements() for i in places]
        for i, flat in zip(places, tf.split(buffer, sizes), strict=True):
            tensors[i] = tf.reshape(flat, like[i].shape)
    return tensors


def _places(tensors):
    """For each type, where dense tensors of it are."""
    by_type = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, tf.Tensor | tf.TensorSpec):
            by_type.setdefault(tensor.dtype, []).append(i)
    return list(by_type.values())
