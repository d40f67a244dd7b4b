"""What each of several hosts does in turn: a process that tests start several of.

    python -m tests.towers.cluster.on_hosts RANK ADDRESSES NAMES
    mpirun -n 2 python -m tests.towers.cluster.on_hosts mpi mpi NAMES

Prints a line of JSON for each name: what was found, or the error.
"""

import functools
import json
import os
import re
import signal
import sys
import warnings
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import towers
from towers.cluster import process_group
from towers.collectives import reduce
from towers.collectives.joined_hosts import this_host
from towers.hosts import group
from towers.hosts.group import HostFailedError, Membership
from towers.program.ending import ANOTHER_FAILED

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(40, 3)).astype("float32"), rng.normal(size=(40, 1))


def model(optimizer="adam", way=None, **options):
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    parallel = towers.multi_gpu_model(plain, gpus=1, **way or {})
    parallel.compile(optimizer, "mse", metrics=["mae"], **options)
    return parallel


def found(parallel):
    """What all hosts must have alike."""
    sums = [float(np.abs(each).sum()) for each in parallel.get_weights()]
    return [int(parallel.optimizer.iterations), *sums]


class At(keras.callbacks.Callback):
    """Does something when a batch has ended."""

    def __init__(self, batch, do):
        super().__init__()
        self.batch, self.do = batch, do

    def on_train_batch_end(self, batch, logs=None):
        if batch >= self.batch:
            self.do(self.model)


def stops(rank, **options):
    """The second host stops after the fourth batch."""
    parallel = model(**options)

    def stop(model):
        model.stop_training = True

    callbacks = [At(3, stop)] if rank == 1 else []
    with warnings.catch_warnings():
        # That the data have ended is not so.
        warnings.simplefilter("error", UserWarning)
        parallel.fit(
            *(X, Y),
            batch_size=4,
            epochs=3,
            shuffle=False,
            callbacks=callbacks,
            verbose=0,
        )
    return found(parallel)


def stops_early(rank):
    """What it waits for is another number on each host, but for what all know."""
    parallel = model()
    callback = keras.callbacks.EarlyStopping("loss", min_delta=9.0 * (1 - rank))
    parallel.fit(X, Y, batch_size=8, epochs=4, callbacks=[callback], verbose=0)
    return found(parallel)


def trains_twice(rank):
    """Nobody has set a seed: data are shuffled, and weights begin, as on the first."""
    parallel = model()
    parallel.fit(X, Y, batch_size=8, verbose=0)
    first = found(parallel)
    parallel.compile(keras.optimizers.SGD(0.1), "mse")
    parallel.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    return [*first, *found(parallel)]


def fits(rank, size=None, factor=1.0, epochs=1, **compiled):
    parallel = model(**compiled)
    parallel.fit(
        *(factor * X, Y), batch_size=size or 8, epochs=epochs, shuffle=False, verbose=0
    )


def evaluates(rank, rows=40, batch_size=8, factor=1.0):
    """The first host's variables count, whoever has changed its own."""
    parallel = model()
    for variable in parallel.weights:
        variable.assign_add(tf.fill(variable.shape, float(rank)))
    values = parallel.evaluate(
        factor * X[:rows], Y[:rows], batch_size=batch_size, verbose=0
    )
    plain = keras.models.clone_model(parallel.__wrapped__)
    plain.set_weights(parallel.get_weights())
    plain.compile(loss="mse", metrics=["mae"])
    np.testing.assert_allclose(values, plain.evaluate(X, Y, verbose=0), rtol=1e-5)
    return [*map(float, values)]


def two_models(rank):
    """Each on another device, with gradients of one size."""
    losses = []
    with mock.patch.object(reduce, "nccl_fits", lambda towers: True):
        for device in (0, 1):
            plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            parallel = towers.multi_gpu_model(
                plain, gpus=[device], variable_update=towers.Replicated("nccl")
            )
            parallel.compile("adam", "mse")
            history = parallel.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
            losses += history.history["loss"]
    return losses


def gradients(rank, all_reduce):
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with mock.patch.object(reduce, "nccl_fits", lambda towers: True):
        towers.GradientTowers(
            lambda x: tf.reduce_mean(plain(x)),
            plain.trainable_variables,
            gpus=1,
            variable_update="replicated",
            all_reduce_alg=all_reduce,
        )


class Meets(keras.callbacks.Callback):
    """A user's callback meets other hosts."""

    def on_epoch_end(self, epoch, logs=None):
        this_host().broadcast_value(epoch)


def generates(rank, count, method="fit", **options):
    """Nobody knows how many batches there are."""
    data = tf.data.Dataset.from_generator(
        lambda: ((X[:8], Y[:8]) for _ in range(count)),
        output_signature=(tf.TensorSpec([8, 3]), tf.TensorSpec([8, 1])),
    )
    getattr(model(), method)(data, verbose=0, **options)


def predicts(rank, rows=40, factor=1.0):
    parallel = model()
    outputs = parallel.predict(factor * X[:rows], batch_size=16, verbose=0)
    expected = keras.ops.convert_to_numpy(parallel.__wrapped__(X))
    np.testing.assert_allclose(outputs, expected, rtol=1e-5)
    return float(np.abs(outputs).sum())


def sums_in_memory(rank, all_reduce):
    """The number of elements of the largest sum in the memory of hosts.

    And the bytes of gradients that the host's report has.
    """
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(501)])
    with mock.patch.object(reduce, "nccl_fits", lambda towers: True):
        way = towers.Replicated(all_reduce)
        parallel = towers.multi_gpu_model(plain, gpus=1 + rank, variable_update=way)
    parallel.compile("adam", "mse")
    before = {*this_host().communicator.collectives}
    parallel.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    sums = {*this_host().communicator.collectives} - before
    sizes = [re.search(r"\((\d+) ", purpose) for purpose in sums]
    largest = max(int(size[1]) for size in sizes if size)
    return [largest, parallel.builder.context.timers.hosts.bytes]


def of_batches(rank, factor=1.0):
    parallel = model()
    for variable in parallel.weights:
        variable.assign_add(tf.fill(variable.shape, float(rank)))
    values = [*map(float, parallel.test_on_batch(X[:5], Y[:5]))]
    values.append(float(np.sum(parallel.predict_on_batch(X[:7]))))
    values += map(float, parallel.train_on_batch(factor * X[:3], Y[:3]))
    return values + found(parallel)


def raises(where):
    def do(rank):
        """The second host has an error, which the first one is told."""

        def fail(*_):
            raise RuntimeError(f"an error in {where}")

        class Data(keras.utils.PyDataset):
            def __len__(self):
                return 5

            def __getitem__(self, k):
                if rank == 1 and where == "data" and k == 3:
                    fail()
                return X[:8], Y[:8]

        def loss(targets, outputs):
            if rank == 1 and where == "loss":
                fail()
            return keras.losses.mean_squared_error(targets, outputs)

        parallel = model()
        parallel.compile("adam", loss)
        callbacks = [At(2, fail)] if rank == 1 and where == "callback" else []
        parallel.fit(Data(), epochs=3, callbacks=callbacks, verbose=0)

    return do


def harmed(kind, victim, where):
    number = getattr(signal, kind)

    def do(rank):
        """A host is harmed in the middle of something."""

        def harm(*_, **__):
            if rank == victim:
                os.kill(os.getpid(), number)

        class Traced(keras.layers.Layer):
            def call(self, x):
                if where == "tracing" and not isinstance(x, keras.KerasTensor):
                    harm()
                return x

        plain = keras.Sequential(
            [keras.Input((3,)), Traced(), keras.layers.Dense(1)],
        )
        parallel = towers.multi_gpu_model(plain, gpus=1)
        parallel.compile("adam", "mse")
        at = {
            "training": "on_train_batch_end",
            "validation": "on_test_batch_end",
            "predict": "on_predict_batch_end",
        }
        callback = keras.callbacks.LambdaCallback()
        if where in at:
            setattr(callback, at[where], harm)
        if where == "predict":
            parallel.predict(X, batch_size=4, callbacks=[callback], verbose=0)
        else:
            parallel.fit(
                *(X, Y),
                batch_size=4,
                epochs=1000,
                validation_data=(X, Y),
                callbacks=[callback],
                verbose=0,
            )

    return do


def differ(function, name, first, second):
    """Each host calls a function with another value of an argument."""
    return lambda rank: function(rank, **{name: [first, second][rank]})


DO = {
    "stops": stops,
    "stops, 3 steps": lambda rank: stops(rank, steps_per_execution=3),
    "stops, eager": lambda rank: stops(rank, run_eagerly=True),
    "stops early": stops_early,
    "trains twice": trains_twice,
    "evaluates": evaluates,
    "predicts": predicts,
    "of batches": of_batches,
    "two models": two_models,
    "other all-reduce": differ(gradients, "all_reduce", "cpu", "nccl"),
    "in memory": lambda rank: sums_in_memory(rank, "cpu"),
    "on devices": lambda rank: sums_in_memory(rank, "nccl"),
    "other epochs": differ(fits, "epochs", 2, 3),
    "other optimizer": differ(fits, "optimizer", "sgd", "adam"),
    "other way": differ(fits, "way", {}, {"gradient_compression": "fp16"}),
    "other batches": differ(fits, "size", 8, 10),
    "other examples": differ(fits, "factor", 1.0, 2.0),
    "other rows to evaluate": differ(evaluates, "rows", 40, 33),
    "fewer generated batches": differ(generates, "count", 4, 3),
    "fewer generated batches than others": differ(generates, "count", 3, 4),
    "fewer generated batches, with validation": differ(
        functools.partial(generates, validation_data=(X, Y)), "count", 4, 3
    ),
    "fewer generated batches, with a callback": differ(
        functools.partial(generates, callbacks=[Meets()]), "count", 3, 4
    ),
    "fewer generated batches to evaluate": differ(
        functools.partial(generates, method="evaluate"), "count", 4, 3
    ),
    "fewer generated batches to predict": differ(
        functools.partial(generates, method="predict"), "count", 3, 4
    ),
    "fewer batches to evaluate": differ(evaluates, "rows", 40, 32),
    "other examples to evaluate": differ(evaluates, "factor", 1.0, 2.0),
    "other arguments to evaluate": differ(evaluates, "batch_size", 8, 10),
    "fewer batches to predict": differ(predicts, "rows", 32, 40),
    "other examples to predict": differ(predicts, "factor", 1.0, 2.0),
    "other examples in a batch": differ(of_batches, "factor", 1.0, 2.0),
    "evaluates or predicts": lambda rank: [evaluates, predicts][rank](rank),
    **{f"raises in {each}": raises(each) for each in ("callback", "data", "loss")},
    **{
        f"{kind} {victim} {where}": harmed(kind, victim, where)
        for kind in ("SIGKILL", "SIGSTOP")
        for victim in range(2)
        for where in ("training", "tracing", "validation", "predict")
    },
}


def main(rank, addresses, *names):
    """Does what the names say."""
    said_by = {}
    if rank == "mpi":
        towers.configure(num_gpus=1, hosts="auto")
        rank = group.joined().rank
        # mpirun writes the lines of all as they come.
        said_by = {"rank": rank}
    else:
        rank, addresses = int(rank), tuple(addresses.split(","))
        towers.configure(num_gpus=2)
        called = tuple(f"host {k}" for k in range(len(addresses)))
        process_group.join(Membership(rank, addresses, called))
    for name in names:
        code = 0
        try:
            record = {"found": DO[name](rank)}
        except Exception as error:
            record = {"error": type(error).__name__, "said": str(error)}
            code = ANOTHER_FAILED if isinstance(error, HostFailedError) else 1
        print(json.dumps({"name": name, **said_by, **record}), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
