"""The benchmark of the local store runs, and reads an object store."""

import re
import subprocess
import sys

import pytest

from tests import object_store
from tests.limits import HANG_S


@pytest.mark.slow
@pytest.mark.skipif(not object_store.is_possible(), reason="no openssl")
@pytest.mark.parametrize("kind", ["folder", "tfrecord"])
def test_says_what_each_way_waits(kind):
    command = [sys.executable, "-m", "scripts.bench_store", f"--kind={kind}"]
    command += ["--examples=64", "--pixels=64", "--batch_size=16", "--rounds=1"]
    command += ["--step_ms=20", "--naive_steps=2", "--latency_ms=2"]
    done = subprocess.run(
        command,
        cwd=object_store.ROOT,
        stdout=subprocess.PIPE,
        timeout=HANG_S,
        check=True,
        text=True,
    )
    waits = re.findall(
        r"^  (.*?) +waits +([\d.]+)%.*reads +([\d.]+) MB", done.stdout, re.M
    )
    read = {what: float(size) for what, _, size in waits}
    assert len(read) == 8
    assert read["naive staging, 2 steps"] > 0
    assert read["store, epoch 3"] == 0
