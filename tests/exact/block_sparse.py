"""Exact cases of models with block-sparse layers: data, nothing of ours but the layers.

That the layers equal dense ones is for tests/models/block_sparse.
"""

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import ops, optimizers

from tests.exact import cases
from tests.exact.case import Case
from towers.models.block_sparse import (
    BlockSparseAttention,
    BlockSparseConv2D,
    BlockSparseDense,
)

GROUP = "block-sparse"
_SHAPE, _OUT = (16,), (12,)


def _dense(*options, shape=_SHAPE, last="random", **more):
    """A block-sparse perceptron."""

    def make():
        return keras.Sequential(
            [
                keras.Input(shape),
                BlockSparseDense(24, 4, *options, activation="tanh", **more),
                BlockSparseDense(_OUT[0], 3, last, 0.5, seed=1),
            ]
        )

    return make


def _twice():
    """A layer that is used twice; inputs that have no whole number of blocks."""
    inputs = keras.Input((10,))
    shared = BlockSparseDense(10, 4, "erdos_renyi", 0.4, activation="tanh")
    outputs = BlockSparseDense(_OUT[0], 4, "local_strided", 0.4)(shared(shared(inputs)))
    return keras.Model(inputs, outputs)


def _penalised():
    """A penalty on the gradient: derivatives of the second order."""

    class Penalised(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = BlockSparseDense(_OUT[0], 4, "random", 0.5, activation="tanh")

        def build(self, shape):
            self.inner.build(shape)

        def call(self, x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = self.inner(x)
            gradient = tape.gradient(y, x)
            self.add_loss(ops.mean(ops.sum(gradient**2, axis=-1)))
            return y

    return keras.Sequential([keras.Input(_SHAPE), Penalised()])


def _pictures(*options, **more):
    """Two convolutions, and a mean of each channel."""

    def make():
        return keras.Sequential(
            [
                keras.Input((7, 7, 8)),
                BlockSparseConv2D(
                    12, 3, *options, block_size=4, activation="relu", **more
                ),
                BlockSparseConv2D(_OUT[0], 1, 2, block_size=4, pattern="random"),
                keras.layers.GlobalAveragePooling2D(),
            ]
        )

    return make


def _attention(**options):
    """Attention of 10 tokens in blocks of 4, the last of which has two."""

    def make():
        return keras.Sequential(
            [
                keras.Input((10, 8)),
                BlockSparseAttention(2, 4, 4, window=0, stride=2, **options),
                keras.layers.Dense(_OUT[0]),
            ]
        )

    return make


_PIXELS = cases._numbers(shape=(7, 7, 8), out=_OUT)
_TEXTS = cases._numbers(shape=(10, 8), out=(10, *_OUT))
_GIVEN = np.array([[1, 0, 0, 1, 0, 0], [0, 1, 0, 1, 0, 0], [1] * 6, [0] * 6])
_NUMBERS = cases._numbers(shape=_SHAPE, out=_OUT)
_TOKENS = cases._numbers(shape=(5, *_SHAPE), out=(5, *_OUT))

CASES = [
    Case(GROUP, name, make, batches, **more)
    for name, make, batches, more in [
        ("block_diagonal", _dense("block_diagonal", 0.5), _NUMBERS, {}),
        ("butterfly", _dense("butterfly", 0.25), _NUMBERS, {}),
        ("monarch", _dense("monarch", 0.1), _NUMBERS, {}),
        ("local_strided", _dense("local_strided", 0.5), _NUMBERS, {}),
        ("random, tokens", _dense("random", 0.5, shape=(5, 16)), _TOKENS, {}),
        (
            "erdos_renyi, dynamic",
            _dense("erdos_renyi", 0.5, dynamic=True),
            _NUMBERS,
            {},
        ),
        ("barabasi_albert", _dense("barabasi_albert", 0.5), _NUMBERS, {}),
        ("a matrix, some rows empty", _dense(_GIVEN), _NUMBERS, {}),
        (
            "used twice, batches of (1, 8)",
            _twice,
            cases._numbers((1, 8), (10,), _OUT),
            {"optimizer": functools.partial(optimizers.Adam, 0.01)},
        ),
        ("gradient penalty", _penalised, _NUMBERS, {}),
        (
            "clipping, decay and penalties",
            _dense("random", 0.5, kernel_regularizer="l2", kernel_constraint="non_neg"),
            _NUMBERS,
            {
                "optimizer": functools.partial(
                    optimizers.AdamW, 0.01, global_clipnorm=0.1
                )
            },
        ),
        (
            "Conv2D, block_diagonal, same",
            _pictures(1, "same", pattern="block_diagonal", sparsity=0.5),
            _PIXELS,
            {},
        ),
        (
            "Conv2D, strides, dynamic",
            _pictures(2, pattern="erdos_renyi", sparsity=0.5, dynamic=True),
            _PIXELS,
            {},
        ),
        (
            "Conv2D, dilation",
            _pictures(pattern="random", sparsity=0.5, dilation_rate=2),
            _PIXELS,
            {},
        ),
        ("attention, local, causal", _attention(causal=True), _TEXTS, {}),
        ("attention, strided", _attention(pattern="strided"), _TEXTS, {}),
        ("attention, global", _attention(pattern="global"), _TEXTS, {}),
        ("mixed_bfloat16", _dense("random"), _NUMBERS, {"policy": "mixed_bfloat16"}),
    ]
]
