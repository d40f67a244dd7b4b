"""The weights of layers that have only some blocks, and the arguments these share."""

import math
import random
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from towers.models.block_sparse import initial
from towers.models.block_sparse.layout import Layout

_PLAIN = "block_size", "sparsity", "use_bias", "dynamic", "seed"
_OF_KERAS = {
    "activation": keras.activations,
    "kernel_initializer": keras.initializers,
    "bias_initializer": keras.initializers,
    "kernel_regularizer": keras.regularizers,
    "bias_regularizer": keras.regularizers,
    "kernel_constraint": keras.constraints,
    "bias_constraint": keras.constraints,
}


def add_kernels(
    layer: keras.layers.Layer, layouts: Sequence[Layout], window: tuple[int, ...] = ()
) -> list[keras.Variable]:
    """Adds the blocks of each layout, [blocks, *window, inputs, outputs].

    Args:
        layer: Has the arguments that kernels of Keras have.
        layouts: Which blocks are there.
        window: Height and width of a convolution's kernel.
    """
    return [
        layer.add_weight(
            shape=(layout.num_blocks, *window, *layout.block_shape),
            initializer=initial.initializer(
                initial.of_factor(layer.kernel_initializer, number, len(layouts)),
                layout,
                math.prod(window),
            ),
            regularizer=layer.kernel_regularizer,
            constraint=layer.kernel_constraint,
            name=f"kernel_{number}" if number else "kernel",
        )
        for number, layout in enumerate(layouts)
    ]


def drawn(seed: int | None) -> int:
    """Returns a seed, drawn as Keras draws those of its layers if there is none."""
    return random.randrange(2**31) if seed is None else seed


def add_bias(layer: keras.layers.Layer, size: int) -> keras.Variable | None:
    """Adds a bias [size], if the layer uses one."""
    if not layer.use_bias:
        return None
    return layer.add_weight(
        shape=(size,),
        initializer=layer.bias_initializer,
        regularizer=layer.bias_regularizer,
        constraint=layer.bias_constraint,
        name="bias",
    )


def add_places(
    layer: keras.layers.Layer, layouts: Sequence[Layout]
) -> keras.Variable | None:
    """Adds the input block that each block reads, int [blocks], if they can change.

    Raises:
        ValueError: There are several matrices.
    """
    if not layer.dynamic:
        return None
    if len(layouts) > 1:
        raise ValueError(
            "Received dynamic=True with pattern='monarch'; expected a pattern of one "
            "matrix, such as 'random'."
        )
    inputs = layouts[0].inputs
    return layer.add_weight(
        shape=inputs.shape,
        dtype="int32",
        initializer=lambda shape, dtype: ops.cast(inputs, dtype),
        trainable=False,
        autocast=False,
        name="places",
    )


def add_present(
    layer: keras.layers.Layer, layouts: Sequence[Layout]
) -> keras.Variable | None:
    """Adds which blocks have not been dropped, 1 or 0 [blocks], if any can be."""
    if not layer.dynamic:
        return None
    return layer.add_weight(
        shape=(layouts[0].num_blocks,),
        initializer="ones",
        trainable=False,
        name="present",
    )


def values(layer: keras.layers.Layer) -> list[tf.Tensor]:
    """Returns the blocks of each matrix, with zeros for those that were dropped."""
    blocks = [*map(tf.convert_to_tensor, layer.kernels)]
    if not layer.dynamic:
        return blocks
    (only,) = blocks
    shape = (-1, *(only.shape.rank - 1) * (1,))
    # So their gradients are zero, too.
    return [only * tf.reshape(tf.convert_to_tensor(layer.present), shape)]


def config(layer: keras.layers.Layer) -> dict[str, Any]:
    """Returns the arguments that all layers with blocks have, to be saved."""
    pattern = layer.pattern
    if not isinstance(pattern, str):
        pattern = pattern.astype(int).tolist()
    plain = {name: getattr(layer, name) for name in _PLAIN}
    of_keras = {
        name: module.serialize(getattr(layer, name))
        for name, module in _OF_KERAS.items()
    }
    return {"pattern": pattern, **plain, **of_keras}
