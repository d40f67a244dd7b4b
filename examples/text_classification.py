"""Text classification: which package of Python's library is a line of code from?

    towers train --model=examples/text_classification.py --task=text_classification

A `tf.data.Dataset` does not tell how many classes there are, so `build` knows it. Texts
in columns of tables need no code: see docs/train/tasks.md.
"""

import email
import http
import json
import pathlib

import keras
import tensorflow as tf

PACKAGES = email, http, json
LENGTH = 64


def build(input_shape):
    """Looks for short sequences of bytes anywhere in a line."""
    return keras.Sequential(
        [
            keras.Input(input_shape, dtype="int32"),
            keras.layers.Embedding(256, 32),
            keras.layers.Conv1D(64, 5, activation="relu"),
            keras.layers.GlobalMaxPooling1D(),
            keras.layers.Dense(len(PACKAGES)),
        ]
    )


def _lines(held_out):
    """Lines and the numbers of their packages; every tenth is held out."""
    texts, labels = [], []
    for label, package in enumerate(PACKAGES):
        folder = pathlib.Path(package.__file__).parent
        code = "\n".join(path.read_text() for path in sorted(folder.glob("*.py")))
        lines = [line.strip() for line in code.splitlines() if len(line) > 30]
        chosen = [line for i, line in enumerate(lines) if (i % 10 == 0) == held_out]
        texts += chosen
        labels += [label] * len(chosen)
    return tf.data.Dataset.from_tensor_slices((texts, labels))


def _to_bytes(texts, labels):
    return tf.cast(
        tf.io.decode_raw(texts, tf.uint8, fixed_length=LENGTH), "int32"
    ), labels


def train_data(batch_size, seed):
    """Batches, as for `fit`. With a seed, a run that goes on has the same order."""
    lines = _lines(held_out=False).shuffle(20_000, seed=seed)
    return lines.batch(batch_size).map(_to_bytes).prefetch(2)


def eval_data(batch_size):
    """Batches of what is held out."""
    return _lines(held_out=True).batch(batch_size).map(_to_bytes)
