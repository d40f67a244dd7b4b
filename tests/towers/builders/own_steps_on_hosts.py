"""Models with a `train_step` of their own that hosts cannot go on with, and eager ones.

    python -m tests.towers.builders.own_steps_on_hosts RANK ADDRESSES TOWERS FOLDER

Each host writes to FOLDER what it was told, by what was tried.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import towers
from tests.exact.on_hosts import InRows
from towers.callbacks import Checkpoint
from towers.cluster import process_group
from towers.collectives.joined_hosts import this_host
from towers.hosts.group import Membership

X = np.random.default_rng(0).normal(size=[8, 4]).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Steps(keras.Model):
    """Adds noise to its inputs, of TensorFlow's own state, if told to."""

    noisy = False

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        # The second host begins with the first one's, which is 0.
        self.shift = tf.Variable(float(this_host().index), trainable=False)

    def train_step(self, data):
        """Trains on x and y."""
        x, y = data[:2]
        if self.noisy:
            x += tf.random.normal(tf.shape(x), seed=3)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) + self.shift - y))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class NoisySGD(keras.optimizers.SGD):
    """Adds noise to its gradients, of TensorFlow's own state."""

    def update_step(self, gradient, variable, learning_rate):
        """Updates a variable."""
        noise = tf.random.normal(tf.shape(gradient), seed=3)
        super().update_step(gradient + noise, variable, learning_rate)


def on_towers(noisy=False, eager=False, optimizer="sgd", **options):
    """A compiled model on this host's towers."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input([4])
    model = Steps(inputs, keras.layers.Dense(1)(inputs))
    model.noisy = noisy
    parallel = towers.multi_gpu_model(model, check_numerics=True, **options)
    parallel.compile(optimizer, run_eagerly=eager)
    return parallel


def continued(mine, folder):
    """Weights after two epochs, the second of which begins with a checkpoint."""
    for epochs in (1, 2):
        parallel = on_towers(optimizer="adam", gpus=mine)
        kept = [Checkpoint(os.path.join(folder, "run"))]
        parallel.fit(X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=kept)
    return [weight.tolist() for weight in parallel.get_weights()]


def shared():
    """Batches of which each host is given its own rows."""
    return InRows(tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)).dataset()


def eagerly(mine, noisy):
    """What an eager model makes of two epochs, and of an evaluation."""
    # The second host draws other numbers, and begins with other ones.
    parallel = on_towers(noisy=noisy, eager=True, gpus=mine)
    if this_host().index > 0:
        tf.random.set_seed(7)
        parallel.set_weights([weight + 1 for weight in parallel.get_weights()])
    return numbers_of(parallel, shared())


def eager_on_one_device():
    """The same numbers as `eagerly` finds, of plain Keras."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input([4])
    model = Steps(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", run_eagerly=True)
    return numbers_of(model, tf.data.Dataset.from_tensor_slices((X, Y)).batch(5))


def noisy_losses():
    """The losses of three steps with random numbers, of plain Keras."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input([4])
    model = Steps(inputs, keras.layers.Dense(1)(inputs))
    model.noisy = True
    model.compile("sgd")
    tf.random.set_seed(1)
    return [float(model.train_on_batch(X, Y)) for _ in range(3)]


def numbers_of(model, data):
    """What two epochs make of a model, in one list."""
    losses = [float(model.train_on_batch(X, Y))]
    model.fit(data, epochs=2, verbose=0)
    predicted = model.predict(X, batch_size=5, verbose=0)
    values = [*model.get_weights(), losses, predicted]
    return np.concatenate([np.ravel(each) for each in values]).tolist()


def said(call):
    """What a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(rank, addresses, counts, folder):
    """Tries all."""
    rank, addresses = int(rank), tuple(addresses.split(","))
    mine = int(counts.split(",")[rank])
    towers.configure(num_gpus=2)
    called = tuple(f"host {k}" for k in range(len(addresses)))
    process_group.join(Membership(rank, addresses, called))
    found, bad = {}, X.copy()
    bad[6] = 1e38
    parallel = on_towers(gpus=mine)
    found["gradient"] = said(lambda: parallel.train_on_batch(bad, Y))
    bad[6, 1] = np.inf
    found["data"] = said(lambda: parallel.train_on_batch(bad, Y))
    found["loss"] = float(parallel.train_on_batch(X, Y))
    found["shift"] = float(parallel.__wrapped__.shift)
    noisy = on_towers(noisy=True, gpus=mine)
    tf.random.set_seed(1 + rank)
    found["draws"] = [float(noisy.train_on_batch(X, Y)) for _ in range(3)]
    found["drawn"] = [weight.tolist() for weight in noisy.get_weights()]
    found["noisy optimizers"] = [
        said(lambda p=p: p.train_on_batch(X, Y))
        for p in (
            on_towers(optimizer=NoisySGD(), gpus=mine),
            on_towers(optimizer=NoisySGD(), gpus=mine, variable_update="sharded"),
        )
    ]
    found["continued"] = continued(mine, folder)
    found["eager"], found["noisy"] = (eagerly(mine, noisy) for noisy in (False, True))
    with open(os.path.join(folder, f"found{rank}.json"), "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
