"""Models, data and oracles for the tests of sparse layers."""

import keras
import numpy as np
from keras import layers

import towers
from tests.variants import slow

CHANNELS, UNITS, OUTPUTS = 6, 12, 9


def batch(examples=24, shape=(5, 5, CHANNELS), seed=0):
    """Random x and y."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(examples, *shape)).astype("float32")
    return x, random.normal(size=(examples, OUTPUTS)).astype("float32")


def dense(dtype=None, data_format="channels_last"):
    """A dense model of a convolution and two matrices, of sizes without whole blocks.

    No statistics of a batch, which towers would compute of their parts.
    """
    keras.utils.set_random_seed(3)
    shape = (5, 5, CHANNELS)
    if data_format == "channels_first":
        shape = (CHANNELS, 5, 5)
    options = {"dtype": dtype}
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(
                *(7, 3),
                activation="tanh",
                data_format=data_format,
                name="conv",
                **options,
            ),
            layers.Flatten(data_format=data_format, **options),
            layers.Dense(UNITS, activation="tanh", name="hidden", **options),
            layers.Dense(OUTPUTS, name="last", **options),
        ]
    )


NAMES = "conv", "hidden", "last"


def sparse(model=None, **options):
    """A dynamic sparse copy of a dense model; it says nothing."""
    given = {"pattern": "random", "sparsity": 0.5, "block_size": 2, "dynamic": True}
    return towers.sparsify(model or dense(), **given | options)


def dense_like(model, **options):
    """The dense model with the kernels of a sparse one, with their zeros."""
    made = dense(**options)
    for name in NAMES:
        ours = model.get_layer(name)
        made.get_layer(name).kernel.assign(ours.dense_kernel())
        made.get_layer(name).bias.assign(ours.bias)
    return made


def block_squares(kernel, block_size):
    """Sums of squares of the blocks of a kernel, by loops."""
    kernel = np.asarray(kernel, "float64")
    inputs, outputs = kernel.shape[-2:]
    sums = np.zeros((-(-inputs // block_size), -(-outputs // block_size)))
    for i in range(inputs):
        for k in range(outputs):
            more = (kernel[..., i, k] ** 2).sum()
            sums[i // block_size, k // block_size] += more
    return sums


def masked(kernel, kept, block_size):
    """A kernel with zeros in blocks that are not kept."""
    kernel = np.array(kernel)
    for i in range(kernel.shape[-2]):
        for k in range(kernel.shape[-1]):
            if not kept[i // block_size, k // block_size]:
                kernel[..., i, k] = 0
    return kernel


def apart(weights, others):
    """The largest difference of lists of weights."""
    pairs = zip(weights, others, strict=True)
    return max(np.abs(np.asarray(a, "float64") - b).max() for a, b in pairs)


def slow_but(names, *fast):
    """Parameters of which all but some are for slow tests."""
    return [name if name in fast else slow(name) for name in names]
