"""ArrayRecord, CSV and Parquet; paths of other file systems; parts of TFDS's splits."""

import builtins
import functools
import json
import os
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from pyarrow import parquet

from tests.variants import slow
from towers.input_pipeline import (
    find_bad_record,
    make_dataset,
    open_source,
    scan_labels,
)
from towers.input_pipeline.sources.tfds.tfds_source import TFDSSource


def _read(source, split, seeds=None):
    """All examples of a split, decoded outside the pipeline."""

    @tf.autograph.experimental.do_not_convert
    def decode(_, record):
        return source.decode(record)

    records = source.batches(split, 4, seeds=seeds, buffer_mb=1).unbatch()
    decoded = records.map(decode).as_numpy_iterator()
    return [(image, int(label)) for image, label in decoded]


def test_short_records_take_their_places_in_the_buffer_too(
    tmp_path, example, write_tfrecord, encode
):
    """However short they are: TensorFlow makes the places before it has a record."""
    count, places = 2**20 // 256 + 1000, 2**20 // 256
    dot = encode(np.zeros([1, 1, 3], np.uint8))
    record = example(image__encoded=dot, image__class__label=0)
    path = write_tfrecord(tmp_path / "a.tfrecord", [record] * count)
    source = open_source(f"tfrecord:{path}", num_classes=1)
    assert source.record_bytes("train") < 256
    seeds = tf.constant([1, 2], tf.int64)
    ((numbers, _),) = source.batches("train", count, seeds=seeds, buffer_mb=1)
    # The k-th record that is drawn is one of the first ones that had a place.
    assert (numbers.numpy() - np.arange(count) < places).all()
    assert (numbers.numpy() != np.arange(count)).mean() > 0.9


def _labels(source, split, seeds=None):
    return [label for _, label in _read(source, split, seeds)]


def _seeds(seed):
    return tf.constant([seed, seed], tf.int64)


def _numbers(source, split, **options):
    batches = source.batches(split, 3, **options)
    return [int(n) for numbers, _ in batches for n in numbers]


def _without(monkeypatch, package):
    """Makes a package one that is not installed."""
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


def _copy_to_memory(path, folder):
    tf.io.gfile.makedirs(folder)
    target = f"{folder}/{os.path.basename(path)}"
    tf.io.gfile.copy(str(path), target, overwrite=True)
    return target


# --- array_record


@pytest.fixture
def write_array_record():
    def write(path, records):
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for record in records:
            writer.write(record)
        writer.close()
        return str(path)

    return write


@pytest.fixture
def array_records(tmp_path, image_example, grey, write_array_record):
    """Two files to train on and one held out; value 10 * label + file."""
    for file in range(2):
        write_array_record(
            tmp_path / f"train-{file}.array_record",
            [image_example(grey(10 * label + file), label) for label in range(5)],
        )
    write_array_record(tmp_path / "val.array_record", [image_example(grey(9), 6)])
    return tmp_path


def test_array_records_are_read(array_records):
    source = open_source(f"array_record:{array_records}/*")
    assert source.splits == {"train": 10, "test": 1}
    assert (source.num_classes, source.image_shape) == (7, (None, None, 3))
    found = [(image.mean(), label) for image, label in _read(source, "train")]
    assert found == [(10 * n + file, n) for file in range(2) for n in range(5)]
    assert _labels(source, "test") == [6]
    assert find_bad_record(source, "train") is None
    scan_labels(source, "train")


def test_array_records_are_shuffled_completely(array_records):
    source = open_source(f"array_record:{array_records}/train*", num_classes=5)
    assert _read(source, "train", _seeds(1))[0][0].shape == (8, 8, 3)
    orders = [_numbers(source, "train", seeds=_seeds(seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(10))
    later = _numbers(source, "train", seeds=_seeds(1), start=7)
    assert later == orders[0][7:]


def test_array_records_of_pixels(tmp_path, example, write_array_record):
    pixels = np.arange(24, dtype=np.uint8).reshape([2, 4, 3])
    record = example(
        image__encoded=pixels.tobytes(),
        image__class__label=1,
        image__height=2,
        image__width=4,
        image__channels=3,
    )
    write_array_record(tmp_path / "a", [record] * 3)
    source = open_source(f"array_record:{tmp_path}/a")
    assert (source.encoded, source.image_shape) == (False, (2, 4, 3))
    for image, label in _read(source, "train"):
        np.testing.assert_array_equal(image, pixels)
        assert label == 1


# Of what Python reads, Parquet goes through it quickly.
@pytest.mark.slow
def test_array_records_go_through_the_pipeline(array_records):
    source = open_source(f"array_record:{array_records}/*")
    dataset = make_dataset(
        source, "train", batch_size=4, image_shape=(8, 8, 3), training=True
    )
    assert sorted(n for _, labels in dataset for n in labels.numpy()) == sorted(
        [*range(5)] * 2
    )


def test_array_records_of_other_fields(array_records):
    with pytest.raises(ValueError, match=r"train-0.array_record: record 0 has the fie"):
        open_source(f"array_record:{array_records}/*", image_column="img")


def test_array_records_of_something_else(tmp_path, write_array_record):
    write_array_record(tmp_path / "text", [b"\xff hello"])
    with pytest.raises(ValueError, match="text: record 0: not a tf"):
        open_source(f"array_record:{tmp_path}/text")


def test_no_array_record(tmp_path, write_array_record):
    with pytest.raises(ValueError, match=r"no file matches .*such as 'array_record:/d"):
        open_source(f"array_record:{tmp_path}/*")
    write_array_record(tmp_path / "empty", [])
    with pytest.raises(ValueError, match="holds no record"):
        open_source(f"array_record:{tmp_path}/empty")


@pytest.mark.parametrize("label", [-1, 5, 2**40])
def test_array_records_with_a_label_out_of_range(
    tmp_path, image_example, grey, write_array_record, label
):
    records = [image_example(grey(0), n) for n in (0, 1, label)]
    path = write_array_record(tmp_path / "a", records)
    source = open_source(f"array_record:{path}", num_classes=5)
    wanted = f"{path}: record 2: image/class/label {label} is outside [0, 5)"
    assert find_bad_record(source, "train") == wanted
    with pytest.raises(ValueError) as caught:
        scan_labels(source, "train")
    assert str(caught.value) == wanted


@pytest.mark.parametrize("cut", [1, 3, 20, -1])
def test_a_record_that_is_no_example_is_named(
    tmp_path, image_example, grey, write_array_record, write_tfrecord, cut
):
    good = image_example(grey(0), 0)
    # -1: with a mark of the picture's, which is not text, in front.
    bad = b"\x89" + good if cut < 0 else good[:-cut]
    path = write_array_record(tmp_path / "a", [good, bad])
    source = open_source(f"array_record:{path}", num_classes=5)
    found = find_bad_record(source, "train")
    assert found.startswith(f"{path}: record 1: not a tf.Example: ")
    path = write_tfrecord(tmp_path / "b", [good, bad])
    source = open_source(f"tfrecord:{path}", num_classes=5)
    found = find_bad_record(source, "train")
    assert found.startswith(f"{path}: record 1 (byte offset ")
    assert "not a tf.Example: " in found


def test_an_empty_file_of_array_records(array_records, caplog):
    path = array_records / "train-9.array_record"
    path.touch()
    source = open_source(f"array_record:{array_records}/*")
    assert source.splits == {"train": 10, "test": 1}
    assert len(_read(source, "train", _seeds(1))) == 10
    scan_labels(source, "train")
    assert f"{path} holds no record" in caplog.text
    with pytest.raises(ValueError, match=r"9.array_record holds no record: expected"):
        open_source(f"array_record:{path}")


@pytest.mark.parametrize("left", [5, 65_000, 90_000])
def test_an_array_record_file_that_is_cut_off(array_records, left):
    path = array_records / "train-1.array_record"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(
        ValueError, match=r"train-1.array_record cannot be read: .*whole"
    ):
        open_source(f"array_record:{array_records}/*")
    path.write_bytes(b"a" * 200_000)
    with pytest.raises(ValueError, match="read: its end is missing or damaged; exp"):
        open_source(f"array_record:{array_records}/*")


def test_an_array_record_file_that_is_damaged(array_records):
    path = array_records / "train-1.array_record"
    source = open_source(f"array_record:{array_records}/*", num_classes=7)
    content = bytearray(path.read_bytes())
    place = content.index(b"\x89PNG")
    content[place + 20] ^= 0xFF
    path.write_bytes(content)
    assert find_bad_record(source, "train").startswith(f"{path}: record 0: ")
    with pytest.raises(ValueError, match=r"train-1.array_record: record 0: "):
        scan_labels(source, "train")
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{array_records}"):
        _read(source, "train")


def test_without_array_record(array_records, monkeypatch):
    _without(monkeypatch, "array_record")
    with pytest.raises(
        ValueError, match=r"not installed: pip install 'array-record<1,>=0\.8'"
    ):
        open_source(f"array_record:{array_records}/*")


# --- csv


@pytest.fixture
def rows(tmp_path):
    """Two files to train on and one held out; the label is the middle column."""
    (tmp_path / "train-0.csv").write_text("a,label,b\n0.5,0,1\n-2,1,1e3\n")
    (tmp_path / "train-1.csv").write_bytes(b"a,label,b\r\n7,2,8\r\n")
    (tmp_path / "test.csv").write_text("a,label,b\n3,0,4")
    return tmp_path


def test_rows_of_numbers(rows):
    source = open_source(f"csv:{rows}/*.csv")
    assert source.splits == {"train": 3, "test": 1}
    assert (source.num_classes, source.image_shape) == (3, (2,))
    assert not source.encoded
    found = sorted((row.tolist(), label) for row, label in _read(source, "train"))
    assert found == [([-2, 1000], 1), ([0.5, 1], 0), ([7, 8], 2)]
    ((row, label),) = _read(source, "test")
    assert (row.dtype, row.tolist(), label) == (np.float64, [3, 4], 0)
    assert find_bad_record(source, "train") is None
    scan_labels(source, "train")
    assert open_source(f"csv:{rows}/*.csv", num_classes=5).num_classes == 5


@pytest.mark.parametrize(
    ("header", "label_column", "label"),
    [
        ("a,b,c", "b", 2),
        ("a,b,c", None, 3),
        ("Class,b,c", None, 1),
        slow("a, target,c", None, 2),
        slow('\ufeff"a","b","c"', "a", 1),
    ],
)
def test_the_column_of_labels(tmp_path, header, label_column, label):
    (tmp_path / "a.csv").write_text(f"{header}\n1,2,3\n")
    source = open_source(f"csv:{tmp_path}/a.csv", label_column=label_column)
    ((row, found),) = _read(source, "train")
    assert found == label
    assert row.tolist() == [n for n in (1, 2, 3) if n != label]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.csv begins with '': expected a header"),
        ("a,label", "holds no record"),
        ("1,2\n3,4\n", "a.csv begins with '1,2.*: expected a header"),
        ("label\n1\n", "has the column label alone: expected at least two"),
        ("a,label\n1,x\n1,0\n", "line 2: label is 'x', expected a whole number from 0"),
        ("a,label\n1,-1\n", "a.csv: line 2: label -1 is negative"),
        ("a,label\n1,0\n1,dog\n", "a.csv: line 3: label is 'dog', expected a whole n"),
        ("a,label\n1,0\n1\n", "a.csv: line 3: has 1 field, expected 2"),
        ("a,label\nx,0\n", "a.csv has no column of numbers or of texts .* but 'a'"),
        ("a,label\n,0\n", "a.csv has no column of numbers or of texts that repeat"),
        (b"a,label\xff\n1,2", "a.csv: line 1 is not UTF-8: expected a CSV file in"),
        ("a,label\n1,0\n".encode("utf-16"), "a.csv: line 1 is not UTF-8.*-f UTF-16$"),
        (
            b"a,label\n7\xff,2",
            "a.csv: line 2: a is '7\ufffd', expected text in UTF-8$",
        ),
        (
            b"a,label\n1,\xff",
            "a.csv: line 2: label is '\ufffd', expected text in UTF-8$",
        ),
        (
            "a,label\n1,0\n1," + "x" * 999,
            r"line 3: label is 'x{60}', expected a whole number",
        ),
        ("a,label\n" + "1" * 140_000 + ",0\n", "line 2: a is inf, expected a number$"),
    ],
)
def test_a_csv_file_that_cannot_be_opened(tmp_path, text, message):
    text = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(ValueError, match=message) as caught:
        open_source(f"csv:{tmp_path}/*.csv")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1", "has 1 field, expected 3"),
        ("1,0,x", "b is 'x', expected a number"),
        ("1,0,", "nothing in the column 'b': write one, such as the column's mean"),
        ("1,9,1", "label 9 is outside"),
        ("nan,0,1", "nothing in the column 'a'"),
        ("1,0,-inf", "b is -inf, expected a number"),
        ("1,nan,1", "label is 'nan', expected a whole number from 0"),
    ],
)
def test_a_bad_row_is_named(rows, row, message):
    path = rows / "train-0.csv"
    path.write_text(path.read_text() + f"{row}\n")
    options = {"num_classes": 5, "missing": "fail"}
    said = f"{path}: line 4: {message}"
    with pytest.raises(ValueError, match=re.escape(said)):
        open_source(f"csv:{rows}/*.csv", **options)
    source = open_source(f"csv:{rows}/*.csv", **options, skip_bad=True)
    assert find_bad_record(source, "train").startswith(said)


def test_blank_lines_of_csv_files_are_passed_over(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,label\n5,0\n\n6,1\n\r\n7,x\n \n\n")
    with pytest.raises(ValueError, match=r"a\.csv: line 6: label is 'x'"):
        open_source(f"csv:{path}", num_classes=2)
    path.write_text("a,label\n5,0\n\n6,1\n\r\n7,0\n \n\n")
    source = open_source(f"csv:{path}")
    assert (source.num_classes, source.splits) == (2, {"train": 3})
    scan_labels(source, "train")
    dataset = make_dataset(
        source, "train", batch_size=8, image_shape=(1,), training=False
    )
    [(values, labels)] = dataset.as_numpy_iterator()
    assert (values.tolist(), labels.tolist()) == ([[5], [6], [7]], [0, 1, 0])


def test_csv_files_of_other_columns(rows):
    path = rows / "train-1.csv"
    path.write_text("b,a,label\n8,7,2\n")
    # Columns go by their names.
    source = open_source(f"csv:{rows}/*.csv")
    assert [7.0, 8.0] in [row.tolist() for row, _ in _read(source, "train")]
    path.write_text("a,c,label\n1,2,3\n")
    with pytest.raises(ValueError, match=r"1\.csv has the columns a .*correct 'b'"):
        open_source(f"csv:{rows}/*.csv")


def test_csv_files_are_shuffled(rows):
    lines = "".join(f"{n},{n}\n" for n in range(100))
    (rows / "many.csv").write_text(f"a,label\n{lines}")
    source = open_source(f"csv:{rows}/many.csv", eval_fraction=0)
    assert _labels(source, "train") == list(range(100))

    @tf.function(autograph=False)  # traced once for all seeds
    def shuffled(seeds):
        batches = source.batches("train", 100, seeds=seeds, buffer_mb=1)
        return source.parse(batches.get_single_element()[1])[1]

    orders = [shuffled(_seeds(seed)).numpy().tolist() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(100))


# --- parquet


def _images(encode, grey, labels, struct=True):
    images = [encode(grey(10 * label)) for label in labels]
    if struct:
        images = [{"bytes": image, "path": "a.png"} for image in images]
    return {"image": images, "label": labels}


@pytest.fixture
def tables(tmp_path, encode, grey):
    """Two files to train on, in row groups of 3, and one held out."""
    for file in range(2):
        labels = [*range(file, 10, 2)]
        parquet.write_table(
            pa.table(_images(encode, grey, labels)),
            tmp_path / f"train-{file}.parquet",
            row_group_size=3,
        )
    parquet.write_table(
        pa.table(_images(encode, grey, [3])), tmp_path / "validation.parquet"
    )
    return tmp_path


def test_images_as_hugging_face_writes_them(tables):
    source = open_source(f"parquet:{tables}/*")
    assert source.splits == {"train": 10, "test": 1}
    assert (source.num_classes, source.image_shape) == (10, (None, None, 3))
    assert source.encoded and source.class_names is None
    found = sorted((image.mean(), label) for image, label in _read(source, "train"))
    assert found == [(10 * label, label) for label in range(10)]
    assert _labels(source, "test") == [3]
    assert find_bad_record(source, "train") is None
    scan_labels(source, "train")
    assert source.record_bytes("train") > 50


def test_parquet_is_shuffled(tables):
    source = open_source(f"parquet:{tables}/train*", num_classes=10)
    orders = [_labels(source, "train", _seeds(seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(10))
    numbers = _numbers(source, "train")
    assert len(set(numbers)) == 10
    assert sorted(_numbers(source, "train", seeds=_seeds(1))) == sorted(numbers)
    assert _numbers(source, "train", start=4) == numbers[4:]


def test_parquet_goes_through_the_pipeline(tables):
    dataset = make_dataset(
        open_source(f"parquet:{tables}/*"),
        "train",
        batch_size=4,
        image_shape=(8, 8, 3),
        training=True,
    )
    for images, labels in dataset:
        np.testing.assert_array_equal(images[:, 0, 0, 0], 10 * labels)


def test_parquet_of_plain_bytes_and_other_names(tmp_path, encode, grey):
    table = pa.table(_images(encode, grey, [0, 1], struct=False))
    table = table.rename_columns(["img", "fine"]).append_column("c", [["x", "y"]])
    parquet.write_table(table, tmp_path / "a.parquet")
    spec = f"parquet:{tmp_path}/a.parquet"
    source = open_source(spec, image_column="img", label_column="fine")
    assert [image.mean() for image, _ in _read(source, "train")] == [0, 10]
    assert open_source(spec, image_column="img").class_names == ("x", "y")
    with pytest.raises(ValueError, match=r"but 'img', 'c': .* by --image_column"):
        open_source(spec, label_column="fine")
    with pytest.raises(ValueError, match=r"expected bytes of JPEG or PNG in 'c'"):
        open_source(spec, image_column="c", label_column="fine")


def test_names_of_classes_are_hugging_faces(tmp_path, encode, grey):
    features = {"label": {"names": ["cat", "dog", "owl"], "_type": "ClassLabel"}}
    table = pa.table(_images(encode, grey, [0, 1])).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    source = open_source(f"parquet:{tmp_path}/a.parquet")
    assert (source.num_classes, source.class_names) == (3, ("cat", "dog", "owl"))


def test_parquet_of_numbers(tmp_path):
    table = {"a": [1, 2], "b": [0.5, -1], "c": [True, False], "label": [0, 4]}
    parquet.write_table(pa.table(table), tmp_path / "a.parquet")
    source = open_source(f"parquet:{tmp_path}/a.parquet")
    assert (source.encoded, source.image_shape) == (False, (3,))
    assert source.num_classes == 5
    found = [(row.tolist(), label) for row, label in _read(source, "train")]
    assert found == [([1, 0.5, 1], 0), ([2, -1, 0], 4)]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"label": [0]}, "has the column label alone: expected at least two"),
        ({"a": [0.5], "label": [b"x"]}, "'label' of binary: expected numbers or texts"),
        ({"a": [1], "label": [-1]}, "a.parquet: row 0: label -1 is negative"),
        ({"a": [1, 2], "label": [0, None]}, "row 1: nothing in the column 'label'"),
        ({"a": pa.array([], "f4"), "label": pa.array([], "i4")}, "holds no record"),
    ],
)
def test_a_parquet_file_that_cannot_be_opened(tmp_path, table, message):
    parquet.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=message) as caught:
        open_source(f"parquet:{tmp_path}/*")
    assert str(tmp_path) in str(caught.value)


def test_parquet_files_of_other_columns(tables):
    parquet.write_table(pa.table({"label": [1], "x": [2]}), tables / "train-2.parquet")
    with pytest.raises(
        ValueError, match=r"image_column is 'image', but .*2.parquet has"
    ):
        open_source(f"parquet:{tables}/*")


@pytest.mark.parametrize(
    ("image", "label", "message"),
    [
        (b"no image", 1, "image: Unknown image file format"),
        (None, 1, "nothing in the column 'image', expected a value"),
        (b"", 1, ""),
        ("good", 99, "label 99 is outside [0, 10)"),
    ],
)
def test_a_bad_row_of_parquet_is_named(tables, encode, grey, image, label, message):
    columns = _images(encode, grey, [*range(7)])
    if image != "good":
        columns["image"][4]["bytes"] = image
    columns["label"][4] = label
    path = tables / "train-1.parquet"
    parquet.write_table(pa.table(columns), path, row_group_size=3)
    options = {"num_classes": 10, "skip_bad": True}
    source = open_source(f"parquet:{tables}/*", **options)
    found = find_bad_record(source, "train")
    assert found.startswith(f"{path}: row 4: {message}")
    assert "\n" not in found


@pytest.mark.parametrize("change", ["cut off", "empty", "text"])
def test_a_file_that_is_not_parquet(tables, change):
    path = tables / "train-1.parquet"
    content = {"cut off": path.read_bytes()[:-20], "empty": b"", "text": b"a" * 99}
    path.write_bytes(content[change])
    with pytest.raises(
        ValueError, match=r"train-1.parquet cannot be read: .*a whole Pa"
    ):
        open_source(f"parquet:{tables}/*")


@pytest.mark.slow
def test_parquet_files_without_row_groups(tables):
    path = tables / "train-9.parquet"
    schema = parquet.read_schema(tables / "train-0.parquet")
    parquet.ParquetWriter(path, schema).close()
    source = open_source(f"parquet:{tables}/*")
    assert source.splits == {"train": 10, "test": 1}
    assert sorted(_labels(source, "train", _seeds(1))) == [*range(10)]
    assert find_bad_record(source, "train") is None
    scan_labels(source, "train")
    assert f"{path} holds no record." in source.notes
    with pytest.raises(ValueError, match=r"9.parquet holds no record: expected"):
        open_source(f"parquet:{path}")
    path.rename(tables / "validation.parquet")
    source = open_source(f"parquet:{tables}/*")
    assert (source.splits["test"], _read(source, "test")) == (0, [])


@pytest.mark.parametrize("fault", ["row", "row group"])
def test_bad_rows_of_parquet_are_named_by_tensorflow_too(tables, fault):
    path = tables / "train-0.parquet"
    options = {"num_classes": 10, "skip_bad": True}
    if fault == "row":
        table = {"image": [{"bytes": None, "path": ""}], "label": [1]}
        schema = parquet.read_schema(path)
        parquet.write_table(pa.table(table, schema), path)
        wanted = f"{path}: row 0: nothing in the column"
        source = open_source(f"parquet:{tables}/*", **options)
    else:
        content = path.read_bytes()
        path.write_bytes(content[:4] + bytes(200) + content[204:])
        wanted = f"{path}: row group 0: "
        source = open_source(f"parquet:{tables}/*", **options)
        with pytest.raises(tf.errors.InvalidArgumentError, match=wanted):
            _read(source, "train")
    assert find_bad_record(source, "train").startswith(wanted)


_FAIL = """
import sys
import tensorflow as tf
from towers.input_pipeline import open_source

for spec in sys.argv[1:]:
    source = open_source(spec, num_classes=10, skip_bad=True)
    try:
        list(source.batches("train", 4).map(lambda _, records: source.parse(records)))
    except tf.errors.InvalidArgumentError:
        print("refused")
"""


@pytest.fixture
def bad_records(tmp_path, grey, image_example, write_array_record):
    """Specs of a source with a bad record each, which Python reads."""
    table = pa.table({"image": [bytes(500)] * 2, "label": [0, 1]})
    parquet.write_table(table, tmp_path / "a", compression="none", use_dictionary=False)
    content = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(content[:4] + b"\xff" * 20 + content[24:])
    path = tmp_path / "b"
    write_array_record(path, [image_example(grey(n), n) for n in range(3)])
    content = bytearray(path.read_bytes())
    content[content.rindex(b"\x89PNG") + 20] ^= 0xFF
    path.write_bytes(content)
    return [f"parquet:{tmp_path}/a", f"array_record:{path}"]


def test_python_raises_nothing_of_a_bad_record(bad_records, monkeypatch, capsys):
    """Of what it raises, TensorFlow would print the stack."""
    called, numpy_function = [], tf.numpy_function

    def watched(function, *args, **options):
        def call(*values):
            called.append(None)
            called[-1] = found = function(*values)
            return found

        return numpy_function(call, *args, **options)

    monkeypatch.setattr(tf, "numpy_function", watched)
    monkeypatch.setattr(sys, "argv", ["", *bad_records])
    exec(_FAIL, {})
    assert capsys.readouterr().out == "refused\nrefused\n"
    assert called and None not in called


@pytest.mark.slow
def test_a_bad_record_prints_no_stack(bad_records):
    done = subprocess.run(
        # TensorFlow reads what it may print as it is imported.
        [sys.executable, "-c", _FAIL, *bad_records],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "0"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "refused\nrefused\n", done.stderr
    assert "Traceback" not in done.stderr


def test_a_parquet_file_that_is_damaged(tables):
    source = open_source(f"parquet:{tables}/*")
    path = tables / "train-0.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(200) + content[204:])
    assert find_bad_record(source, "train").startswith(f"{path}: row group 0: ")
    os.remove(path)
    assert find_bad_record(source, "train").startswith(f"{path}: row group 0: ")


# --- other file systems


def test_records_in_memory(tmp_path, image_example, grey, write_tfrecord):
    for name in ("train-0", "test-0"):
        path = write_tfrecord(tmp_path / name, [image_example(grey(7), 2)] * 3)
        _copy_to_memory(path, "ram://records/deep")
    for pattern in ("deep/*", "*/*-0", "**/*", "deep"):
        source = open_source(f"tfrecord:ram://records/{pattern}")
        assert source.splits == {"train": 3, "test": 3}
        assert source.files("train") == ["ram://records/deep/train-0"]
    assert [image.mean() for image, _ in _read(source, "test")] == [7] * 3
    assert find_bad_record(source, "train") is None


def test_a_folder_in_memory(encode, grey):
    for split, count in (("train", 3), ("val", 2)):
        for label, name in enumerate("ab"):
            tf.io.gfile.makedirs(f"ram://folder/{split}/{name}")
            for index in range(count):
                path = f"ram://folder/{split}/{name}/{index}.png"
                with tf.io.gfile.GFile(path, "wb") as file:
                    file.write(encode(grey(label + 5)))
    source = open_source("folder:ram://folder")
    assert source.splits == {"train": 6, "test": 4}
    assert source.class_names == ("a", "b")
    assert all(image.mean() == label + 5 for image, label in _read(source, "train"))


def test_rows_in_memory(rows, tables):
    for path in rows.glob("*.csv"):
        _copy_to_memory(path, "ram://rows")
    source = open_source("csv:ram://rows/*.csv")
    assert sorted(_labels(source, "train")) == [0, 1, 2]
    for path in tables.glob("*.parquet"):
        _copy_to_memory(path, "ram://tables")
    source = open_source("parquet:ram://tables/*.parquet")
    assert sorted(_labels(source, "train")) == [*range(10)]


@pytest.mark.parametrize(
    "kind", ["tfrecord", "csv", "parquet", "array_record", "folder"]
)
@pytest.mark.parametrize("root", ["ram://none", "nosuchsystem://bucket"])
def test_paths_that_are_not_there(kind, root):
    with pytest.raises(ValueError, match=f"{root}") as caught:
        open_source(f"{kind}:{root}/x*")
    assert "\n" not in str(caught.value)


def test_any_depth_of_folders(tmp_path, image_example, grey, write_tfrecord):
    for name in ("a", "b/c", "b/d/e/.hidden", "b/d/e/f"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_tfrecord(tmp_path / name, [image_example(grey(0), 0)])
    source = open_source(f"tfrecord:{tmp_path}/**/*")
    wanted = [f"{tmp_path}/{name}" for name in ("a", "b/c", "b/d/e/f")]
    assert source.files("train") == wanted
    assert open_source(f"tfrecord:{tmp_path}/b/**/f").files("train") == wanted[2:]


def test_hidden_folders_of_globs_are_not_read(tmp_path, image_example, grey):
    for name in ("1/a", ".2/a", "1/.3/a", ".2/3/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with tf.io.TFRecordWriter(str(tmp_path / name)) as writer:
            writer.write(image_example(grey(0), 0))

    def read(pattern):
        paths = open_source(f"tfrecord:{tmp_path}/{pattern}").files("train")
        return [os.path.relpath(path, tmp_path) for path in paths]

    assert read("**/a") == read("*/a") == ["1/a"]
    # A folder that is named is meant.
    assert read(".2/**/a") == [".2/3/a", ".2/a"]
    assert read(".2/*") == [".2/a"]


# --- parts of TFDS's splits


def _comparable(examples):
    return sorted((image.tobytes(), label) for image, label in examples)


@functools.cache
def _multiset(source, split):
    return _comparable(_read(source, split))


@pytest.mark.slow
def test_splits_in_the_words_of_tfds(digits):
    options = {"train_split": "test[:90%]", "eval_split": "test[90%:]"}
    source = TFDSSource(digits._builder, "digits", **options)
    assert source.splits == {"train": 324, "test": 36}
    both = _multiset(source, "train") + _multiset(source, "test")
    assert sorted(both) == _multiset(digits, "test")
    assert 50 < source.record_bytes("train") < 500
    assert find_bad_record(source, "test") is None


@pytest.mark.slow
def test_splits_of_what_is_not_prepared(tmp_path):
    # Nothing is known yet, and nothing is wrong.
    fresh = open_source("digits", data_dir=tmp_path, train_split="train[:10]")
    assert fresh.splits == {}
    fresh.prepare()
    assert fresh.splits == {"train": 10, "test": 360}


@pytest.mark.slow
def test_shards_are_even_parts_of_each_split(digits):
    parts = [TFDSSource(digits._builder, "digits", shard=(n, 2)) for n in range(2)]
    assert sum(part.splits["train"] for part in parts) == 1437
    assert {part.splits["train"] for part in parts} == {718, 719}
    assert {part.splits["test"] for part in parts} == {180}
    together = [pair for part in parts for pair in _multiset(part, "test")]
    assert sorted(together) == _multiset(digits, "test")
    seeds = _seeds(1)
    assert _comparable(_read(parts[1], "test", seeds)) == _multiset(parts[1], "test")


def test_a_read_config_says_how_files_are_interleaved(digits):
    config = tfds.ReadConfig(interleave_cycle_length=1)
    one_by_one = TFDSSource(digits._builder, "digits", read_config=config)
    found, usual = (_read(source, "test") for source in (one_by_one, digits))
    assert [label for _, label in found] != [label for _, label in usual]
    assert _comparable(found) == _comparable(usual)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_split": "training"}, "digits has no split training: Unknown split"),
        (
            {"eval_split": "train[:x]"},
            r"digits has no split train\[:x\]: Error parsing",
        ),
        ({"train_split": "train[9999:]"}, r"has no split train\[9999:\]: Requested"),
        ({"train_split": "train[:0]"}, r"the split train\[:0\] of digits is empty"),
        ({"shard": (2, 2)}, r"shard is \(2, 2\): expected \(index, count\), an index"),
        ({"shard": (0, 0)}, r"shard is \(0, 0\)"),
    ],
)
def test_splits_that_are_not_there(digits, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        TFDSSource(digits._builder, "digits", **options)
    assert "\n" not in str(caught.value)


def test_options_of_tfds_for_something_else():
    with pytest.raises(ValueError, match="received shard for 'synthetic:4x4x1:2': exp"):
        open_source("synthetic:4x4x1:2", shard=(0, 2))


def test_an_argument_that_no_kind_of_data_takes():
    with pytest.raises(TypeError, match=r"argument 'image_shape': expected one of im"):
        open_source("digits", image_shape=(8, 8, 1))
