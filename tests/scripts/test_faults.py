"""The faults that users can bring about themselves; a few of them, to see they work."""

import subprocess
import sys

import pytest

from input_pipeline import open_source, quarantine
from scripts.faults import records, run


@pytest.mark.slow
def test_killed_once():
    done = subprocess.run(
        [sys.executable, "-m", "scripts.faults.kill", "--kills=1"],
        cwd=run.ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "1 kills in 1 runs: 0 restarts failed," in done.stdout
    assert "1 of 1 ended with the bits and the history" in done.stdout


@pytest.mark.parametrize("kind", records.KINDS)
def test_a_bad_record_is_one(kind, tmp_path):
    make, where = records.KINDS[kind]
    spec, path = make(tmp_path / "data")
    options = {} if spec.startswith("folder:") else {"num_classes": 3}
    source = open_source(spec, skip_bad=True, **options)
    (bad,) = quarantine.inspect(source, ["train"], 1).bad["train"]
    assert f"{path}{where}" in str(bad)
