"""Trains with `loss_placement="tower"` on one of several hosts.

    python -m tests.towers.builders.own_rows_on_hosts RANK ADDRESSES TOWERS FILE

The first host writes how far each result is from that of plain Keras, to FILE.
"""

import functools
import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import towers
from tests.exact import oracle
from tests.towers.builders import own_rows
from towers.cluster import process_group
from towers.hosts.group import Membership


def main(rank, addresses, counts, file):
    """Trains on this host's towers, and compares on the first host."""
    rank, addresses = int(rank), tuple(addresses.split(","))
    counts = [*map(int, counts.split(","))]
    towers.configure(num_gpus=2)
    called = tuple(f"host {k}" for k in range(len(addresses)))
    process_group.join(Membership(rank, addresses, called))
    wrap = functools.partial(
        towers.multi_gpu_model, gpus=counts[rank], loss_placement="tower"
    )
    ours = own_rows.on_towers(wrap)
    if rank == 0:
        theirs = own_rows.of_each_tower([1] * sum(counts))
        with open(file, "w") as written:
            json.dump(oracle.differences(ours, theirs), written)


if __name__ == "__main__":
    main(*sys.argv[1:])
