"""Runs tests of tf-keras on one of several hosts: a process that a test starts.

    python -m tests.tf_keras_correctness.on_hosts RANK ADDRESSES TOWERS FILE RUNS

ADDRESSES and TOWERS have an entry for each host, with commas between. RUNS is JSON: a
list of [name of a test, builder, arguments]. The first host appends a record of each
run to FILE, others of what fails.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import towers
from tests.tf_keras_correctness import (
    keras_dnn_correctness,
    keras_embedding_model_correctness,
    keras_image_model_correctness,
    keras_rnn_model_correctness,
)
from towers.cluster import process_group
from towers.cluster.membership import Membership
from towers.collectives.hosts import this_host

MODULES = (
    keras_dnn_correctness,
    keras_embedding_model_correctness,
    keras_image_model_correctness,
    keras_rnn_model_correctness,
)


class Towers:
    """So many hosts and towers, in the place of a `tf.distribute.Strategy`.

    Attributes:
        is_first_host: Whether this one compares with one device.
        num_replicas_in_sync: Number of towers of all hosts.
        compared: How many arrays were compared.
        tolerance: The smallest with which `assertAllClose` holds.
    """

    def __init__(self, rank, counts, builder):
        self.is_first_host, self.num_replicas_in_sync = rank == 0, sum(counts)
        self._gpus, self._builder = counts[rank], builder
        self.compared, self.tolerance = 0, 0.0

    def wrap(self, model):
        return towers.multi_gpu_model(
            model, gpus=self._gpus, variable_update=self._builder
        )

    def record(self, ours, theirs):
        ours, theirs = keras.tree.flatten(ours), keras.tree.flatten(theirs)
        self.compared += len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            needed = np.max(np.abs(np.subtract(a, b)) / (1 + np.abs(b)))
            self.tolerance = max(self.tolerance, float(needed))


def main(rank, addresses, counts, file, runs):
    """Makes the runs, one after another, as all other hosts do."""
    rank, addresses = int(rank), tuple(addresses.split(","))
    counts = [*map(int, counts.split(","))]
    towers.configure(num_gpus=max(counts[rank], 2))
    if len(counts) > 1:
        called = tuple(f"host {k}" for k in range(len(addresses)))
        process_group.join(Membership(rank, addresses, called))
    with open(runs) as lines:
        wanted = json.load(lines)
    for name, builder, arguments in wanted:
        distribution = Towers(rank, counts, builder)
        record = {"run": [name, builder, arguments], "hosts": counts}
        try:
            run(name, distribution, arguments)
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"
        record["compared"] = distribution.compared
        record["tolerance"] = distribution.tolerance
        if rank == 0 or "error" in record:
            with open(file, "a") as found:
                found.write(f"{json.dumps(record)}\n")
        print(record, flush=True)
        # Nobody begins the next before all have ended this one.
        this_host().tell_all(name)
        keras.backend.clear_session()


def run(name, distribution, arguments):
    """Runs one test, such as "ClassOfTests.test_something"."""
    class_name, method = name.split(".")
    (tests,) = (
        vars(module)[class_name] for module in MODULES if class_name in vars(module)
    )
    getattr(tests(method), method)(distribution, **arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
