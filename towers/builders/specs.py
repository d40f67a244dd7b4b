"""The specs of the batches that a tower computes, as far as they are known."""

from typing import Any

import keras
import tensorflow as tf

from towers.builders.context import Context
from towers.collectives import batch

# Of a batch, and of other dimensions, whose size is not known.
_FEW_ROWS = 8


def micro_batch_spec(context: Context, data: Any) -> Any:
    """Returns the specs of (x, y, sample_weight), as the loss sees a micro-batch.

    All sizes are known.

    Args:
        context: What tells the usual size, and what is done to a batch before.
        data: A batch, or its `tf.TypeSpec`s.
    """
    data = batch.specs(keras.utils.unpack_x_y_sample_weight(data))
    if context.preprocess is not None:
        data = context.preprocess.spec(data, training=True)
    return sized(data, usual_rows(context, data))


def usual_rows(context: Context, data: Any) -> int:
    """Returns how many examples a micro-batch has, or may have.

    Args:
        context: See `micro_batch_spec`.
        data: A nest of batches, or of their `tf.TypeSpec`s.
    """
    plan, first = context.plan, tf.nest.flatten(batch.specs(data))[0]
    total = context.usual_rows or first.shape[0] or _FEW_ROWS * plan.count
    return max(1, plan.sizes(int(total))[0])


def sized(data: Any, rows: int | None) -> Any:
    """Returns the specs of a batch of so many rows, of which no other size is unknown.

    Args:
        data: A nest of batches, or of their `tf.TypeSpec`s.
        rows: The number of rows; `None` if that is unknown.
    """

    def local(spec):
        if spec is None:
            return None
        sizes = [_FEW_ROWS if n is None else n for n in spec.shape[1:]]
        return tf.TensorSpec([rows, *sizes], spec.dtype)

    return tf.nest.map_structure(local, batch.specs(data))
