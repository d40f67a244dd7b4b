"""What each of several hosts does with data that know their rows, and plain Keras.

    python -m tests.towers.model.on_hosts RANK ADDRESSES TOWERS NAMES FILE

The first host appends a line of JSON for each name to FILE: what was found.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import towers
from towers.cluster import process_group
from towers.collectives.joined_hosts import this_host
from towers.hosts.group import Membership
from towers.input_pipeline import ArraySource
from towers.input_pipeline.pipeline import Pipeline
from towers.model import auto

rng = np.random.default_rng(0)
X = rng.normal(size=(43, 4)).astype("float32")
Y = rng.integers(0, 3, 43)


class OwnLoss(keras.Model):
    """Its loss looks at the inputs, and so is computed on gathered outputs."""

    def __init__(self):
        super().__init__()
        self.logits = keras.layers.Dense(3)

    def call(self, x):
        return self.logits(x)

    def compute_loss(self, x=None, y=None, y_pred=None, *_, **__):
        apart = tf.reduce_mean(x) * tf.reduce_mean(y_pred)
        return apart + tf.reduce_mean(tf.square(tf.one_hot(y, 3) - y_pred))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return found | {"mean of x": tf.reduce_mean(x), "y": tf.reduce_max(y)}


def plain_model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


def doubled(x, y, training):
    return x * 2, y


def run(
    make=plain_model,
    preprocess=None,
    epochs=2,
    deterministic=False,
    callbacks=(),
    seed=1,
    x=X,
    metrics=("accuracy",),
    fit=None,
    check_numerics=False,
    variable_update="parameter_server",
    **options,
):
    """Trains and evaluates on hosts, and on one device; returns the largest difference.

    Also the records that this host has read, by the arrays' own numbers.
    """
    read = []

    class Noted(ArraySource):
        def parse(self, records):
            tf.numpy_function(lambda some: read.extend(some.tolist()), [records], [])
            return super().parse(records)

    def data(source, deterministic):
        pipeline = Pipeline(
            source, "train", batch_size=8, seed=seed, deterministic=deterministic
        )
        return pipeline.dataset()

    def train(wrap, data, changed):
        keras.utils.set_random_seed(3)
        trained = wrap(make())
        trained.compile("adam", LOSS, metrics=[*metrics], **options)
        if changed is not None:
            data = data.map(lambda x, y: (*changed(x, y, True),))
        given = {"epochs": epochs, "verbose": 0, **(fit or {})}
        history = trained.fit(data, callbacks=[*callbacks], **given).history
        values = trained.evaluate(data, verbose=0)
        if make is not OwnLoss:
            values.append(np.abs(trained.predict(data, verbose=0)).sum())
        logs = [*history.values()]
        return [*np.ravel(logs), *np.ravel(values), *map(np.sum, trained.get_weights())]

    ours = train(
        lambda model: towers.multi_gpu_model(
            model,
            gpus=COUNTS[RANK],
            preprocess=preprocess,
            check_numerics=check_numerics,
            variable_update=variable_update,
        ),
        data(Noted(x, Y), deterministic),
        None,
    )
    theirs = train(lambda model: model, data(ArraySource(x, Y), True), preprocess)
    scale = np.maximum(np.abs(theirs), 1e-2)
    apart = np.max(np.abs(np.subtract(ours, theirs)) / scale)
    return {"apart": float(apart), "read": sorted(read)}


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def not_finite():
    """What towers make of the last row of the first batch is not finite."""
    order = Pipeline(ArraySource(X, Y), "train", batch_size=8, seed=1).dataset()
    ((first, _),) = order.take(1)
    large = np.where((X == first[-1].numpy()).all(axis=1)[:, None], 3e38, X)
    return run(x=large.astype("float32"), preprocess=doubled, check_numerics=True)


def races():
    """Ways to update variables make calls in turn, on all hosts alike."""
    for name in ("BUDGET_S", "OF_SHORT_RUN"):
        setattr(auto, name, 1e9)
    auto._ROUND_S = 0.0
    ways = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hasattr(self.model, "builder"):
                ways.append(self.model.builder.name)

    options = {"variable_update": "auto", "jit_compile": False}
    return run(epochs=10, callbacks=[Notes()], **options) | {"ways": ways}


class Unread(keras.layers.Layer):
    """What it does cannot be read from its graph, so rows are compared."""

    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(np.tanh, [x], x.dtype), x.shape)


def unread_model():
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(3)(Unread()(inputs)))


DO = {
    "trains": run,
    "deterministic": lambda: run(deterministic=True),
    "3 steps": lambda: run(steps_per_execution=3),
    "eagerly": lambda: run(run_eagerly=True),
    "class weights": lambda: run(fit={"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}}),
    "preprocess": lambda: run(preprocess=doubled),
    "own loss": lambda: run(OwnLoss, metrics=()),
    "compared rows": lambda: run(unread_model),
    "not finite": not_finite,
    "races": races,
    "other seeds": lambda: run(seed=RANK),
}


def main(rank, addresses, counts, names, file):
    """Does what the names say."""
    global RANK, COUNTS
    RANK, COUNTS = int(rank), [*map(int, counts.split(","))]
    addresses = tuple(addresses.split(","))
    towers.configure(num_gpus=max(COUNTS[RANK], 2))
    called = tuple(f"host {k}" for k in range(len(addresses)))
    process_group.join(Membership(RANK, addresses, called))
    for name in names.split(","):
        try:
            found = DO[name]()
        except Exception as error:
            found = {"said": f"{type(error).__name__}: {error}"}
        found = this_host().exchange(found)
        if RANK == 0:
            with open(file, "a") as lines:
                lines.write(f"{json.dumps({'name': name, 'found': found})}\n")
        keras.backend.clear_session()


if __name__ == "__main__":
    main(*sys.argv[1:])
