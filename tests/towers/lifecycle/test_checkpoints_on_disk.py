"""What lies on the disk: names, odd paths, and what is said of what cannot be read."""

import gc
import os
import re
import shutil
import types

import numpy as np
import pytest
import tensorflow as tf

from towers.lifecycle.checkpoints import manager, store
from towers.lifecycle.checkpoints.store import Contents, DamagedError, Position


def save(folder):
    contents = Contents({"model": [tf.constant([1.0, 2.0])]}, {"step": 3})
    return store.save(str(folder), Position(1), contents)


@pytest.mark.parametrize("load", [store.load, store.load_about])
@pytest.mark.parametrize("change", [os.rename, shutil.copytree])
def test_a_renamed_checkpoint_is_refused(tmp_path, load, change):
    path = save(tmp_path)
    load(path)
    change(path, tmp_path / "ckpt-9-0")
    with pytest.raises(DamagedError) as caught:
        load(str(tmp_path / "ckpt-9-0"))
    assert str(caught.value) == (
        f"Cannot read the checkpoint {tmp_path}/ckpt-9-0: it is of epoch 1, batch 0: "
        "it was renamed; choose another directory, or remove it."
    )


def test_one_that_does_not_say_where_it_is_of_is_read(tmp_path, monkeypatch):
    """As they were written before."""
    dumps = store.json.dumps

    def without(about):
        return dumps({key: about[key] for key in about if key != "position"})

    monkeypatch.setattr(store.json, "dumps", without)
    assert "position" not in store.load(save(tmp_path)).about


@pytest.mark.parametrize(
    "name", ["a[b]", "a[", "]", "a\\b", "a*?", "a; b", "{a}", "é "]
)
def test_a_folder_of_any_name(tmp_path, name):
    folder = tmp_path / name / "run"
    (tmp_path / "ab" / "run").mkdir(parents=True)
    before = os.listdir("/proc/self/fd")
    path = save(folder)
    assert store.find(str(folder)) == [path]
    np.testing.assert_array_equal(store.load(path).values["model"][0], [1, 2])
    assert store.load_about(path)["step"] == 3
    os.remove(f"{path}/variables.data-00000-of-00001")
    with pytest.raises(DamagedError, match=re.escape(f"checkpoint {path}: ")) as caught:
        store.load(path)
    assert "/proc" not in str(caught.value)
    os.remove(f"{path}/variables.index")
    with pytest.raises(DamagedError) as caught:
        store.load(path)
    assert "/proc" not in str(caught.value)
    # With Python 3.13, the error's traceback keeps TensorFlow's reader for a while.
    del caught
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_what_is_not_read_back_is_said_once(tmp_path, monkeypatch):
    def write(prefix, *rest):
        for name in ("index", "data-00000-of-00001"):
            with open(f"{prefix}.{name}", "w"):
                pass

    monkeypatch.setattr(store, "_write", write)
    with pytest.raises(OSError) as caught:
        save(tmp_path)
    said = str(caught.value)
    assert said.startswith("it is not read back as it was written: ")
    assert "choose" not in said and not said.endswith(".")


def test_a_host_that_saves_nothing_says_who_does(tmp_path, monkeypatch):
    """That nothing was saved would alarm, and its copy of a checkpoint is temporary."""
    hosts = types.SimpleNamespace(index=1, names=("host 0", "host 1"))
    monkeypatch.setattr(manager, "this_host", lambda: hosts)
    checkpoints = manager.CheckpointManager(str(tmp_path), 1, None, "stop")
    assert checkpoints.tell_latest() == "host 0 saves"
    checkpoints.latest = "/tmp/towers-x/ckpt-1-0"
    assert checkpoints.tell_latest() == "host 0 saves"
