"""A contender: Keras's own reader of a folder, and its layers.

It has no layer for crops of random size: it crops photographs resized to 256x256.
"""

import keras
import tensorflow as tf

from ..works import WORKS


def batches(contender, work, folder):
    """Yields batches for ever."""
    height, width, _ = WORKS[work].shape
    dataset = keras.utils.image_dataset_from_directory(
        folder / "folder",
        image_size=(256, 256),
        batch_size=WORKS[work].batch,
        verbose=False,
    )
    layers = [
        keras.layers.RandomCrop(height, width),
        keras.layers.RandomFlip("horizontal"),
        keras.layers.Rescaling(1 / 127.5, offset=-1),
    ]

    def augment(images, labels):
        for layer in layers:
            images = layer(images, training=True)
        return images, labels

    dataset = dataset.map(augment, tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    while True:
        yield from dataset
