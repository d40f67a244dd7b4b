"""The benchmark of block-sparse language models: one short run."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.limits import HANG_S

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/bench_sparse_text.py"


@pytest.mark.slow
def test_both_models_learn_for_as_long(tmp_path):
    file, plot = tmp_path / "found.json", tmp_path / "plot.png"
    flags = "--width=64 --layers=1 --heads=2 --seconds=3 --slice=1 --held_out=2"
    done = subprocess.run(
        [sys.executable, SCRIPT, *flags.split(), f"--json={file}", f"--plot={plot}"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    dense, sparse = json.loads(file.read_text())["rows"]
    assert dense["parameters"] > sparse["parameters"]
    for row in dense, sparse:
        seconds, bits = zip(*row["curve"], strict=True)
        assert bits[-1] < bits[0]
        assert seconds[-1] >= 3
    assert plot.stat().st_size > 1000
