"""Trains on one of two hosts with RigL and PruneBlocks.

    python -m tests.towers.sparse.on_hosts RANK ADDRESSES TOWERS UPDATE FOLDER

Writes the weights to FOLDER.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import towers
from tests.towers.sparse import networks
from towers.cluster import process_group
from towers.hosts.group import Membership


def made(kind):
    """The callback, of data that another host need not have."""
    if kind == "prune":
        return towers.PruneBlocks(lambda step: min(0.8, 0.5 + 0.05 * step), every=2)
    return towers.RigL(networks.batch(seed=5), every=3, until=12, drop=0.9)


def train(kind, wrap, path):
    """Trains, and writes the weights."""
    keras.backend.clear_session()  # hosts give a model one name
    model = networks.sparse()
    ours = wrap(model)
    ours.compile(keras.optimizers.Adam(0.01), "mse")
    x, y = networks.batch()
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    ours.fit(x, y, epochs=4, callbacks=[made(kind)], **options)
    weights = {f"{k:03}": each for k, each in enumerate(model.get_weights())}
    np.savez(path, **weights)


def main(rank, addresses, counts, update, folder):
    """Trains with each callback."""
    rank, addresses = int(rank), tuple(addresses.split(","))
    counts = [*map(int, counts.split(","))]
    towers.configure(num_gpus=max(counts[rank], 2))
    called = tuple(f"host {k}" for k in range(len(addresses)))
    process_group.join(Membership(rank, addresses, called))

    def wrap(model):
        return towers.multi_gpu_model(model, gpus=counts[rank], variable_update=update)

    for kind in ("rigl", "prune"):
        train(kind, wrap, f"{folder}/{kind}-{rank}.npz")


if __name__ == "__main__":
    main(*sys.argv[1:])
