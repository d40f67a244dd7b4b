"""Runs exact cases on one of several hosts: a process that tests start several of.

    python -m tests.exact.on_hosts RANK ADDRESSES TOWERS LAYOUT CASES FILE
    mpirun -n 2 python -m tests.exact.on_hosts mpi mpi TOWERS LAYOUT CASES FILE

ADDRESSES and TOWERS have an entry for each host, with commas between. LAYOUT has the
fields of a `Layout` as JSON. CASES is a file with a name in each line. By its name, a
case has batches that each host is given as a whole, or its own rows of. The first host
compares with one device, and appends a record for each case to FILE.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

import towers
from tests.exact import oracle, table
from tests.exact.layouts import Layout
from tests.variants import number_of
from towers.cluster import process_group
from towers.collectives import batch
from towers.collectives.joined_hosts import this_host
from towers.hosts import group
from towers.hosts.group import Membership
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


@contextlib.contextmanager
def given_rows() -> Iterator[None]:
    """Inside, each host is given its own rows of the batches of cases."""
    whole = oracle.dataset
    with mock.patch.object(oracle, "dataset", lambda b: InRows(whole(b)).dataset()):
        yield


def is_given_rows(name: str) -> bool:
    """Tells whether hosts are given their own rows of a case's batches."""
    return number_of(name) // 2 % 2 == 1


def run(layout: Layout, rank: int, names: Sequence[str], file: str) -> None:
    """Runs the cases, one after another, as all other hosts do."""
    cases = {str(case): case for case in table.ALL}
    for name in names:
        data = given_rows() if is_given_rows(name) else contextlib.nullcontext()
        case = layout.of(cases[name])
        if rank == 0:
            with data:
                record = layout.outcome(cases[name])
            with open(file, "a") as records:
                records.write(f"{json.dumps(record)}\n")
            verdict = record["verdict"]
        else:
            verdict = "equal"
            try:
                with data, layout.allowed():
                    oracle.run(
                        case,
                        layout.wrap(case, rank),
                        compiled_first=layout.compiled_first,
                    )
            except Exception as error:
                verdict = f"raises: {type(error).__name__}: {error}"
        print(name, verdict[:300], flush=True)
        # Nobody begins the next before all have ended this one.
        this_host().exchange(name)


def main(rank, addresses, counts, layout, names, file):
    """Joins the other hosts, and runs the cases."""
    counts = tuple(map(int, counts.split(",")))
    if rank == "mpi":
        rank = group.join_as_started("auto").rank
    else:
        rank, addresses = int(rank), tuple(addresses.split(","))
    fields = json.loads(layout)
    pairs = tuple(map(tuple, fields.pop("options")))
    layout = Layout(towers=counts, options=pairs, **fields)
    towers.configure(num_gpus=max(counts[rank] * layout.stages, 2))
    if group.joined() is None:
        called = tuple(f"host {k}" for k in range(len(addresses)))
        process_group.join(Membership(rank, addresses, called))
    with open(names) as lines:
        run(layout, rank, lines.read().splitlines(), file)


if __name__ == "__main__":
    main(*sys.argv[1:])
