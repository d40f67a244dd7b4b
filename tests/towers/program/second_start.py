"""Trains a small model on two towers by XLA, and tells what was loaded for it.

python second_start.py [--used_before] [--traces_before] [--may_go_without]
"""

import hashlib
import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

import towers
from towers.program import compilation_cache

if "--used_before" in sys.argv:
    tf.config.list_physical_devices()
devices = towers.configure(2)
if "--traces_before" in sys.argv:
    for number in range(3):
        tf.function(lambda x, number=number: x * number)(tf.ones([2]))
keras.utils.set_random_seed(1)
model = keras.Sequential(
    [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
)
parallel = towers.multi_gpu_model(
    model, devices.towers, variable_update="parameter_server"
)
parallel.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=True)
rng = np.random.default_rng(0)
x = rng.normal(size=(16, 6)).astype("float32")
cache = compilation_cache._cache
compilation_cache.use()
begun = {} if cache is None else {**cache.linked}
parallel.fit(x, x[:, :3], batch_size=8, verbose=0)
assert parallel.builder.context.facts.compiled or "--may_go_without" in sys.argv
weights = b"".join(np.asarray(value).tobytes() for value in model.get_weights())
print(
    json.dumps(
        {
            "weights": hashlib.sha256(weights).hexdigest(),
            # TensorFlow would have put another file in the place of a link.
            "loaded": [
                name
                for name, number in begun.items()
                if (path := cache.own / name).exists() and path.stat().st_ino == number
            ],
            "flags": os.environ.get("TF_XLA_FLAGS", ""),
        }
    )
)
