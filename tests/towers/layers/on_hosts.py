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
from towers.cluster.membership import HostsDifferError, Membership
from towers.collectives.hosts import this_host
from towers.collectives.spread.variable import SpreadVariable
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
        assert len(cut.shards) == counts[rank]
        assert isinstance(cut, SpreadVariable) == (way == "rows")
        rows = sum(shard.shape[0] for shard in cut.shards)
        share = counts[rank] / sum(counts) if way == "rows" else counts[rank]
        assert rows <= share * table.shape[0] + counts[rank]


class Sent(keras.callbacks.Callback):
    """Notes how many bytes this host has sent, and how many variables take."""

    def on_train_begin(self, logs=None):
        """Begins."""
        self.bytes, self.links = [], process_group.communicator().links

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
    this_host().tell_all("")


@keras.saving.register_keras_serializable()
class Picks(keras.layers.Layer):
    """Picks one of the next table's rows by the rows of the one before."""

    def call(self, rows):
        """Returns the numbers of the largest values."""
        return keras.ops.argmax(rows, axis=-1)


def _picking():
    inputs = keras.Input((IDS,), dtype="int32")
    rows = keras.layers.Embedding(20, 8, embeddings_initializer="normal")(inputs)
    more = keras.layers.Embedding(8, 8)(Picks()(rows))
    return keras.Model(inputs, keras.layers.Dense(1)(rows + more))


def _of_few_rows():
    inputs = keras.Input((IDS,), dtype="int64")
    rows = keras.layers.Embedding(2, 8)(inputs % 2 - 2)  # from the end
    rows += keras.layers.Embedding(20, 8)(inputs)
    rows = keras.layers.Dropout(0.0)(rows)
    mean = keras.layers.GlobalAveragePooling1D()(rows)
    return keras.Model(inputs, keras.layers.Dense(1)(mean))


CASES = {
    "rows choose rows": (_picking, keras.optimizers.Adam, {}),
    "fewer rows than towers": (_of_few_rows, keras.optimizers.Adam, {}),
    "clipnorm": (_of_few_rows, keras.optimizers.Adagrad, {"clipnorm": 0.01}),
    "global_clipnorm": (_of_few_rows, keras.optimizers.Adam, {"global_clipnorm": 0.01}),
    "averages": (
        *(_of_few_rows, keras.optimizers.SGD),
        {"momentum": 0.9, "use_ema": True, "ema_momentum": 0.5},
    ),
    "accumulation": (
        *(_of_few_rows, keras.optimizers.Adam),
        {"gradient_accumulation_steps": 2},
    ),
    "weight decay": (_of_few_rows, keras.optimizers.AdamW, {"weight_decay": 0.1}),
}


def _trained(make, optimizer, options, wrap):
    keras.utils.set_random_seed(5)
    model = make()
    trained = wrap(model)
    trained.compile(optimizer(0.05, **options), "mse", metrics=["mae"])
    ids = np.random.default_rng(2).integers(0, 20, (30, IDS))
    data = tf.data.Dataset.from_tensor_slices((ids, ids[:, 0] % 2)).batch(8)
    averages = [keras.callbacks.SwapEMAWeights()] if "use_ema" in options else []
    found = trained.fit(data, epochs=2, verbose=0, callbacks=averages)
    logs = [*found.history["loss"], *trained.evaluate(data, verbose=0)]
    predicted = trained.predict(data, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(logs), predicted, *(v.numpy() for v in variables)]


def cases(rank, counts, folder, options):
    """Compares with plain Keras, on each host."""
    del folder
    options = dict.fromkeys(filter(None, options.split("+")), True)
    update = "replicated" if options else "parameter_server"
    for name, case in CASES.items():

        def wrap(model):
            return towers.multi_gpu_model(
                model,
                gpus=counts[rank],
                shard_embeddings="rows",
                variable_update=update,
                **options,
            )

        found = _trained(*case, wrap)
        expected = _trained(*case, lambda model: model)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=name)
        print(name, flush=True)
        this_host().tell_all(name)
        keras.backend.clear_session()


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
