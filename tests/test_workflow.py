"""The workflow of the public CI: its file can be read, and calls targets of make."""

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
JOB = WORKFLOW["jobs"]["make"]
WEEKLY, COMMIT = map(
    json.loads, re.findall(r"'(\[.*?\])'", JOB["strategy"]["matrix"]["target"])
)


def test_when_it_runs():
    # YAML 1.1 takes the word "on" for a truth.
    events = WORKFLOW[True]
    assert events.keys() == {"push", "pull_request", "schedule"}
    assert WEEKLY == ["test-newest"]
    assert COMMIT == ["lint", "test", "test-oldest", "try-dist"]


@pytest.mark.parametrize("target", " ".join(COMMIT + WEEKLY).split())
def test_the_makefile_has_what_it_runs(target):
    rules = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.M)
    assert target in " ".join(rules).split()


def test_it_runs_make_and_nothing_else():
    *actions, command = JOB["steps"]
    assert [step["uses"].partition("@")[0] for step in actions] == [
        *("actions/checkout", "actions/setup-python")
    ]
    assert command["run"].startswith("make ${{ matrix.target }} ")
    asked = actions[1]["with"]["python-version"].split()
    assert {*re.findall(r"python([0-9.]+)", command["run"])} == {*asked}
    assert (ROOT / actions[1]["with"]["cache-dependency-path"]).exists()
