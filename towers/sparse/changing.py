"""What callbacks that change blocks share: which layers, and when."""

from typing import Any

import keras
import numpy as np

from towers.keras_adapter.layers import layers_of
from towers.keras_adapter.optimizers import accumulator, slots_of, updating_one
from towers.models.block_sparse import BlockSparseConv2D, BlockSparseDense
from towers.monitoring.steps import Interval


def dynamic_layers(model: Any) -> list[keras.layers.Layer]:
    """Returns the layers of a model whose blocks can change.

    Those that do not train stay as they are. The first step may build the others.

    Raises:
        ValueError: There is none.
    """
    kinds = BlockSparseConv2D, BlockSparseDense
    found = [
        layer
        for layer in layers_of(model)
        if isinstance(layer, kinds) and layer.dynamic and layer.trainable
    ]
    if not found:
        raise ValueError(
            f"Received model {model.name!r} without a layer whose blocks can change; "
            "expected a trainable one that is built with dynamic=True, such as of "
            "towers.sparsify(model, dynamic=True)."
        )
    return found


def begin_anew(optimizer: Any, layer: keras.layers.Layer, blocks: Any) -> None:
    """Makes the weights of some blocks zero.

    What an optimizer keeps of them becomes what it was at first.

    Args:
        optimizer: The optimizer.
        layer: The layer.
        blocks: Bool [blocks]: which ones.
    """
    (kernel,) = layer.kernels
    slots = slots_of(optimizer, kernel, of_any_shape=True)
    # Some have a number for each row or column of a block.
    slots = [slot for slot in slots if slot.shape[:1] == kernel.shape[:1]]
    leaf = updating_one(optimizer, kernel)
    # Ftrl and Adagrad divide by what they accumulate, and do not begin at zero.
    initial = getattr(leaf, "initial_accumulator_value", 0) if slots else 0
    begins = accumulator(leaf, kernel) if initial else None
    for variable in (kernel, *slots):
        values = keras.ops.convert_to_numpy(variable).copy()
        values[blocks] = initial if variable is begins else 0
        variable.assign(values)


def squares_of_blocks(layer: keras.layers.Layer) -> np.ndarray:
    """Returns the sum of the squares of each block's weights, float64 [blocks]."""
    kernel = keras.ops.convert_to_numpy(layer.kernels[0]).astype("float64")
    return (kernel**2).sum(tuple(range(1, kernel.ndim)))


def intervals(every: int) -> Interval:
    """Tells when it is time to change blocks: after each so many steps.

    Several such times in one call of a step are one. It begins as an epoch does: all
    callbacks have begun by then, so a run that is continued is where it was.

    Raises:
        ValueError: It is no number of steps.
    """
    if not isinstance(every, int) or every < 1:
        raise ValueError(
            f"Received every={every!r}; expected a whole number of steps of at least "
            "1, such as 100."
        )
    return Interval(every)
