"""TensorFlow reads and writes addresses by functions of Python."""

import pytest
import tensorflow as tf

from towers.keras_adapter import file_systems
from towers.program import object_store

gfile = tf.io.gfile


@pytest.fixture
def folder(request):
    folder = f"memory://{request.node.name}"
    object_store.prepare(folder)
    yield folder
    system = object_store.file_system(folder)
    if system.exists(folder):
        system.rm(folder, recursive=True)


def put(folder, **files):
    for name, content in files.items():
        object_store.file_system(folder).pipe_file(f"{folder}/{name}", content)


def test_operations_read_a_file(folder):
    put(folder, a=b"one", b=b"")
    paths = tf.data.Dataset.from_tensor_slices([f"{folder}/a", f"{folder}/b"])
    read = paths.map(tf.io.read_file, tf.data.AUTOTUNE)
    assert [*read.as_numpy_iterator()] == [b"one", b""]


def test_what_is_missing_is_named(folder):
    with pytest.raises(tf.errors.NotFoundError, match=f"{folder}/none"):
        tf.io.read_file(f"{folder}/none")
    assert not gfile.exists(f"{folder}/none")
    with pytest.raises(tf.errors.NotFoundError):
        gfile.listdir(f"{folder}/none")


def test_an_error_of_the_store_is_said(folder, monkeypatch):
    put(folder, a=b"one")

    def fails(*_, **__):
        raise PermissionError("not yours")

    system = type(object_store.file_system(folder))
    monkeypatch.setattr(system, "cat_file", fails)
    with pytest.raises(tf.errors.PermissionDeniedError, match="a; not yours"):
        tf.io.read_file(f"{folder}/a")


def test_folders(folder):
    put(folder, **{"a/x.txt": b"1", "a/y.txt": b"22", "b/x.txt": b"3"})
    assert gfile.listdir(folder) == ["a", "b"]
    assert gfile.isdir(f"{folder}/a") and not gfile.isdir(f"{folder}/a/x.txt")
    assert gfile.stat(f"{folder}/a/y.txt").length == 2
    assert gfile.stat(f"{folder}/a/y.txt").mtime_nsec > 0
    found = sorted(gfile.glob(f"{folder}/*/x*"))
    assert found == [f"{folder}/a/x.txt", f"{folder}/b/x.txt"]
    assert [*gfile.walk(folder)] == [
        (folder, ["a", "b"], []),
        (f"{folder}/a", [], ["x.txt", "y.txt"]),
        (f"{folder}/b", [], ["x.txt"]),
    ]


def test_files_are_written_and_changed(folder):
    with gfile.GFile(f"{folder}/a", "w") as file:
        file.write("one, ")
        assert not gfile.exists(f"{folder}/b")
        file.write("two")
    gfile.copy(f"{folder}/a", f"{folder}/b")
    gfile.rename(f"{folder}/a", f"{folder}/c")
    assert gfile.listdir(folder) == ["b", "c"]
    gfile.remove(f"{folder}/b")
    assert gfile.GFile(f"{folder}/c").read() == "one, two"
    gfile.rmtree(folder)
    assert not gfile.exists(f"{folder}/c")


def test_a_folder_is_renamed(folder):
    put(folder, **{"a/x.txt": b"1", "a/b/y.txt": b"2"})
    gfile.rename(f"{folder}/a", f"{folder}/c")
    assert gfile.listdir(folder) == ["c"]
    assert gfile.listdir(f"{folder}/c") == ["b", "x.txt"]
    assert gfile.listdir(f"{folder}/c/b") == ["y.txt"]


def test_records_and_checkpoints(folder):
    path = f"{folder}/records"
    records = [bytes([k]) * 1000 * k for k in range(50)]
    with tf.io.TFRecordWriter(path) as writer:
        for record in records:
            writer.write(record)
    assert [*tf.data.TFRecordDataset(path).as_numpy_iterator()] == records
    saved = tf.train.Checkpoint(v=tf.Variable([1.0, 2.0]))
    saved.write(f"{folder}/ckpt")
    value = tf.train.load_checkpoint(f"{folder}/ckpt").get_tensor(
        "v/.ATTRIBUTES/VARIABLE_VALUE"
    )
    assert value.tolist() == [1.0, 2.0]


def test_what_is_read_in_order_is_fetched_in_large_ranges(folder, monkeypatch):
    monkeypatch.setattr(file_systems, "_AHEAD_BYTES", 100)
    content = bytes(range(256)) * 4
    put(folder, a=content)
    asked = []

    class Counted(object_store._Files):
        def read(self, path, begin, end):
            asked.append((begin, end))
            return super().read(path, begin, end)

    readable = file_systems._Readable(Counted(), f"{folder}/a")
    for begin in (0, 10, 20, 100, 110):
        assert readable.read(begin, 10) == content[begin : begin + 10]
    # The first and a jump fetch what is asked for.
    assert asked == [(0, 10), (10, 110), (110, 210)]
    assert readable.read(1000, 100) == content[1000:]
    assert readable.read(5, 5) == content[5:10]
    assert asked[3:] == [(1000, 1024), (5, 10)]


def test_a_scheme_that_nobody_knows():
    with pytest.raises(ValueError, match="Received nosuch://a, whose scheme is unk"):
        object_store.prepare("folder:nosuch://a")


def test_what_tensorflow_knows_is_left_to_it(monkeypatch):
    monkeypatch.setattr(object_store, "file_system", None)
    object_store.prepare("tfrecord:ram://a,/b/c,d:e")
