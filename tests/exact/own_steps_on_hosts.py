"""Runs models with a `train_step` of their own on one of several hosts.

    python -m tests.exact.own_steps_on_hosts RANK ADDRESSES TOWERS \\
        NAMES GIVEN UPDATE FILE

ADDRESSES, TOWERS and NAMES have commas between. Hosts are GIVEN "whole" batches or
their own "rows". UPDATE is the way to update variables. The first host compares with
one device, and writes the largest difference of each example of `examples/steps/`, and
where it is, to FILE.
"""

import functools
import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import towers
from tests.exact import on_hosts, oracle, test_own_steps
from towers.cluster import process_group
from towers.cluster.membership import Membership
from towers.collectives.hosts import this_host


def main(rank, addresses, counts, names, given, update, file):
    """Runs the examples, one after another, as all other hosts do."""
    rank, addresses = int(rank), tuple(addresses.split(","))
    counts, found = [*map(int, counts.split(","))], {}
    towers.configure(num_gpus=max(counts[rank], 2))
    called = tuple(f"host {k}" for k in range(len(addresses)))
    process_group.join(Membership(rank, addresses, called))
    plain = oracle.dataset
    for name in names.split(","):
        if given == "rows":
            oracle.dataset = functools.partial(on_hosts.in_rows, plain)
        options = {"gpus": counts[rank], "variable_update": update}
        wrap = functools.partial(towers.multi_gpu_model, **options)
        try:
            ours = test_own_steps.run(name, wrap)
        except Exception as error:
            ours = f"{type(error).__name__}: {error}"
        oracle.dataset = plain
        this_host().tell_all(name)
        if isinstance(ours, str):
            found[name] = ours
        elif rank == 0:
            found[name] = test_own_steps.apart(ours, test_own_steps.one_device(name))
        print(name, found.get(name), flush=True)
    if rank == 0:
        with open(file, "w") as written:
            json.dump(found, written)


if __name__ == "__main__":
    main(*sys.argv[1:])
