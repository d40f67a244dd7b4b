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
