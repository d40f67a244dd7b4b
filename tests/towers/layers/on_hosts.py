"""What each of several hosts does with tables that it divides among its towers.

    python -m tests.towers.layers.on_hosts RANK ADDRESSES TOWERS FOLDER WAYS

The hosts train for an epoch in each way to divide tables, each time from the checkpoint
before, in FOLDER/run. The first host then saves the model in FOLDER/hosts.keras.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import towers
from tests.towers.layers import test_tables
from towers.callbacks import Checkpoint
from towers.cluster import process_group
from towers.cluster.membership import Membership
from towers.layers import sharded


def main(rank, addresses, counts, folder, ways):
    """Trains as all hosts do."""
    rank, counts = int(rank), [*map(int, counts.split(","))]
    addresses = tuple(addresses.split(","))
    towers.configure(num_gpus=max(counts[rank], 2))
    called = tuple(f"host {k}" for k in range(len(addresses)))
    process_group.join(Membership(rank, addresses, called))
    for epoch, way in enumerate(ways.split(","), start=1):
        model = test_tables.saved_model()
        parallel = towers.multi_gpu_model(
            model, gpus=counts[rank], shard_embeddings=way
        )
        test_tables.fit(parallel, epoch, Checkpoint(os.path.join(folder, "run")))
        assert len(sharded.of(model.trainable_variables[0]).shards) == counts[rank]
    if rank == 0:
        model.save(os.path.join(folder, "hosts.keras"))


if __name__ == "__main__":
    main(*sys.argv[1:])
