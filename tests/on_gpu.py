"""Trains a model on one GPU split into towers, and compares with the whole GPU.

    python -m tests.on_gpu MODEL TOWERS

Without a GPU, the towers are logical CPUs.
"""

import json
import sys
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import towers

COUNT, BATCH, CLASSES = 120, 50, 5  # The last batch is smaller, and uneven.
WAYS = [
    ("parameter_server", "auto"),
    ("replicated", "cpu"),
    ("replicated", "device"),
    ("replicated", "ring"),
]


def dense() -> list[keras.Layer]:
    """Returns layers of matrix products."""
    return [
        keras.Input((12,)),
        keras.layers.Dense(32, activation="tanh"),
        keras.layers.Dense(CLASSES),
    ]


def convolutions() -> list[keras.Layer]:
    """Returns layers for images, with batch statistics."""
    return [
        keras.Input((16, 16, 3)),
        keras.layers.Conv2D(8, 3, use_bias=False),
        keras.layers.BatchNormalization(synchronized=True),
        keras.layers.ReLU(),
        keras.layers.SeparableConv2D(8, 3),
        keras.layers.MaxPooling2D(),
        keras.layers.GroupNormalization(4),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(CLASSES),
    ]


def recurrent() -> list[keras.Layer]:
    """Returns layers for which a GPU has kernels of cuDNN."""
    return [
        keras.Input((9, 6)),
        keras.layers.LSTM(8, return_sequences=True),
        keras.layers.GRU(8),
        keras.layers.Dense(CLASSES),
    ]


def attention() -> list[keras.Layer]:
    """Returns layers for tokens."""
    tokens = keras.Input((9,), dtype="int32")
    x = keras.layers.Embedding(50, 16)(tokens)
    x = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return [keras.Model(tokens, keras.layers.Dense(CLASSES)(x))]


MODELS = {
    layers.__name__: layers for layers in (dense, convolutions, recurrent, attention)
}
WITH_XLA = "dense", "convolutions"


def build(layers: Callable[[], list[keras.Layer]]) -> keras.Model:
    """Builds a model, always with the same weights."""
    keras.utils.set_random_seed(1)
    found = layers()
    return found[0] if len(found) == 1 else keras.Sequential(found)


def fit(model: keras.Model, steps: int = 1, xla: bool = False) -> list[np.ndarray]:
    """Trains a model, and returns its weights."""
    random = np.random.default_rng(0)
    shape = (COUNT, *model.inputs[0].shape[1:])
    x = random.normal(size=shape).astype("float32")
    if keras.backend.is_int_dtype(model.inputs[0].dtype):
        x = random.integers(0, 50, shape).astype("int32")
    y = random.integers(0, CLASSES, COUNT)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=xla,
        steps_per_execution=steps,
    )
    model.fit(x, y, batch_size=BATCH, epochs=5, shuffle=False, verbose=0)
    return model.get_weights()


def main() -> None:
    """Prints the largest difference of a weight, for each way to train."""
    name, count = sys.argv[1], int(sys.argv[2])
    placed = towers.configure(num_gpus=1, gpu_split=count, gpu_memory_limit_mb=1024)
    # Its products have three digits, which is not what is compared.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    with tf.device(placed.towers[0]):
        expected = fit(build(MODELS[name]))
    found = {}
    for builder, algorithm in WAYS:
        for xla in (False, True) if name in WITH_XLA else (False,):
            parallel = towers.multi_gpu_model(
                build(MODELS[name]),
                gpus=placed.towers,
                variable_update=towers.ParameterServer(placed.home)
                if builder == "parameter_server"
                else towers.Replicated(algorithm),
            )
            # One step a call has batches placed ahead; several are a loop.
            steps = 1 if algorithm in ("auto", "ring") else 4
            weights = fit(parallel, steps=steps, xla=xla)
            found[f"{builder}, {algorithm}{', XLA' if xla else ''}"] = max(
                float(np.max(np.abs(a - b)))
                for a, b in zip(weights, expected, strict=True)
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
