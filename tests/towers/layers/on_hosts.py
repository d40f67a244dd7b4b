"""What each of several hosts does with tables that they divide.

    python -m tests.towers.layers.on_hosts RANK ADDRESSES TOWERS NAME FOLDER ARGUMENT

Hosts do what the function with that name does. All of them have the same FOLDER.
"""

import os
import sys
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import towers
from tests.towers.layers import test_tables
from towers.callbacks import Checkpoint
from towers.cluster import process_group
from towers.collectives.joined_hosts import this_host
from towers.collectives.spread.tables import SpreadTable, fetch, give
from towers.collectives.spread.variable import SpreadVariable
from towers.hosts.group import HostsDifferError, Membership
from towers.keras_adapter import optimizers, runtime
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
    """Notes how many bytes this host has sent in collectives, which are rings."""

    def __init__(self):
        """Counts from now on."""
        super().__init__()
        self.bytes, self._sent = [], tf.Variable(0.0, trainable=False)
        runtime.all_gather = self._counted(runtime.all_gather, lambda n: n - 1)
        runtime.all_reduce = self._counted(
            runtime.all_reduce, lambda n: 2 * (n - 1) / n
        )

    def _counted(self, collective, times):
        def call(tensor, group, *args):
            size = tf.cast(tf.size(tensor), tf.float32) * tensor.dtype.size
            self._sent.assign_add(size * times(group.size))
            return collective(tensor, group, *args)

        return call

    def on_train_batch_end(self, batch, logs=None):
        """Notes them."""
        self.bytes.append(self._sent.numpy())


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
    sent = Sent()
    parallel.compile(keras.optimizers.Adagrad(), "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((ids, ids[:, 0] % 2))
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


def exchanges(rank, counts, folder, ids_type):
    """Fetches rows, and gives gradients: duplicates, none at all, and of any size."""
    del folder
    inputs = keras.Input((2,), dtype="int32")
    rows = [keras.layers.Embedding(*size)(inputs) for size in ((9, 4), (5, 3))]
    mean = keras.layers.GlobalAveragePooling1D()(keras.layers.Concatenate()(rows))
    model = keras.Model(inputs, keras.layers.Dense(1)(mean))
    parallel = towers.multi_gpu_model(model, gpus=counts[rank], shard_embeddings="rows")
    parallel.compile("sgd", "mse", jit_compile=False)
    parallel.fit(np.zeros([6, 2], np.int32), np.zeros([6, 1]), verbose=0)
    spread = [sharded.of(variable) for variable in model.trainable_variables[:2]]
    draw = np.random.default_rng(0)
    # The last host has no rows of the second table.
    sizes = [(20, 10)] * (len(counts) - 1) + [(20, 0)]
    with mock.patch.object(SpreadTable, "ids_type", tf.dtypes.as_dtype(ids_type)):
        for extreme in 1.0, 3e38, np.inf, np.nan:
            of_hosts = []
            for n_of_tables in sizes:
                of_hosts.append([])
                for table, n in zip(spread, n_of_tables, strict=True):
                    values = draw.normal(size=[n, table.shape[1]]).astype(np.float32)
                    values[:3] = extreme
                    of_hosts[-1].append((draw.integers(0, table.shape[0], n), values))
            _check_exchange(spread, of_hosts)


def _check_exchange(spread, of_hosts):
    """Checks both exchanges for the indices and gradients of each host and table."""
    hosts = this_host()

    def exchange(ids, values):
        halves = [[indices[:2], indices[2:]] for indices in ids]
        slices = [*map(tf.IndexedSlices, values, ids)]
        return fetch(hosts, spread, halves), give(hosts, spread, slices)

    ids, values = zip(*of_hosts[hosts.index], strict=True)
    specs = [
        [tf.TensorSpec([None], tf.int64)] * len(spread),
        [tf.TensorSpec([None, table.shape[1]]) for table in spread],
    ]
    for function in exchange, tf.function(exchange, specs, autograph=False):
        fetched, given = function([*map(tf.constant, ids)], [*map(tf.constant, values)])
        for k, table in enumerate(spread):
            np.testing.assert_array_equal(fetched[k][0], np.unique(ids[k]))
            looked_up = table.numpy()[np.unique(ids[k])]
            np.testing.assert_array_equal(fetched[k][1], looked_up)
            joined = zip(*[of_tables[k] for of_tables in of_hosts], strict=True)
            all_ids, all_values = map(np.concatenate, joined)
            *gradients, norm = given[k]
            start = table.start
            for gradient, shard in zip(gradients, table.shards, strict=True):
                own = (start <= all_ids) & (all_ids < start + shard.shape[0])
                np.testing.assert_array_equal(gradient.indices, all_ids[own] - start)
                np.testing.assert_array_equal(gradient.values, all_values[own])
                start += shard.shape[0]
            others = all_values[(all_ids < table.start) | (all_ids >= start)]
            exact = np.linalg.norm(others.astype(np.float64))
            most = np.finfo(np.float32).max if np.isfinite(exact) else np.inf
            np.testing.assert_allclose(norm, np.minimum(exact, most), rtol=1e-6)


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
