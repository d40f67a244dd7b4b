"""First values of blocks: as spread as those of a dense kernel with as many inputs."""

import copy
import math
from typing import Any

import keras

from towers.models.block_sparse.layout import Layout


def initializer(
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


def of_factor(given: Any, number: int, factors: int) -> Any:
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
