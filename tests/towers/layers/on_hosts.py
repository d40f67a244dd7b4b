"""What each of several hosts does with tables that they divide.

    python -m tests.towers.layers.on_hosts RANK ADDRESSES TOWERS NAME FOLDER ARGUMENT

Hosts do what the function with that name does. All of them have the same FOLDER.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import towers
from tests.towers.layers import test_tables
from towers.callbacks import Checkpoint
from towers.cluster import process_group
from towers.collectives.joined_hosts import this_host
from towers.collectives.spread.variable import SpreadVariable
from towers.hosts import group
from towers.hosts.group import HostsDifferError, Membership
from towers.keras_adapter import optimizers
from towers.layers import sharded


def continued(rank, counts, folder, ways):
    """Trains for an epoch in each way, each time from the checkpoint before.

    The first host then saves the model, alone.
    """
    for epoch, way in enumerate(ways.split(","), start=1):
        model = test_tables.saved_model()
        parallel = towers.multi_gpu_model(
            model, gpus=counts[rank], shard_embeddings=way
        )
        test_tables.fit(parallel, epoch, Checkpoint(os.path.join(folder, "run")))
        _has_its_share(model, way, rank, counts)
    if rank == 0:
        model.save(os.path.join(folder, "hosts.keras"))


def _has_its_share(model, way, rank, counts):
    table = model.trainable_variables[0]
    moments = [v for v in model.optimizer.variables if v.shape == table.shape]
    assert len(moments) == 2
    for each in (table, *moments):
        cut = sharded.of(each)
        # Columns are divided alike on all hosts.
        assert len(cut.shards) == (counts[rank] if way == "rows" else min(counts))
        assert isinstance(cut, SpreadVariable) == (way == "rows")
        rows = sum(shard.shape[0] for shard in cut.shards)
        share = counts[rank] / sum(counts) if way == "rows" else counts[rank]
        assert rows <= share * table.shape[0] + counts[rank]


class Sent(keras.callbacks.Callback):
    """Notes how many bytes this host has sent, and how many variables take."""

    def on_train_begin(self, logs=None):
        """Begins."""
        self.bytes, self.links = [], group.communicator().links

    def on_train_batch_end(self, batch, logs=None):
        """Counts."""
        self.bytes.append(self.links.moved_bytes)


ROWS, WIDTH, IDS, BATCH = 50_000, 16, 5, 12


def large(rank, counts, folder, way):
    """Trains with a table that is much larger than what a batch looks up."""
    del folder
    keras.utils.set_random_seed(3)
    ids = np.random.default_rng(1).integers(0, ROWS, (4 * BATCH, IDS))
    inputs = keras.Input((IDS,), dtype="int32")
    rows = keras.layers.Embedding(ROWS, WIDTH)(inputs)
    small = keras.layers.Embedding(10, WIDTH)(inputs % 10)
    mean = keras.layers.GlobalAveragePooling1D()(rows + small)
    model = keras.Model(inputs, keras.layers.Dense(1)(mean))
    parallel = towers.multi_gpu_model(model, gpus=counts[rank], shard_embeddings=way)
    parallel.compile(keras.optimizers.Adagrad(), "mse", jit_compile=False)
    sent, data = Sent(), tf.data.Dataset.from_tensor_slices((ids, ids[:, 0] % 2))
    parallel.fit(data.batch(BATCH), verbose=0, callbacks=[sent])
    small, table = sorted(model.trainable_variables[:2], key=lambda v: v.shape[0])
    assert isinstance(sharded.of(small), SpreadVariable) == (way == "rows")
    held = sum(
        place.shape.num_elements()
        for each in (table, *optimizers.slots_of(model.optimizer, table))
        for place in sharded.places(each)
    )
    # The table, and Adagrad's accumulator.
    assert held <= 2 * WIDTH * (ROWS * counts[rank] / sum(counts) + counts[rank])
    # Each id at most once to its owner, each row back, and a gradient for each id, in
    # two tables; and sums, sizes and what hosts tell one another.
    most = 2 * BATCH * IDS * (4 + WIDTH * 4 + 4 + WIDTH * 4) + 4_000
    moved = np.diff(sent.bytes)
    assert 0 < moved.max() < most < ROWS * WIDTH * 4 / 50, moved
    if rank == len(counts) - 1:
        # A host alone, of what it has kept.
        assert model.predict(ids[:3], verbose=0).shape == (3, 1)
        assert np.asarray(table).shape == (ROWS, WIDTH)
    this_host().exchange("")


class ReadsAlone(keras.callbacks.Callback):
    """Reads weights on the first host only."""

    def on_train_batch_end(self, batch, logs=None):
        """Reads."""
        if this_host().index == 0:
            self.model.get_weights()


def alone(rank, counts, folder, argument):
    """A callback reads tables on one host only: no host hangs."""
    del folder, argument
    model = test_tables.saved_model()
    parallel = towers.multi_gpu_model(model, gpus=counts[rank], shard_embeddings="rows")
    found = None
    try:
        test_tables.fit(parallel, 1, ReadsAlone())
    except HostsDifferError as error:
        found = str(error)
    told = f"host {rank} exchanges ", f"where host {1 - rank} exchanges "
    assert all(each in found for each in told) and "embeddings" in found, found
    # The connections are closed, so that hosts cannot take leave.
    sys.stdout.flush()
    os._exit(0)


def main(rank, addresses, counts, name, folder, argument):
    """Does as all hosts do."""
    rank, counts = int(rank), [*map(int, counts.split(","))]
    addresses = tuple(addresses.split(","))
    towers.configure(num_gpus=max(counts[rank], 2))
    called = tuple(f"host {k}" for k in range(len(addresses)))
    process_group.join(Membership(rank, addresses, called))
    globals()[name](rank, counts, folder, argument)


if __name__ == "__main__":
    main(*sys.argv[1:])
