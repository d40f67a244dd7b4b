"""What these examples share: their data, and their command line."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import towers


def digits(side: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Returns scikit-learn's handwritten digits.

    Args:
        side: Height and width of a picture, a multiple of 8.

    Returns:
        Pictures of shape (1797, side, side, 1) with values from 0 to 1, and labels.
    """
    found = load_digits()
    scale = side // 8
    pictures = np.kron(found.images / 16, np.ones((1, scale, scale)))
    return pictures[..., None].astype("float32"), found.target.astype("int32")


def means(*names: str) -> dict[str, keras.metrics.Mean]:
    """Returns a metric for each name, which keeps the mean of its values."""
    return {name: keras.metrics.Mean(name=name) for name in names}


def log(metrics: dict[str, keras.metrics.Mean], values: Sequence[Any]) -> dict:
    """Updates metrics, each with a value, and returns their results as logs."""
    for metric, value in zip(metrics.values(), values, strict=True):
        metric.update_state(value)
    return {name: metric.result() for name, metric in metrics.items()}


def descend(
    optimizer: keras.Optimizer, variables: Sequence[Any], losses: Callable[[], Any]
) -> Any:
    """Takes a step down the gradient of a loss.

    Args:
        optimizer: Takes the step.
        variables: The weights to change.
        losses: Computes the loss; or a tuple, of which the first is the loss.

    Returns:
        What `losses` has returned.
    """
    with tf.GradientTape() as tape:
        computed = losses()
    loss = computed[0] if isinstance(computed, tuple) else computed
    optimizer.apply(tape.gradient(loss, variables), variables)
    return computed


def main(
    build: Callable[[], keras.Model],
    data: Callable[[], Any],
    arguments: Sequence[str] | None = None,
) -> keras.callbacks.History:
    """Trains a model on towers.

    Args:
        build: Returns a compiled model.
        data: Returns a nest of arrays. A batch has the same nest.
        arguments: Of the command line. None: those of the process.

    Returns:
        What `fit` returns.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=2, help="1: plain Keras")
    parser.add_argument(
        "--loss_placement",
        choices=["auto", "tower"],
        default="auto",
        help="where examples meet: on one device, or on each with its rows",
    )
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=-1, help="steps of an epoch")
    flags = parser.parse_args(arguments)
    if flags.gpus > 1:
        towers.configure(num_gpus=flags.gpus)
    keras.utils.set_random_seed(0)
    model = build()
    if flags.gpus > 1:
        model = towers.multi_gpu_model(
            model, gpus=flags.gpus, loss_placement=flags.loss_placement
        )
    batches = tf.data.Dataset.from_tensor_slices(data()).shuffle(2000)
    batches = batches.batch(flags.batch_size).take(flags.steps)
    return model.fit(batches, epochs=flags.epochs)
