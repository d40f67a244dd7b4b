"""Hosts whose data know their rows: what they read, and what comes of it."""

import collections
import json

import pytest

from tests import hosts
from tests.towers.model import on_hosts

pytestmark = pytest.mark.slow
# What ends in an error, or has a test of its own.
ERRORS = "not finite", "other seeds"
OTHERS = *ERRORS, "races"


def found(folder, names, counts=(1, 2)):
    """Returns what each of two hosts has found, by name."""
    file = folder / "found.jsonl"
    hosts.run("tests.towers.model.on_hosts", counts, ",".join(names), file)
    records = map(json.loads, file.read_text().splitlines())
    return {each["name"]: each["found"] for each in records}


def test_hosts_read_their_rows_and_equal_one_device(tmp_path):
    names = [name for name in on_hosts.DO if name not in OTHERS]
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


def test_ways_to_update_race_alike_on_all_hosts(tmp_path):
    one, other = found(tmp_path, ["races"], (2, 2))["races"]
    assert one["ways"] == other["ways"] and len({*one["ways"]}) == 2
    assert max(one["apart"], other["apart"]) < 1e-5
    # Ten epochs, an evaluation and a prediction read each row once.
    read = collections.Counter(one["read"]) + collections.Counter(other["read"])
    assert read == dict.fromkeys(range(len(on_hosts.X)), 12)


def test_errors_are_those_of_all_rows(tmp_path):
    said = found(tmp_path, ERRORS)
    first, second = (host["said"] for host in said["not finite"])
    # The row is one of the second host's.
    assert first == second
    assert "x[7] of the batch is not finite on tower 2 of 3" in first
    for host in said["other seeds"]:
        assert "seed of the data: 0 on host 0 and 1 on host 1" in host["said"]
