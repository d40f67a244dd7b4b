"""Prints digests of two epochs of each source, as towers see them, as JSON.

Arguments: threads, towers, a folder of TFRecord files, a file of images.
"""

import hashlib
import json
import sys

import keras
import numpy as np
import tensorflow as tf

import towers
from towers import input_pipeline

threads, count, folder, images = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
tf.config.threading.set_inter_op_parallelism_threads(threads)
towers.configure(count)
sources = {
    "tfrecord": input_pipeline.open_source(f"tfrecord:{folder}/*"),
    "arrays": input_pipeline.ArraySource(np.load(images), np.arange(60)),
}
orders = {}
for name, source in sources.items():
    dataset = input_pipeline.make_dataset(
        source,
        "train",
        batch_size=16,
        image_shape=(8, 8, source.image_shape[-1]),
        training=True,
        recipe="imagenet",
        seed=3,
    )
    shape = dataset.element_spec[0].shape[1:]
    model = keras.Sequential([keras.Input(shape), keras.layers.Flatten()])
    parallel = towers.multi_gpu_model(
        model, gpus=count, preprocess=lambda x, y, _: (tf.cast(x, tf.float32), y)
    )
    pixels = [
        parallel.predict(dataset.map(lambda x, y: x), verbose=0) for _ in range(2)
    ]
    orders[name] = [hashlib.sha256(values.tobytes()).hexdigest() for values in pixels]
print(json.dumps(orders))
