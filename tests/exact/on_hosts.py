"""Runs exact cases on one of several hosts: a process that tests start several of.

    python -m tests.exact.on_hosts RANK ADDRESSES TOWERS BUILDER FILE CASES GIVEN \\
        STAGES MICRO_BATCHES

ADDRESSES and TOWERS have an entry for each host, with commas between. BUILDER may be
"replicated/state", which has optimizer state in shards, or "parameter_server/rows" or
the like, which has embedding tables in shards, or both, as in "replicated/state+rows".
CASES is a file with a name in each line. GIVEN says what hosts are given of a batch:
"whole", its own "rows" only, or one and the other "in turns". Each tower has so many
stages, if the model has as many layers. The first host compares with one device, and
appends a record for each case to FILE.
"""

import dataclasses
import functools
import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

import towers
from tests.exact import oracle, table
from tests.exact.layouts import in_stages, refused
from towers.cluster import process_group
from towers.cluster.membership import Membership
from towers.collectives import batch
from towers.collectives.hosts import this_host
from towers.plan import Share


@dataclasses.dataclass(frozen=True)
class InRows:
    """Data of which each host is given its rows, as `input_pipeline.Pipeline` does."""

    whole: tf.data.Dataset
    share: Share | None = None
    order, makes = {}, {}

    def dataset(self):
        data = self.whole if self.share is None else self.whole.map(self._rows)
        data.pipeline = self
        return data

    def _rows(self, *data):
        total = batch.batch_size(data)
        first, end = self.share.bounds(total)
        x, *others = batch.take(data, first, end)
        x = self.share.of_batch(x, first, total, 1)
        return (x, *others) if others else x


def in_rows(make, batches):
    """Makes data of which each host is given its rows."""
    return InRows(make(batches)).dataset()


def main(rank, addresses, counts, builder, file, names, given, most, micro_batches):
    """Runs the cases, one after another, as all other hosts do."""
    rank, addresses = int(rank), tuple(addresses.split(","))
    counts, most = [*map(int, counts.split(","))], int(most)
    towers.configure(num_gpus=max(counts[rank] * most, 2))
    called = tuple(f"host {k}" for k in range(len(addresses)))
    process_group.join(Membership(rank, addresses, called))
    cases = {str(case): case for case in table.ALL}
    make = oracle.dataset
    with open(names) as lines:
        wanted = [cases[line.strip()] for line in lines]
    for k, case in enumerate(wanted):
        case = dataclasses.replace(case, towers=sum(counts))
        if most > 1:
            case = refused(case)
        rows = given == "rows" or (given == "in turns" and k % 2)
        oracle.dataset = functools.partial(in_rows, make) if rows else make
        options = dict(case.options)
        if ratios := options.get("split_ratios"):
            each = [ratios[k % len(ratios)] for k in range(sum(counts))]
            first = sum(counts[:rank])
            options["split_ratios"] = each[first : first + counts[rank]]

        way, _, shards = builder.partition("/")
        options["variable_update"] = way
        for each in filter(None, shards.split("+")):
            if each == "state":
                options["shard_optimizer_state"] = True
            else:
                options["shard_embeddings"] = each

        def wrap(model, case=case, options=options):
            options = in_stages(case, model, most) | options
            return towers.multi_gpu_model(
                model,
                gpus=counts[rank] * options.get("stages", 1),
                micro_batches=int(micro_batches),
                **options,
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
