"""A lost preprocessing.json is read from the newest checkpoint that has a copy."""

import os
import types

import numpy as np
import pytest

from towers.lifecycle.checkpoints import store
from towers.lifecycle.checkpoints.store import Contents, Position
from towers.lifecycle.continuing.resume import ResumeError
from towers.train import continued
from towers.train.outputs import preprocessing
from towers.train.parts.task import TASKS

COPY = {"scaling": {"mean": [1.5]}}


@pytest.fixture
def run(tmp_path):
    for epoch, copy in ((1, COPY), (2, None)):
        contents = Contents({"model": [np.ones(2)]}, {"preprocessing": copy})
        store.save(str(tmp_path / "checkpoints"), Position(epoch), contents)
    return tmp_path


@pytest.mark.parametrize("left", [None, "", '{"scaling": {"me', "[1]", "{}"])
def test_a_copy_is_read_and_nothing_is_written(run, capsys, left):
    path = run / "preprocessing.json"
    if left is not None:
        path.write_text(left)
    for _ in range(2):
        scaling = preprocessing.read(str(run), lambda found: found.pop("scaling"))
        assert scaling == COPY["scaling"]
    # Others may write there: a reader has no lock.
    assert (path.read_text() if path.exists() else None) == left
    assert {*os.listdir(run)} <= {"checkpoints", "preprocessing.json"}
    said = capsys.readouterr()
    line = (
        f"{path} is {'lost' if left is None else 'damaged'}; the copy in "
        f"{run}/checkpoints/ckpt-1-0 is read, "
    )
    assert (said.out + said.err).count(line) == 1


def test_without_a_copy_the_fault_is_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        preprocessing.read(str(tmp_path), dict)


@pytest.mark.parametrize(("task", "fits"), [("classification", True), ("tags", False)])
def test_a_run_goes_on_with_its_task(tmp_path, task, fits):
    contents = Contents({"model": [np.ones(2)]}, {"preprocessing": {"task": task}})
    folder = str(tmp_path / "checkpoints")
    store.save(folder, Position(1), contents)
    facts = types.SimpleNamespace(target=None)
    setup = types.SimpleNamespace(task=TASKS["classification"], facts=facts)
    if fits:
        continued.check_classes(folder, setup)
        return
    with pytest.raises(ResumeError, match=r"began with --task=tags, but .*=classific"):
        continued.check_classes(folder, setup)
