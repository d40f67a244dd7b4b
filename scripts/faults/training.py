"""A network of the registry on two towers, and endless data for it."""

from collections.abc import Callable

import keras
import tensorflow as tf

import towers
from towers import input_pipeline, models


def on_two_towers(
    name: str,
    shape: tuple[int, int, int],
    examples: int,
    batch_size: int,
    make_optimizer: Callable[[], keras.optimizers.Optimizer],
) -> tuple[towers.TowerModel, tf.data.Dataset]:
    """Builds and compiles both.

    Args:
        name: Of the network.
        shape: Of an image: height, width, channels.
        examples: In an epoch, made up.
        batch_size: Examples in a global batch.
        make_optimizer: Is called once the devices are set up.
    """
    placed = towers.configure(2)
    size = "x".join(map(str, shape))
    source = input_pipeline.open_source(f"synthetic:{size}:10:{examples}")
    data = input_pipeline.make_dataset(
        source,
        "train",
        batch_size=batch_size,
        image_shape=shape,
        training=True,
        repeat=True,
    )
    model = models.build(name, input_shape=shape, num_classes=10, seed=0)
    parallel = towers.multi_gpu_model(
        model,
        placed.towers,
        preprocess=lambda x, y, training: (input_pipeline.normalize(x), y),
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    parallel.compile(make_optimizer(), loss)
    return parallel, data
