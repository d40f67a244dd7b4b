"""Gradients of whole kernels, of which layers have only some blocks."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.models.block_sparse.layout import sums_of_blocks


def norms_of_blocks(
    model: keras.Model, layers: Sequence[keras.layers.Layer]
) -> Callable[[Any, Any, Any], list[tf.Tensor]]:
    """Makes a function that tells how large gradients of blocks are.

    Args:
        model: A compiled model.
        layers: Layers of it that are block-sparse.

    Returns:
        A function of x, y and sample weights. It returns for each layer the norms of
        the gradients of all blocks, also of those that are not there: float32
        [input blocks, output blocks]. It changes no variable.
    """

    @tf.function(autograph=False, reduce_retracing=True)
    def norms(x, y, sample_weight):
        kernels = [tf.zeros(layer.dense_shape) for layer in layers]
        with (
            tf.GradientTape(watch_accessed_variables=False) as tape,
            # What training would change, such as statistics and seeds, stays as it is.
            keras.StatelessScope(collect_losses=True),
            _added(layers, kernels),
        ):
            tape.watch(kernels)
            outputs = model(x, training=True)
            loss = model.compute_loss(x, y, outputs, sample_weight, training=True)
            # In float16, gradients would be zero without it.
            loss = model.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, kernels)
        return [
            # Of batches of any size, shapes of gradients are not known.
            _norms(tf.ensure_shape(gradient, layer.dense_shape), layer.layouts[0])
            for gradient, layer in zip(gradients, layers, strict=True)
        ]

    return norms


@contextlib.contextmanager
def _added(layers: Sequence[Any], kernels: Sequence[tf.Tensor]) -> Iterator[None]:
    """Inside, layers add what kernels make of their inputs."""
    try:
        for layer, kernel in zip(layers, kernels, strict=True):
            layer.added_kernel = kernel
        yield
    finally:
        for layer in layers:
            layer.added_kernel = None


def _norms(gradient, layout):
    """The norm of each block of a matrix [..., inputs, outputs]."""
    squares = tf.square(tf.cast(gradient, tf.float32))
    return tf.sqrt(sums_of_blocks(squares, layout.mask.shape, layout.block_shape))
