"""Compares docs/start/migrating.md with plain Keras: Horovod, keras.distribution.

Horovod does not build with the TensorFlow that Towers needs. What its processes compute
is done here by hand: each has a shard of the data, and takes gradients of batches of
its own; all apply their average.
"""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.documents import blocks
from tests.limits import HANG_S

PAGE = blocks.read(blocks.ROOT / "docs/start/migrating.md")
PROCESSES, BATCH_SIZE, EPOCHS, LEARNING_RATE = 2, 32, 2, 0.001
# The page's program, with its weights before and after.
STARTS = "start = model.get_weights()\nparallel.fit("
ENDS = """
import os
path = f"weights{os.environ.get('TOWERS_HOST_RANK', '0')}.npz"
np.savez(path, *start, *model.get_weights())
"""


def program():
    """The page's whole program for readers who come from Horovod."""
    (code,) = [block.code for block in PAGE if block.title == "train.py"]
    assert code.count("parallel.fit(") == 1
    return code.replace("parallel.fit(", STARTS) + ENDS


def horovod(start):
    """The weights after training as Horovod's processes do, in plain Keras."""
    x = np.linspace(-1, 1, 256, dtype="float32")[:, None]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.set_weights(start)
    optimizer = keras.optimizers.Adam(LEARNING_RATE * PROCESSES)
    data = tf.data.Dataset.from_tensor_slices((x, 3 * x))
    shards = [
        data.shard(PROCESSES, rank).batch(BATCH_SIZE) for rank in range(PROCESSES)
    ]
    for _ in range(EPOCHS):
        for batches in zip(*shards, strict=True):
            each_process = [gradients(model, *batch) for batch in batches]
            average = [
                tf.add_n(parts) / PROCESSES for parts in zip(*each_process, strict=True)
            ]
            optimizer.apply(average, model.trainable_variables)
    return model.get_weights()


def gradients(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    return tape.gradient(loss, model.trainable_variables)


def read(path):
    """The weights before and after, that the program has saved."""
    with np.load(path) as saved:
        weights = [saved[name] for name in saved.files]
    return weights[:2], weights[2:]


def check(path):
    start, end = read(path)
    assert np.abs(end[0] - start[0]).item() > 1e-3
    for ours, theirs in zip(end, horovod(start), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_horovods_program_in_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    configures = 'towers.configure(hosts="auto")\n'
    assert configures in program()
    exec(program().replace(configures, ""), {})  # the tests have configured the devices
    check(tmp_path / "weights0.npz")


@pytest.mark.slow
def test_horovods_program_on_two_hosts(tmp_path):
    (tmp_path / "train.py").write_text(program())
    command = [sys.executable, "-m", "towers.launch", "--hosts=2", "--num_gpus=1"]
    done = subprocess.run(
        [*command, "--", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(blocks.ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check(tmp_path / "weights0.npz")  # all hosts begin with the first one's
    ends = [read(tmp_path / f"weights{rank}.npz")[1] for rank in range(2)]
    for first, second in zip(*ends, strict=True):
        np.testing.assert_array_equal(first, second)


class Distribution:
    """Has the methods of Keras's distributions, and notes which ones Keras calls."""

    batch_dim_name, auto_shard_dataset = "batch", False

    def __init__(self):
        self.asked = set()

    def get_variable_layout(self, variable):
        self.asked.add("variables")

    def get_data_layout(self, shape):
        self.asked.add("batches")

    def get_tensor_layout(self, path):
        self.asked.add("outputs of layers")

    def distribute_dataset(self, dataset):
        self.asked.add("data sets")
        return dataset


def test_keras_asks_no_distribution_where_variables_and_batches_go():
    """If this fails, Keras distributes on TensorFlow: mend the page."""
    distribution = Distribution()
    keras.distribution.set_distribution(distribution)
    try:
        assert keras.distribution.distribution() is distribution
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        model.fit(np.ones((8, 1)), np.ones((8, 1)), batch_size=4, verbose=0)
    finally:
        keras.distribution.set_distribution(None)
    assert distribution.asked == {"outputs of layers"}


def test_multi_gpu_model_takes_the_names_of_keras():
    devices = keras.distribution.list_devices()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    parallel = towers.multi_gpu_model(model, gpus=devices)
    towers_on = [tower.devices for tower in parallel.builder.plan.towers]
    assert devices == [f"cpu:{index}" for index in range(4)]
    assert towers_on == [(f"/device:CPU:{index}",) for index in range(4)]
