"""Layers whose blocks can change, and when callbacks change them."""

from typing import Any

import keras

from towers.keras_adapter.layers import layers_of
from towers.keras_adapter.optimizers import accumulator, slots_of, updating_one
from towers.models.block_sparse import BlockSparseConv2D, BlockSparseDense


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


class Turns:
    """Tells when it is time to change blocks: after each so many steps."""

    def __init__(self, every: int):
        """Takes a number of steps."""
        if not isinstance(every, int) or every < 1:
            raise ValueError(
                f"Received every={every!r}; expected a whole number of steps of at "
                "least 1, such as 100."
            )
        self.every, self._done = every, 0

    def begin(self, model: Any) -> int:
        """Returns how many turns there have been before an epoch.

        All callbacks have begun by then, so a run that is continued is where it was.
        """
        self._done = self._turns(model)
        return self._done

    def is_due(self, model: Any) -> bool:
        """Whether there is a turn that has not been taken.

        Several that have passed in one call of a step are taken as one.
        """
        before, self._done = self._done, self._turns(model)
        return self._done > before

    def _turns(self, model):
        return int(model.optimizer.iterations.numpy()) // self.every
