"""Trains one embedding table that is divided over the devices of the towers.

Prints a line for each optimizer: the median time of a step, the bytes of variables and
slots on each device, and what the step itself needed of the host's memory at most. Each
optimizer has a process of its own.

    python scripts/bench_tables.py --rows=20000000 --optimizers=SGD,Adagrad
    python scripts/bench_tables.py --rows=2000000 --optimizers=Adam --tables=columns
"""

import resource
import statistics
import subprocess
import sys
import time

from absl import app, flags

FLAGS = flags.FLAGS

flags.DEFINE_integer("rows", 20_000_000, "Rows of the table.", lower_bound=1)
flags.DEFINE_integer("width", 32, "Numbers in a row.", lower_bound=1)
flags.DEFINE_integer("towers", 2, "Towers.", lower_bound=1)
flags.DEFINE_integer("batch_size", 512, "Examples in a batch.", lower_bound=1)
flags.DEFINE_integer("ids", 20, "Ids of an example.", lower_bound=1)
flags.DEFINE_integer("steps", 20, "Timed steps.", lower_bound=1)
flags.DEFINE_list("optimizers", ["SGD", "Adagrad"], "Names of Keras's optimizers.")
flags.DEFINE_enum("tables", "rows", ["none", "auto", "rows", "columns"], "How.")
flags.DEFINE_bool("here", False, "Trains in this process, by the first optimizer.")


def main(_):
    """Starts a process for each optimizer."""
    if FLAGS.here:
        train(FLAGS.optimizers[0])
        return
    given = [flag for flag in sys.argv[1:] if not flag.startswith("--optimizers")]
    for name in FLAGS.optimizers:
        command = [sys.executable, __file__, *given, f"--optimizers={name}", "--here"]
        subprocess.run(command, check=True)


def train(name: str) -> None:
    """Trains, and prints what it took."""
    import keras
    import numpy as np
    import tensorflow as tf

    from towers import devices, multi_gpu_model
    from towers.layers import tables

    placed = devices.configure(FLAGS.towers)
    random = np.random.default_rng(0)
    batches = [
        (
            random.integers(0, FLAGS.rows, (FLAGS.batch_size, FLAGS.ids), "int32"),
            random.standard_normal((FLAGS.batch_size, 1), "float32"),
        )
        for _ in range(8)
    ]
    data = tf.data.Dataset.from_tensor_slices(
        tuple(map(np.stack, zip(*batches, strict=True)))
    ).repeat()
    with tf.device(devices.HOST):
        inputs = keras.Input((FLAGS.ids,), dtype="int32")
        rows = keras.layers.Embedding(FLAGS.rows, FLAGS.width)(inputs)
        mean = keras.layers.GlobalAveragePooling1D()(rows)
        model = keras.Model(inputs, keras.layers.Dense(1)(mean))
        parallel = multi_gpu_model(model, placed.towers, shard_embeddings=FLAGS.tables)
        parallel.compile(getattr(keras.optimizers, name)(0.01), "mse")
    seconds = []

    class Times(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.begun = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            seconds.append(time.perf_counter() - self.begun)

    # The first step creates the slots.
    parallel.fit(data, steps_per_epoch=3, verbose=0)
    before_mb = _peak_mb()
    parallel.fit(data, steps_per_epoch=FLAGS.steps, verbose=0, callbacks=[Times()])
    held = tables.bytes_by_device(model, parallel.builder.copies())
    each = ", ".join(f"{device} {n / 2**20:,.1f} MB" for device, n in held.items())
    print(
        f"{name}, {FLAGS.rows:,} x {FLAGS.width}, {FLAGS.tables}: "
        f"{1000 * statistics.median(seconds):.1f} ms a step; {each}; host at most "
        f"{_peak_mb():,.0f} MB, {before_mb:,.0f} MB before the timed steps",
        flush=True,
    )


def _peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    app.run(main)
