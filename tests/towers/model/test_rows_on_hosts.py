"""Hosts whose data know their rows: what they read, and what comes of it."""

import collections
import json

import pytest

from tests import hosts
from tests.towers.model import on_hosts

pytestmark = pytest.mark.slow
# What ends in an error.
ERRORS = "not finite", "other seeds"


def found(folder, names):
    """Returns what each of two hosts has found, by name."""
    file = folder / "found.jsonl"
    hosts.run("tests.towers.model.on_hosts", (1, 2), ",".join(names), file)
    records = map(json.loads, file.read_text().splitlines())
    return {each["name"]: each["found"] for each in records}


def test_hosts_read_their_rows_and_equal_one_device(tmp_path):
    names = [name for name in on_hosts.DO if name not in ERRORS]
    for name, every in found(tmp_path, names).items():
        assert max(host["apart"] for host in every) < 1e-5, (name, every)
        read = collections.Counter()
        for host in every:
            read.update(host["read"])
        # Two epochs, an evaluation, and for most a prediction.
        passes = 3 if name == "own loss" else 4
        assert read == dict.fromkeys(range(len(on_hosts.X)), passes), name
        # Of 8 rows the first host has 3, of the last 3 one.
        assert len(every[0]["read"]) == passes * (5 * 3 + 1)


def test_errors_are_those_of_all_rows(tmp_path):
    said = found(tmp_path, ERRORS)
    first, second = (host["said"] for host in said["not finite"])
    # The row is one of the second host's.
    assert first == second
    assert "x[7] of the batch is not finite on tower 2 of 3" in first
    for host in said["other seeds"]:
        assert "seed of the data: 0 on host 0 and 1 on host 1" in host["said"]
