"""The weights of layers that have only some blocks."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from towers.models.block_sparse.layout import Layout


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
            initializer=_initializer(
                _of_factor(layer.kernel_initializer, number, len(layouts)),
                layout,
                math.prod(window),
            ),
            regularizer=layer.kernel_regularizer,
            constraint=layer.kernel_constraint,
            name=f"kernel_{number}" if number else "kernel",
        )
        for number, layout in enumerate(layouts)
    ]


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


def _initializer(
    given: keras.initializers.Initializer, layout: Layout, places: int = 1
) -> Any:
    """Makes an initializer of blocks from one of dense kernels.

    Those that scale by the inputs or outputs of a kernel, such as "glorot_uniform",
    count how many of them an output or an input meets on average. All others are used
    as they are.

    Args:
        given: That of dense kernels.
        layout: Which blocks are there.
        places: How often a kernel has them: height x width of a convolution's.
    """
    if not isinstance(given, keras.initializers.VarianceScaling):
        return given
    rows, columns = layout.mask.shape
    into, out = layout.block_shape
    blocks = layout.num_blocks * places
    fans = blocks * into / columns, blocks * out / rows

    def initial(shape, dtype=None):
        # Keras counts the fans of a matrix [fan in, fan out].
        drawn = math.prod(shape[:-1]), shape[-1]
        mean = {"fan_in": lambda f: f[0], "fan_out": lambda f: f[1]}.get(
            given.mode, lambda f: (f[0] + f[1]) / 2
        )
        scaled = copy.copy(given)
        scaled.scale = given.scale * max(1.0, mean(drawn)) / max(1.0, mean(fans))
        return keras.ops.reshape(scaled(drawn, dtype), shape)

    return initial


def _of_factor(given: Any, number: int, factors: int) -> Any:
    """Makes an initializer of one of several matrices that are multiplied in turn.

    Each gets other numbers. All together, they scale as a single one would.

    Args:
        given: The initializer of a single matrix.
        number: Which of the matrices it is.
        factors: How many there are.
    """
    if factors == 1 or not isinstance(given, keras.initializers.Initializer):
        return given
    config = given.get_config()
    if isinstance(config.get("seed"), int):
        config["seed"] += number
    made = type(given).from_config(config)
    if isinstance(given, keras.initializers.VarianceScaling):
        made.scale = given.scale ** (1 / factors)
    return made
