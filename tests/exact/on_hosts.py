"""Runs exact cases on one of several hosts: a process that tests start several of.

    python -m tests.exact.on_hosts RANK ADDRESSES TOWERS BUILDER FILE CASES

ADDRESSES and TOWERS have an entry for each host, with commas between. CASES is a file
with a name in each line. The first host compares with one device, and appends a record
for each case to FILE.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras

import towers
from tests.exact import oracle, table
from towers.cluster import server
from towers.cluster.membership import Membership
from towers.collectives.hosts import this_host


def main(rank, addresses, counts, builder, file, names):
    """Runs the cases, one after another, as all other hosts do."""
    rank, addresses = int(rank), tuple(addresses.split(","))
    counts = [*map(int, counts.split(","))]
    towers.configure(num_gpus=max(counts[rank], 2))
    called = tuple(f"host {k}" for k in range(len(addresses)))
    server.join(Membership(rank, addresses, called))
    cases = {str(case): case for case in table.ALL}
    with open(names) as lines:
        wanted = [cases[line.strip()] for line in lines]
    for case in wanted:
        options = dict(case.options)
        if ratios := options.get("split_ratios"):
            each = [ratios[k % len(ratios)] for k in range(sum(counts))]
            first = sum(counts[:rank])
            options["split_ratios"] = each[first : first + counts[rank]]

        def wrap(model, options=options):
            return towers.multi_gpu_model(
                model, gpus=counts[rank], variable_update=builder, **options
            )

        if rank == 0:
            record = {"builder": builder, "hosts": counts}
            record |= oracle.outcome(case, wrap)
            record["expected"] = case.verdict
            with open(file, "a") as found:
                found.write(f"{json.dumps(record)}\n")
            verdict = record["verdict"]
        else:
            verdict = "equal"
            try:
                oracle.run(case, wrap)
            except Exception as error:
                verdict = f"raises: {type(error).__name__}: {error}"
        print(case, verdict[:300], flush=True)
        # Nobody begins the next before all have ended this one.
        this_host().tell_all(str(case))
        keras.backend.clear_session()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    # TensorFlow's server would take seconds to end.
    os._exit(0)
