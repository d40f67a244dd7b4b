"""One process at a time saves to a folder of checkpoints."""

import fcntl
import os

import keras
import numpy as np
import pytest

import towers
from towers.callbacks import Checkpoint
from towers.lifecycle.checkpoints import store
from towers.lifecycle.checkpoints.manager import SaveError
from towers.lifecycle.continuing.resume import ResumeError

X, Y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)


def make_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return towers.multi_gpu_model(model, 2)


def fit(model, checkpoint, epochs):
    model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=[checkpoint])


def test_another_process_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path)
    monkeypatch.setattr(
        checkpoint.run.checkpoints, "load", lambda *_: pytest.fail("it was read")
    )
    with open(tmp_path / "lock", "w") as lock:
        # Of another opened file, as of another process.
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SaveError, match=f"Another run saves to {tmp_path}; "):
            fit(make_model(), checkpoint, 1)


def test_fit_runs_twice_in_a_process(tmp_path):
    model, checkpoint = make_model(), Checkpoint(tmp_path)
    fit(model, checkpoint, 1)
    fit(model, checkpoint, 2)
    fit(model, Checkpoint(tmp_path), 3)
    assert os.path.isdir(tmp_path / "ckpt-3-0")
    assert not os.path.exists(tmp_path / "lock")


@pytest.mark.slow
def test_what_another_run_has_saved_meanwhile_is_not_passed_over(tmp_path):
    first = Checkpoint(tmp_path)
    model = make_model()
    fit(model, first, 1)
    fit(make_model(), Checkpoint(tmp_path), 2)
    with pytest.raises(ResumeError, match=f"Another run has saved {tmp_path}/ckpt-2-0"):
        fit(model, first, 3)


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("epochs", [1, 2])
def test_another_run_that_has_begun_anew_is_not_passed_over(tmp_path, epochs):
    """Its newest checkpoint may be of an earlier position, or of the same."""
    first = Checkpoint(tmp_path)
    model = make_model()
    fit(model, first, 2)
    store.remove_all(str(tmp_path))
    # What somebody removes is no other run.
    fit(model, first, 2)
    fit(make_model(), Checkpoint(tmp_path), epochs)
    said = f"Another run has saved {tmp_path}/ckpt-{epochs}-0"
    with pytest.raises(ResumeError, match=said):
        fit(model, first, 3)


def test_a_lock_that_cannot_be_opened_is_said(tmp_path):
    os.mkdir(tmp_path / "lock")
    with pytest.raises(SaveError, match=f"Cannot lock {tmp_path}: .*Is a directory"):
        fit(make_model(), Checkpoint(tmp_path), 1)
