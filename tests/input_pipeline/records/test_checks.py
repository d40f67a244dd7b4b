import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.variants import slow
from towers.input_pipeline import (
    BadRecordError,
    blame_records,
    find_bad_record,
    make_dataset,
    open_source,
    scan_labels,
)
from towers.input_pipeline.records import checks


@pytest.fixture
def open_records(tmp_path, image_example, grey, write_tfrecord):
    """Opens two files: a good one, and one with given records after three good ones.

    Gives the source, the second file's path, and the byte offset of its 4th record.
    """
    good = [image_example(grey(label), label) for label in range(3)]

    def open_with(*records, num_classes=3):
        write_tfrecord(tmp_path / "train-0", good)
        path = write_tfrecord(tmp_path / "train-1", [*good, *records])
        source = open_source(f"tfrecord:{tmp_path}/*", num_classes=num_classes)
        # 8 bytes of length, 4 of its checksum, the data, 4 of its checksum.
        offset = sum(8 + 4 + len(record) + 4 for record in good)
        return source, path, offset

    return open_with


def _flip(path, position):
    content = bytearray(open(path, "rb").read())
    content[position] ^= 0xFF
    open(path, "wb").write(content)


def test_good_records_pass(open_records):
    source, _, _ = open_records()
    assert find_bad_record(source, "train") is None
    scan_labels(source, "train")


@pytest.mark.parametrize("place", [0, 20, slow(9), slow(-2)])
def test_a_flipped_byte_is_found(open_records, image_example, grey, place):
    record = image_example(grey(0), 0)
    source, path, offset = open_records(record)
    _flip(path, offset + place if place >= 0 else place)
    where = f"{path}: record 3 (byte offset {offset}): corrupted: "
    assert find_bad_record(source, "train").startswith(where)
    with pytest.raises(ValueError) as caught:
        scan_labels(source, "train")
    assert str(caught.value).startswith(where)


@pytest.mark.parametrize("left", [5, 12, 30])
def test_a_truncated_file_is_found(open_records, image_example, grey, left):
    source, path, offset = open_records(image_example(grey(0), 0))
    content = open(path, "rb").read()
    open(path, "wb").write(content[: offset + left])
    assert find_bad_record(source, "train").startswith(
        f"{path}: record 3 (byte offset {offset}): corrupted: "
    )


def test_an_image_that_does_not_decode_is_found(open_records, example):
    bad = example(image__encoded=b"not an image", image__class__label=0)
    source, path, offset = open_records(bad)
    found = find_bad_record(source, "train")
    assert found.startswith(f"{path}: record 3 (byte offset {offset}): ")
    assert "Unknown image file format" in found
    assert "\n" not in found
    scan_labels(source, "train")  # its label is good


@pytest.mark.parametrize("missing", ["image/encoded", "image/class/label"])
def test_a_missing_field_is_found(open_records, encode, example, grey, missing):
    fields = {"image__encoded": encode(grey(0)), "image__class__label": 0}
    del fields[missing.replace("/", "__")]
    source, path, offset = open_records(example(**fields))
    found = find_bad_record(source, "train")
    assert found.startswith(f"{path}: record 3 (byte offset {offset}): ")
    assert missing in found
    assert "\n" not in found


@pytest.mark.parametrize("label", [3, slow(-1), slow(2**40)])
def test_a_label_out_of_range_is_found(open_records, image_example, grey, label):
    source, path, offset = open_records(image_example(grey(0), label))
    where = f"{path}: record 3 (byte offset {offset})"
    wanted = f"{where}: image/class/label {label} is outside [0, 3)"
    assert find_bad_record(source, "train") == wanted
    with pytest.raises(ValueError) as caught:
        scan_labels(source, "train")
    assert str(caught.value) == wanted


def test_large_files_are_sampled(open_records, image_example, grey, monkeypatch):
    source, _, _ = open_records(image_example(grey(0), 99))
    monkeypatch.setattr(checks, "_SCAN_ALL_BELOW_MB", 0)
    monkeypatch.setattr(checks, "_SAMPLE_PER_FILE", 3)
    scan_labels(source, "train")
    monkeypatch.setattr(checks, "_SAMPLE_PER_FILE", 4)
    with pytest.raises(ValueError, match=r"record 3 .*label 99"):
        scan_labels(source, "train")


def test_a_missing_file_is_named(open_records):
    source, path, _ = open_records()
    tf.io.gfile.remove(path)
    assert find_bad_record(source, "train").startswith(f"{path}: record 0 ")


def test_a_bad_image_in_a_folder_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    for index in range(3):
        Image.new("RGB", (4, 4)).save(tmp_path / "a" / f"{index}.png")
    source = open_source(f"folder:{tmp_path}")
    assert find_bad_record(source, "train") is None
    (tmp_path / "a" / "1.png").write_bytes(b"\x89PNG but no more")
    assert find_bad_record(source, "train").startswith(f"{tmp_path}/a/1.png: ")
    (tmp_path / "a" / "0.png").unlink()
    assert find_bad_record(source, "train").startswith(f"{tmp_path}/a/0.png: ")


# Of a set with fewer records, test_quarantine.py is quick.
@pytest.mark.slow
def test_a_corrupt_shard_of_a_tfds_set_is_named(tmp_path):
    source = open_source("digits", data_dir=tmp_path)
    source.prepare()
    assert find_bad_record(source, "test") is None
    path = source.files("test")[2]
    lengths = [len(record.numpy()) for record in tf.data.TFRecordDataset(path)]
    offset = int(np.sum(lengths[:17])) + 17 * 16
    _flip(path, offset + 40)
    assert find_bad_record(source, "test").startswith(
        f"{path}: record 17 (byte offset {offset}): corrupted: "
    )


def test_sources_without_files_have_nothing_to_find():
    source = open_source("synthetic:4x4x1:2")
    assert find_bad_record(source, "train") is None
    scan_labels(source, "train")


@pytest.mark.parametrize("rows", [40, 100], ids=["fewer", "more"])
def test_files_that_change_while_they_are_read_are_said(tmp_path, rows):
    lines = [f"{k},{k % 2}\n" for k in range(100)]
    path = tmp_path / "a.csv"
    path.write_text("a,label\n" + "".join(lines[:70]))
    source = open_source(f"csv:{path}", eval_fraction=0)
    path.write_text("a,label\n" + "".join(lines[:rows]))
    data = make_dataset(source, "train", 8, training=False)
    with (
        pytest.raises(BadRecordError, match=r"^\S*a\.csv has changed since the run"),
        blame_records(source),
    ):
        list(data)
