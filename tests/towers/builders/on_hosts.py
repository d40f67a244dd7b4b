"""Optimizer state in shards on several hosts: a process that tests start several of.

    python -m tests.towers.builders.on_hosts RANK ADDRESSES TOWERS NAME FOLDER

Does what NAME says, and writes to FOLDER what this host has found.
"""

import json
import os
import sys
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import towers
from towers.cluster import process_group
from towers.hosts.group import Membership
from towers.layers import parameters, sharded
from towers.numerics.errors import NotFiniteStep

ROWS, STEPS, EPOCHS = 10, 4, 3


def model():
    """A model of which most variables are cut, and one is whole."""
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(n, "tanh") for n in (64, 32)]
    last = keras.layers.Dense(3, kernel_constraint="max_norm")
    plain = keras.Sequential([keras.Input((400,)), *layers, last])
    optimizer = keras.optimizers.Adam(
        0.01, epsilon=1e-3, global_clipnorm=0.5, use_ema=True
    )
    plain.compile(optimizer, "mse", metrics=["mae"])
    return plain


def data():
    """The same on all hosts."""
    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS * ROWS - 3, 400)).astype("float32")
    return x, random.normal(size=(len(x), 3)).astype("float32")


def fit(parallel, *callbacks, epochs=EPOCHS):
    """Trains to the end of so many epochs."""
    options = {"batch_size": ROWS, "shuffle": False, "verbose": 0}
    parallel.fit(*data(), epochs=epochs, callbacks=[*callbacks], **options)


def state(plain):
    """All that training changes."""
    return [v.numpy() for v in [*plain.variables, *plain.optimizer.variables]]


class Measure(keras.callbacks.Callback):
    """Adds up the bytes of slots in parts that this host has while it trains."""

    def on_train_batch_end(self, batch, logs=None):
        slots = [sharded.of(v) for v in self.model.optimizer.variables]
        slots = [slot for slot in slots if slot is not None]
        # Those of five variables; a constraint takes the sixth one, whole.
        assert len(slots) == 3 * 5
        shards = [shard for slot in slots for shard in slot.shards]
        self.own = sum(shard.numpy().nbytes for shard in shards)
        self.whole = sum(slot.shape.num_elements() * 4 for slot in slots)


class Dies(keras.callbacks.Callback):
    """An error on the second host, in the middle of the second epoch."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.epoch = rank, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.rank == 1 and (self.epoch, batch) == (1, 3):
            raise RuntimeError("This host dies.")


class Wish(keras.callbacks.Callback):
    """Has the first host alone wish a checkpoint, as SIGUSR1 does."""

    def __init__(self, rank, checkpoint):
        super().__init__()
        self.rank, self.checkpoint = rank, checkpoint

    def on_train_batch_end(self, batch, logs=None):
        if self.rank == 0 and batch == 0:
            self.checkpoint.run._signals.save = True


def trains(rank, parallel, folder):
    """Trains and saves: the first host by itself, then all, as scripts do."""
    measure = Measure()
    fit(parallel, measure)
    if rank == 0:
        parallel.save(os.path.join(folder, "model.keras"))
    np.savez(os.path.join(folder, f"state{rank}.npz"), *state(parallel.__wrapped__))
    return {"own": measure.own, "whole": measure.whole}


def continues(rank, parallel, folder):
    """Trains from the last checkpoint, if there is one."""
    checkpoint = towers.callbacks.Checkpoint(os.path.join(folder, "ckpt"), save_steps=2)
    fit(parallel, checkpoint)
    np.savez(os.path.join(folder, f"again{rank}.npz"), *state(parallel.__wrapped__))


def dies(rank, parallel, folder):
    """The same, until a host has an error; checkpoints come as one host wishes."""
    checkpoint = towers.callbacks.Checkpoint(os.path.join(folder, "ckpt"))
    try:
        fit(parallel, checkpoint, Wish(rank, checkpoint), Dies(rank))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        return {"said": said, "saved": str(checkpoint.latest)}
    return {}


def not_finite(rank, parallel, folder):
    """A step that is not finite changes nothing, wherever its gradients are added."""
    x, y = data()
    parallel.train_on_batch(x[:ROWS], y[:ROWS])
    before = state(parallel.__wrapped__)
    x[ROWS - 1] = np.inf
    try:
        parallel.train_on_batch(x[:ROWS], y[:ROWS])
    except NotFiniteStep as error:
        np.testing.assert_equal(state(parallel.__wrapped__), before)
        return {"said": str(error)}
    return {}


def main(rank, addresses, counts, name, folder):
    """Does it."""
    rank, addresses = int(rank), tuple(addresses.split(","))
    mine = int(counts.split(",")[rank])
    towers.configure(num_gpus=2)
    called = tuple(f"host {k}" for k in range(len(addresses)))
    process_group.join(Membership(rank, addresses, called))
    parallel = towers.multi_gpu_model(
        *(model(), mine),
        variable_update=towers.Replicated(shard_optimizer_state=True),
        check_numerics=name == "not_finite",
    )
    with mock.patch.object(parameters, "MIN_BYTES", 1):
        found = DO[name](rank, parallel, folder)
    with open(os.path.join(folder, f"{name}{rank}.json"), "w") as file:
        json.dump(found, file)


DO = {each.__name__: each for each in (trains, continues, dies, not_finite)}

if __name__ == "__main__":
    main(*sys.argv[1:])
