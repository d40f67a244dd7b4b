"""Models with a `train_step` of their own, on several hosts that divide their tables.

    python -m tests.towers.builders.own_tables_on_hosts RANK ADDRESSES TOWERS FILE

The first host writes to FILE, for each way to train them, "equal" or what was wrong.
"""

import functools
import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import towers
from tests.towers.builders.test_own_steps import (
    IN_SHARDS,
    REPLICATED,
    AsKeras,
    Tied,
    looks_up,
    looks_up_positions,
    trained_table,
)
from towers.cluster import process_group
from towers.collectives.joined_hosts import this_host
from towers.hosts.group import Membership
from towers.layers import sharded

WAYS = {
    "parameter_server": {},
    "replicated": REPLICATED,
    "state in parts": IN_SHARDS,
    "guarded": {"check_numerics": True},
}
MAKE = {"rows": looks_up, "positions": looks_up_positions, "tied": Tied}


class Twice(keras.Model):
    """Trains twice in a step: on rows, of clipped gradients, and on rows of rows."""

    def train_step(self, data):
        """Trains on x and y."""
        x, y = data
        embedding = next(
            v for v in self.layers if isinstance(v, keras.layers.Embedding)
        )
        found = tf.argmax(embedding(x), axis=-1, output_type=tf.int32)
        for scale, ids in ((1.0, x), (2.0, found)):
            with tf.GradientTape() as tape:
                loss = scale * tf.reduce_mean(self.compute_loss(ids, y, self(ids)))
            weights = self.trainable_variables
            gradients = tape.gradient(loss, weights)
            if scale == 1.0:
                gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
            self.optimizer.apply(gradients, weights)
        return {"loss": loss}


def trains_twice():
    """A model that looks up rows behind an update of their table."""
    inputs = keras.Input([5], dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(9, 4)(inputs))
    return Twice(inputs, keras.layers.Dense(9)(rows))


class InLoop(keras.layers.Layer):
    """Looks up rows in a loop's body, and one outside of it."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(9, 4)

    def call(self, ids):
        """Looks up the rows of one example after another."""
        first = self.table(ids[:, :1])
        return first + tf.map_fn(self.table, ids, fn_output_signature=tf.float32)


def looks_up_in_a_loop():
    """A model that needs the whole table."""
    inputs = keras.Input([5], dtype="int32")
    rows = keras.layers.Flatten()(InLoop()(inputs))
    return AsKeras(inputs, keras.layers.Dense(9)(rows))


class Assigns(AsKeras):
    """Changes its table without an optimizer."""

    def train_step(self, data):
        """Trains as Keras does, and halves the table."""
        logs = super().train_step(data)
        table = self.trainable_variables[0]
        table.assign(table / 2)
        return logs


def assigns():
    """A model whose table hosts cannot divide."""
    inputs = keras.Input([5], dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(9, 4)(inputs))
    return Assigns(inputs, keras.layers.Dense(9)(rows))


MAKE |= {"twice": trains_twice, "in a loop": looks_up_in_a_loop, "assigns": assigns}


def compared(make, wrap):
    """Trains on all hosts, and compares with one device; says what differs."""
    models = []

    def noted(model):
        models.append(model)
        return wrap(model)

    try:
        ours = trained_table(make, noted)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not sharded.updated_by_hosts(models[0].trainable_variables):
        return "No table is divided."
    theirs = trained_table(make, lambda model: model)
    for mine, other in zip(ours, theirs, strict=True):
        if not np.allclose(mine, other, rtol=2e-5, atol=2e-6):
            return f"{np.abs(mine - other).max()} apart"
    return "equal"


def main(rank, addresses, counts, file):
    """Tries all."""
    rank, addresses = int(rank), tuple(addresses.split(","))
    mine = int(counts.split(",")[rank])
    towers.configure(num_gpus=2)
    called = tuple(f"host {k}" for k in range(len(addresses)))
    process_group.join(Membership(rank, addresses, called))
    found = {}
    for name, make in MAKE.items():
        for way, options in WAYS.items():
            wrap = functools.partial(
                towers.multi_gpu_model, gpus=mine, shard_embeddings="rows", **options
            )
            found[f"{name}, {way}"] = said = compared(make, wrap)
            print(name, way, said, flush=True)
            this_host().exchange(name)
    if rank == 0:
        with open(file, "w") as written:
            json.dump(found, written)


if __name__ == "__main__":
    main(*sys.argv[1:])
