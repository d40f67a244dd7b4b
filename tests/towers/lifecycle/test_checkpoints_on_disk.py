"""What lies on the disk: names, odd paths, and what is said of what cannot be read."""

import builtins
import errno
import gc
import json
import os
import pathlib
import re
import shutil
import types
import weakref

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


@pytest.mark.parametrize("load", [store.load, store.load_about])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["variables.index", "variables.data-00000-of-00001"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(tmp_path, load, make, name):
    path = save(tmp_path)
    os.remove(f"{path}/{name}")
    make(f"{path}/{name}")
    with pytest.raises(DamagedError, match=f"{name} is no regular file"):
        load(path)


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


def test_a_file_system_that_flushes_no_folders_has_checkpoints(tmp_path, monkeypatch):
    fsync = os.fsync

    def files_only(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    path = save(tmp_path)
    assert store.find(str(tmp_path)) == [path]


# What a save asks of the disk, as far as Python asks it.
CALLS = (
    *((os, name) for name in ("rename", "replace", "remove", "unlink", "rmdir")),
    *((os, name) for name in ("mkdir", "open", "fsync", "listdir", "scandir")),
    (builtins, "open"),
)


class Killed(BaseException):
    """Stands for the end of the process."""


def fail_at(patch, number, killed):
    """Has call `number` to the disk fail, or with `killed` that and all later ones.

    Returns the list of the calls that are made.
    """
    made = []

    def failing(call, name):
        def instead(*args, **options):
            made.append(name)
            if killed and len(made) > number:
                raise Killed
            if len(made) - 1 == number:
                raise OSError(errno.EIO, f"{name} fails")
            return call(*args, **options)

        return instead

    for module, name in CALLS:
        patch.setattr(module, name, failing(getattr(module, name), name))
    return made


def contents_of(number):
    """Two pieces, and another value beside them."""
    values = np.full([6, 2], number, np.float32), np.float32(number)
    return Contents({"model": [*map(tf.constant, values)]}, {"number": number})


def check_whole(path):
    """Reads a checkpoint of `contents_of`; returns which one it is."""
    found = store.load(path)
    number = found.about["number"]
    for value in found.values["model"]:
        assert (np.asarray(value) == number).all()
    return number


@pytest.mark.slow
@pytest.mark.parametrize("at", [Position(1), Position(2)], ids=["same", "next"])
@pytest.mark.parametrize("killed", [False, True], ids=["fails", "killed"])
def test_there_is_a_whole_one_whatever_call_fails(tmp_path, monkeypatch, killed, at):
    monkeypatch.setattr(store, "_PIECE_BYTES", 24)
    wanted, seen = str(tmp_path / f"ckpt-{at.epoch}-0"), set()
    for number in range(1000):
        folder = str(tmp_path / str(number))
        store.save(folder, Position(1), contents_of(1))
        # Of a process that was killed as it replaced that.
        os.mkdir(f"{folder}/.unfinished")
        with monkeypatch.context() as patch:
            made = fail_at(patch, number, killed)
            try:
                store.save(folder, at, contents_of(2))
                failed = False
            except (OSError, Killed):
                failed = True
        newest = store.find(folder)[0]
        seen.add(check_whole(newest))
        assert failed or check_whole(newest) == 2
        # The next save cleans up.
        store.save(folder, at, contents_of(3))
        assert check_whole(f"{folder}/{os.path.basename(wanted)}") == 3
        names = {"ckpt-1-0", os.path.basename(wanted)}
        assert {*os.listdir(folder)} == names
        if len(made) <= number:
            break
    assert len(made) <= number and number > 10
    assert seen == {1, 2}


def test_no_call_has_more_than_a_piece_in_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_PIECE_BYTES", 64)
    sizes = {"SaveV2": [], "RestoreV2": []}

    def note(name, call):
        def instead(**options):
            found = call(**options)
            tensors = options.get("tensors", found)
            pairs = zip(options["tensor_names"], tensors, strict=True)
            sizes[name].append(sum(len(bytes(t.numpy())) for n, t in pairs if "/" in n))
            return found

        monkeypatch.setattr(tf.raw_ops, name, instead)

    for name in sizes:
        note(name, getattr(tf.raw_ops, name))
    alive = weakref.WeakValueDictionary()

    def make(number):
        assert len(alive) <= 1  # The one before, at most.
        value = tf.fill([40, 2], float(number))
        alive[number] = value
        return value

    values = store.OnDemand(make, range(20))
    store.save(str(tmp_path), Position(1), Contents({"model": values}, {}))
    for of_call in sizes.values():
        assert max(of_call) == 64 and sum(of_call) == 20 * 40 * 2 * 4


def test_what_was_discarded_stays_until_the_next_one_is_whole(tmp_path, monkeypatch):
    folder = str(tmp_path)
    later = store.save(folder, Position(3), contents_of(1))
    with monkeypatch.context() as patch:
        patch.setattr(store, "load", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.save(folder, Position(2), contents_of(2), [later])
    assert store.find(folder) == [later]
    path = store.save(folder, Position(2), contents_of(2), [later])
    assert store.find(folder) == [path]


SHAPES = [(), (0, 3), (5,), (1, 7, 3), (4, 100), (1, 1)]
DTYPES = [
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    "float8_e4m3fn",
]


@pytest.mark.slow
@pytest.mark.parametrize("piece_bytes", [1, 40, 2**25])
def test_pieces_of_any_size_give_the_same_values(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(store, "_PIECE_BYTES", piece_bytes)
    random = np.random.default_rng(0)
    values = [
        tf.cast(tf.cast(3 * random.random(shape), "float32"), dtype)
        for shape in SHAPES
        for dtype in DTYPES
    ]
    values.append(tf.constant(["a", "bc", "é"]))
    # Arrays, as variables in parts are read.
    arrays = [np.array(value.numpy()) for value in values[:-1]]
    written = Contents({"model": values, "callbacks": arrays}, {})
    path = store.save(str(tmp_path), Position(1), written)
    # TensorFlow reads them, too, without knowing of pieces.
    reader = tf.train.load_checkpoint(f"{path}/variables")
    # With other pieces than those it was written in.
    monkeypatch.setattr(store, "_PIECE_BYTES", 2**10)
    found = store.load(path)
    for part, of_part in written.values.items():
        for i, (a, b) in enumerate(zip(found.values[part], of_part, strict=True)):
            assert a.dtype == b.dtype and tuple(a.shape) == tuple(b.shape)
            np.testing.assert_array_equal(a.numpy(), values[i].numpy())
            np.testing.assert_array_equal(reader.get_tensor(f"{part}/{i}"), a.numpy())


def test_checkpoints_from_before_there_were_pieces_are_read(tmp_path):
    """Written as they were then: in one operation, each value in one."""
    value = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    about = {"format": 1, "parts": {"model": 1}, "position": [4, 2], "step": 7}
    (tmp_path / "ckpt-4-2").mkdir()
    tf.raw_ops.SaveV2(
        prefix=f"{tmp_path}/ckpt-4-2/variables",
        tensor_names=["about", "model/0"],
        shape_and_slices=["", ""],
        tensors=[tf.constant(json.dumps(about)), tf.constant(value)],
    )
    found = store.load(f"{tmp_path}/ckpt-4-2")
    np.testing.assert_array_equal(found.values["model"][0], value)
    assert found.about == about == store.load_about(f"{tmp_path}/ckpt-4-2")


@pytest.mark.parametrize("content", [b"", None])
def test_each_piece_is_verified(tmp_path, monkeypatch, content):
    monkeypatch.setattr(store, "_PIECE_BYTES", 8)
    path = store.save(str(tmp_path), Position(1), contents_of(5))
    files = sorted(pathlib.Path(path).glob("variables.data-*"))
    assert len(files) >= 7
    for file in files[1:]:
        good = file.read_bytes()
        file.write_bytes(
            content if content is not None else bytes([good[0] ^ 1]) + good[1:]
        )
        with pytest.raises(DamagedError):
            store.load(path)
        file.write_bytes(good)
    assert check_whole(path) == 5
