"""A lost preprocessing.json is made anew from the newest good checkpoint."""

import json

import numpy as np
import pytest

from towers.lifecycle.checkpoints import store
from towers.lifecycle.checkpoints.store import Contents, Position
from towers.train.outputs import recorded

COPY = {"scaling": {"mean": [1.5]}}


@pytest.fixture
def run(tmp_path):
    for epoch, copy in ((1, COPY), (2, None)):
        contents = Contents({"model": [np.ones(2)]}, {"preprocessing": copy})
        store.save(str(tmp_path / "checkpoints"), Position(epoch), contents)
    return tmp_path


@pytest.mark.parametrize("left", [None, "", '{"scaling": {"me', "[1]", "{}"])
def test_it_is_made_anew(run, capsys, left):
    path = run / "preprocessing.json"
    if left is not None:
        path.write_text(left)
    assert recorded.read(str(run), lambda found: found["scaling"]) == COPY["scaling"]
    assert json.loads(path.read_text()) == COPY
    reason = "is lost" if left is None else "is damaged"
    said = capsys.readouterr()
    line = f"{path} {reason}; it is made anew from {run}/checkpoints/ckpt-1-0."
    assert line in said.out + said.err


def test_without_a_copy_the_fault_is_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        recorded.read(str(tmp_path), dict)
