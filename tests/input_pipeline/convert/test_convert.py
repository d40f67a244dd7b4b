"""Conversion: the same records, whole files only, and bad input in one sentence."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.variants import slow
from towers.input_pipeline import ArraySource, make_dataset, open_source
from towers.input_pipeline.convert import __main__ as program
from towers.input_pipeline.convert import conversion
from towers.input_pipeline.convert.__main__ import main
from towers.input_pipeline.convert.conversion import convert
from towers.input_pipeline.convert.serialize import choose_form
from towers.input_pipeline.sources.tfds.tfds_source import TFDSSource

# Each part of a split that is read in one go has a pipeline of its own, half a second
# to trace: so most folders here are written once, or with one file for each split.


@pytest.fixture
def photos(tmp_path):
    """A folder of JPEG and PNG files of several sizes, in two classes."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(11):
            pixels = rng.integers(0, 256, [20 + index, 24, 3], np.uint8)
            suffix = ("png", "jpg")[index % 2]
            Image.fromarray(pixels).save(
                tmp_path / "photos" / name / f"{index:02}.{suffix}"
            )
    return open_source(f"folder:{tmp_path}/photos")


def _in_order(source, split):
    """All examples in the source's fixed order."""
    for _, record in source.batches(split, 7).unbatch():
        yield _decoded(source, record)


def _in_files(source, split):
    """All examples in the order of files and of the records in them."""
    for record in tf.data.TFRecordDataset(source.files(split)):
        yield _decoded(source, record)


def _decoded(source, record):
    image, label = source.decode(record)
    if image.dtype.is_floating:
        image = tf.cast(image, tf.float32)  # which is what TFRecord files have
    return image.numpy().tobytes(), tuple(image.shape), int(label)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A folder of `_arrays()` in four shards, for reading only."""
    folder = tmp_path_factory.mktemp("converted")
    convert(_arrays(), f"{folder}", shards=4)
    return folder


@pytest.fixture
def mine(converted, tmp_path):
    """A copy of it."""
    return shutil.copytree(converted, tmp_path / "converted")


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """The same as PNG."""
    folder = tmp_path_factory.mktemp("encoded")
    convert(_arrays(), f"{folder}", shards=1, raw="false")
    return folder


@pytest.fixture(scope="module")
def few_digits(digits):
    """A stream of a few of them."""
    parts = {"train_split": "train[:50]", "eval_split": "test[:7]"}
    return TFDSSource(digits._builder, "digits", **parts)


@pytest.fixture(scope="module")
def converted_digits(few_digits, tmp_path_factory):
    """A folder of them in four shards, for reading only."""
    folder = tmp_path_factory.mktemp("digits")
    convert(few_digits, f"{folder}", shards=4)
    return folder


def _check_equal(source, folder):
    written = open_source(f"tfrecord:{folder}")
    assert written.num_classes == source.num_classes
    assert written.class_names == source.class_names
    assert written.splits == source.splits
    for split in source.splits:
        assert [*_in_files(written, split)] == [*_in_order(source, split)]
    return written


def _arrays(count=23):
    rng = np.random.default_rng(1)
    x = rng.integers(0, 256, [count, 6, 5, 3], np.uint8)
    return ArraySource(x, np.arange(count) % 4, x[:3], np.arange(3))


def _files(folder):
    return {
        path.name: (path.stat().st_mtime_ns, path.stat().st_ino)
        for path in folder.glob("*.tfrecord")
    }


# --- what is written


@pytest.mark.slow
def test_digits_are_the_same(few_digits, converted_digits):
    written = _check_equal(few_digits, converted_digits)
    assert not written.encoded
    assert written.image_shape == (8, 8, 1)
    assert sorted(_files(converted_digits)) == [
        f"{split}-{shard:05}-of-00004.tfrecord"
        for split in ("test", "train")
        for shard in range(4)
    ]


@pytest.mark.slow
def test_digits_are_the_same_encoded(few_digits, tmp_path):
    convert(few_digits, f"{tmp_path}", shards=1, raw="false")
    written = _check_equal(few_digits, tmp_path)
    assert written.encoded
    assert written.image_shape == (8, 8, 1)


@pytest.mark.slow
def test_pixels_are_the_same(converted):
    assert not _check_equal(_arrays(), converted).encoded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "shards"),
    [
        pytest.param("synthetic:6x5x2:3:40", 1, id="two channels"),
        pytest.param("synthetic:4x4x1:2:3", 4, id="fewer than files"),
    ],
)
def test_synthetic_pixels_are_the_same(spec, shards, tmp_path):
    source = open_source(spec)
    convert(source, f"{tmp_path}", shards=shards)
    assert not _check_equal(source, tmp_path).encoded


def test_arrays_are_the_same_as_png(encoded):
    assert _check_equal(_arrays(), encoded).encoded


@pytest.mark.slow
def test_encoded_images_are_kept_byte_for_byte(photos, tmp_path):
    convert(photos, f"{tmp_path}/out", shards=1)
    written = open_source(f"tfrecord:{tmp_path}/out")
    assert written.encoded and written.image_shape == (None, None, 3)
    names = written.class_names
    assert (names, written.splits) == (photos.class_names, photos.splits)
    for split in photos.splits:
        (path,), paths = written.files(split), map(Path, photos.files(split))
        parsed = [written.parse(record.raw[None]) for record in written.walk(path)]
        found = [(images[0].numpy(), names[labels[0]]) for images, labels in parsed]
        assert found == [(path.read_bytes(), path.parent.name) for path in paths]


@pytest.mark.slow
def test_small_images_of_one_size_become_pixels(tmp_path):
    for name in "ab":
        (tmp_path / "in" / name).mkdir(parents=True)
        for index in range(10):
            image = np.full([5, 4, 3], 20 * index, np.uint8)
            Image.fromarray(image).save(tmp_path / "in" / name / f"{index}.png")
    source = open_source(f"folder:{tmp_path}/in")
    convert(source, f"{tmp_path}/out", shards=1)
    written = _check_equal(source, tmp_path / "out")
    assert not written.encoded and written.image_shape == (5, 4, 3)


def test_images_that_are_resized_are_encoded_again(photos):
    grey = open_source("synthetic:8x8x1:2:9")
    for source, begin in ((photos, b"\xff\xd8"), (grey, b"\x89PNG")):
        form = choose_form(source, (4, 5), "false")
        ((_, record),) = source.batches("train", 1).unbatch().take(1)
        content = form.one(source, source.parse_one(record)[0])
        assert content.numpy().startswith(begin)
        assert tf.io.decode_image(content).shape == (4, 5, source.image_shape[-1])


@pytest.mark.slow
def test_images_are_resized(photos, tmp_path):
    convert(photos, f"{tmp_path}/raw", shards=1, image_size=(8, 10))
    convert(photos, f"{tmp_path}/jpeg", shards=1, image_size=(8, 10), raw="false")
    raw = open_source(f"tfrecord:{tmp_path}/raw")
    assert (raw.encoded, raw.image_shape) == (False, (8, 10, 3))
    jpeg = open_source(f"tfrecord:{tmp_path}/jpeg")
    assert (jpeg.encoded, jpeg.image_shape) == (True, (8, 10, 3))
    for (image, _, _), (lossy, _, _), (original, shape, _) in zip(
        _in_files(raw, "train"),
        _in_files(jpeg, "train"),
        _in_order(photos, "train"),
        strict=True,
    ):
        pixels = np.frombuffer(original, np.uint8).reshape(shape)
        wanted = tf.image.resize(pixels, (8, 10), antialias=True)
        found = np.frombuffer(image, np.uint8).reshape([8, 10, 3])
        # Here JPEGs are decoded more accurately.
        np.testing.assert_allclose(found, wanted, atol=5)
        lossy = np.frombuffer(lossy, np.uint8).reshape([8, 10, 3])
        assert np.abs(lossy.astype(int) - found).mean() < 15


@pytest.mark.slow
def test_records_of_records_and_of_what_was_not_counted(encoded, tmp_path):
    shutil.copytree(encoded, tmp_path / "a")
    os.remove(tmp_path / "a" / "dataset_info.json")
    source = open_source(f"tfrecord:{tmp_path}/a", num_classes=4)
    assert source.splits == {"train": None, "test": None}
    convert(source, f"{tmp_path}/b", shards=1)
    written = open_source(f"tfrecord:{tmp_path}/b")
    assert written.splits == {"train": 23, "test": 3}
    assert sorted(_in_files(written, "train")) == sorted(_in_order(source, "train"))


def test_what_is_written_trains(converted):
    dataset = make_dataset(
        open_source(f"tfrecord:{converted}"),
        "train",
        batch_size=10,
        image_shape=(6, 5, 3),
        training=True,
    )
    assert [images.shape[0] for images, _ in dataset] == [10, 10, 3]


def test_memory_is_a_file_system_too():
    convert(_arrays(), "ram://converted/arrays", shards=1)
    _check_equal(_arrays(), "ram://converted/arrays")


# --- dataset_info.json


def test_nothing_is_counted_where_the_info_lies(converted, monkeypatch):
    monkeypatch.setattr(
        "towers.input_pipeline.sources.examples.fields.read_labels", None
    )
    assert open_source(f"tfrecord:{converted}").splits == {"train": 23, "test": 3}
    part = open_source(f"tfrecord:{converted}/train-0000[01]*")
    assert (part.splits, part.num_classes) == ({"train": 11}, 4)
    assert open_source(f"tfrecord:{converted}", num_classes=9).num_classes == 9


def test_the_info_says_what_is_there(converted):
    info = json.loads((converted / "dataset_info.json").read_text())
    size = sum(path.stat().st_size for path in converted.glob("train-*"))
    assert info["splits"]["train"] == {"examples": 23, "files": 4, "bytes": size}
    assert info["image_shape"] == [6, 5, 3]
    assert info["source"] == "arrays"


def test_a_file_cut_off_after_conversion(mine):
    path = mine / "train-00001-of-00004.tfrecord"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"train-00001.* bytes, but dataset_info"):
        open_source(f"tfrecord:{mine}")


def test_an_info_of_somebody_else_is_left_alone(mine):
    (mine / "dataset_info.json").write_text('{"splits": []}')
    assert open_source(f"tfrecord:{mine}").splits == {"train": 23, "test": 3}
    (mine / "dataset_info.json").write_text("{")
    with pytest.raises(ValueError, match=r"dataset_info.json cannot be read"):
        open_source(f"tfrecord:{mine}")


# --- going on


def test_whole_files_are_kept(mine):
    before = _files(mine)
    content = {path.name: path.read_bytes() for path in mine.glob("*.tfrecord")}
    lost, cut, flipped = (f"train-0000{shard}-of-00004.tfrecord" for shard in (0, 2, 3))
    (mine / lost).unlink()
    (mine / cut).write_bytes(content[cut][:-9])
    damaged = bytearray(content[flipped])
    damaged[100] ^= 1
    (mine / flipped).write_bytes(damaged)
    (mine / ".train-00000-of-00004.tfrecord.unfinished").write_bytes(b"half")
    convert(_arrays(), f"{mine}", shards=4)
    assert content == {path.name: path.read_bytes() for path in mine.glob("*.tfrecord")}
    after = _files(mine)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {lost, cut, flipped}
    assert not [*mine.glob(".*.unfinished")]


@pytest.mark.slow
def test_streams_go_on_in_the_middle(few_digits, converted_digits, tmp_path):
    folder = shutil.copytree(converted_digits, tmp_path / "digits")
    content = {path.name: path.read_bytes() for path in folder.glob("*.tfrecord")}
    for shard in (0, 2, 3):
        (folder / f"train-0000{shard}-of-00004.tfrecord").unlink()
    convert(few_digits, f"{folder}", shards=4)
    assert content == {
        path.name: path.read_bytes() for path in folder.glob("*.tfrecord")
    }


@pytest.mark.slow
def test_a_conversion_that_was_killed_goes_on(tmp_path):
    spec = "synthetic:16x16x3:10:2000"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "towers.input_pipeline.convert",
            spec,
            f"tfrecord:{tmp_path}",
        ]
        + ["--shards=8"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert "250 examples" in process.stdout.readline()
    process.kill()
    process.wait()
    process.stdout.close()
    kept = _files(tmp_path)
    assert 0 < len(kept) < 16
    assert not (tmp_path / "dataset_info.json").exists()
    convert(open_source(spec), f"{tmp_path}", shards=8)
    after = _files(tmp_path)
    assert len(after) == 16
    assert all(after[name] == stamp for name, stamp in kept.items())
    written = open_source(f"tfrecord:{tmp_path}")
    assert written.splits == {"train": 2000, "test": 500}
    first = next(_in_files(written, "test"))
    assert first == next(_in_order(open_source(spec), "test"))


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (_arrays(), {"shards": 3}, r"another shards: 4, now 3; expected the same"),
        (_arrays(), {"raw": "false"}, "another raw: True, now False"),
        (_arrays(), {"image_size": (3, 3)}, r"another image shape: \[6, 5, 3\], now"),
        (_arrays(22), {}, "another splits: .*22"),
        (
            ArraySource(*map(np.copy, _arrays()._tensors), num_classes=4),
            {},
            "another splits",
        ),
        (open_source("synthetic:6x5x3:4:23"), {}, "another source: arrays, now synth"),
    ],
)
def test_a_folder_of_other_arguments(source, options, message, converted):
    files = _files(converted)
    with pytest.raises(ValueError, match=message):
        convert(source, f"{converted}", **({"shards": 4} | options))
    assert _files(converted) == files


def test_a_folder_is_written_over(mine):
    (mine / "notes.txt").write_text("mine")
    convert(_arrays(22), f"{mine}", shards=1, overwrite=True)
    written = open_source(f"tfrecord:{mine}/*.tfrecord")
    assert written.splits == {"train": 22, "test": 3}
    assert len(_files(mine)) == 2
    assert (mine / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_a_source_that_has_changed(photos, tmp_path):
    convert(photos, f"{tmp_path}/out", shards=1)
    Image.new("RGB", (9, 9)).save(photos.files("train")[3])
    with pytest.raises(ValueError, match="was begun with another content; expected"):
        convert(photos, f"{tmp_path}/out", shards=1)


def test_files_of_others_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"is not empty, and towers\.input"):
            convert(_arrays(), f"{tmp_path}", overwrite=overwrite)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_source_is_not_written_over(mine):
    source = open_source(f"tfrecord:{mine}")
    with pytest.raises(ValueError, match=r"holds files of tfrecord:.*another folder"):
        convert(source, f"{mine}", overwrite=True)
    assert len(_files(mine)) == 7


# --- bad records


@pytest.mark.parametrize(
    "content", [b"\x89PNG but no more", None, slow(b""), slow(b"text")]
)
def test_a_bad_image_is_named(photos, tmp_path, content):
    path = photos.files("train")[5]
    if content is None:
        content = open(path, "rb").read()[:-300]  # cut off
    open(path, "wb").write(content)
    with pytest.raises(ValueError) as caught:
        convert(photos, f"{tmp_path}/out", shards=1, raw="false")
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "dataset_info.json").exists()


@pytest.mark.parametrize("options", [{}, {"raw": "true"}, {"image_size": (4, 4)}])
def test_a_missing_image_is_named(photos, tmp_path, options):
    path = photos.files("train")[-1]
    os.remove(path)
    with pytest.raises((ValueError, tf.errors.NotFoundError), match=path):
        convert(photos, f"{tmp_path}/out", shards=1, **options)


def test_a_bad_record_is_named(tmp_path, image_example, grey, write_tfrecord):
    records = [image_example(grey(label), label) for label in (0, 1, 2, 9)]
    path = write_tfrecord(tmp_path / "train-0", records)
    source = open_source(f"tfrecord:{path}", num_classes=3)
    with pytest.raises(ValueError, match=r"train-0: record 3 .*/label 9 is outside"):
        convert(source, f"{tmp_path}/out")
    source = open_source(f"tfrecord:{path}")
    content = bytearray(open(path, "rb").read())
    content[-8] ^= 1
    open(path, "wb").write(content)
    with pytest.raises(ValueError, match=r"train-0: record 3 .*: corrupted"):
        convert(source, f"{tmp_path}/out")


def test_bad_records_are_left_out(photos, tmp_path, capsys):
    paths = photos.files("train")
    for path in (paths[5], paths[-1]):
        open(path, "wb").write(b"no picture")
    target, folder = f"tfrecord:{tmp_path}/out", f"{tmp_path}/out"
    arguments = ["convert", f"folder:{tmp_path}/photos", target, "--shards=2"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert paths[5] in error and error.endswith(
        "; to convert without it, give --bad_records=skip --overwrite\n"
    )
    assert main([*arguments, "--overwrite", "--bad_records=skip"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert f"2 bad records left out; {folder}/bad_records.json lists them all." in said
    (listed,) = json.loads((tmp_path / "out" / "bad_records.json").read_text())
    assert [bad["path"] for bad in listed["bad"]["train"]] == [paths[5], paths[-1]]
    written = open_source(target)
    assert written.splits == {"train": len(paths) - 2, "test": photos.splits["test"]}
    good = [open(path, "rb").read() for path in paths if path not in error]
    good = [content for content in good if content != b"no picture"]
    found = [
        written.parse(record.raw[None])[0][0].numpy()
        for path in written.files("train")
        for record in written.walk(path)
    ]
    assert found == good
    assert main([*arguments, "--bad_records=skip:1"]) == 1
    assert "more bad records than the 1 to be passed over" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("synthetic:4x4x1:2", {"shards": 0}, "received shards=0 and raw='auto'"),
        ("synthetic:4x4x1:2", {"raw": "yes"}, "raw='yes': expected at least 1, and"),
        ("synthetic:4x4x1:2", {"bad_records": "no"}, "received bad_records='no': exp"),
        ("synthetic:4x4x2:2", {"raw": "false"}, "have 2 channels: expected 1, 3 or 4"),
    ],
)
def test_arguments_that_do_not_fit(spec, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert(open_source(spec), f"{tmp_path}", **options)
    assert os.listdir(tmp_path) == []


def test_raw_pixels_of_several_sizes(photos, tmp_path):
    with pytest.raises(ValueError, match="differ in size: expected one for raw pixels"):
        convert(photos, f"{tmp_path}/out", raw="true")


def test_rows_have_no_size(tmp_path):
    (tmp_path / "a.csv").write_text("x,label\n1,0\n")
    source = open_source(f"csv:{tmp_path}/a.csv")
    with pytest.raises(ValueError, match="gives rows of numbers, not images: leave"):
        convert(source, f"{tmp_path}/out", image_size=(8, 8))
    source = open_source(f"csv:{tmp_path}/a.csv", target="numbers")
    with pytest.raises(ValueError, match="a target of kind 'numbers': expected images"):
        convert(source, f"{tmp_path}/out")


# --- rows of numbers


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A CSV file with names of classes, and what became of it."""
    folder = tmp_path_factory.mktemp("rows")
    lines = [f"{k / 4},{-k},{('bee', 'ant')[k % 2]}\n" for k in range(20)]
    (folder / "a.csv").write_text("height,width,label\n" + "".join(lines))
    source = open_source(f"csv:{folder}/a.csv")
    convert(source, f"{folder}/out", shards=2)
    return source, folder / "out"


@pytest.mark.slow
def test_rows_of_numbers_are_the_same(rows):
    source, folder = rows
    written = _check_equal(source, folder)
    assert written.splits == {"train": 18, "test": 2}
    assert written.class_names == ("ant", "bee")
    assert [*written.image_fields] == ["height", "width"]


def test_rows_of_numbers_train(rows):
    _, folder = rows
    source = open_source(f"tfrecord:{folder}")
    options = {"batch_size": 9, "image_shape": source.image_shape, "training": True}
    batches = [*make_dataset(source, "train", **options).as_numpy_iterator()]
    found = np.concatenate([numbers for numbers, _ in batches])
    labels = np.concatenate([labels for _, labels in batches])
    wanted = {(k / 4, -k): 1 - k % 2 for k in range(20)}
    assert found.dtype == np.float32
    assert len({*map(tuple, found)}) == 18
    for row, label in zip(found, labels, strict=True):
        assert wanted[tuple(row)] == label


def test_numbers_that_float32_merges_are_said(tmp_path, capsys):
    lines = "".join(f"{10**9 + k},{k},{k % 2}\n" for k in range(20))
    (tmp_path / "a.csv").write_text(f"time,x,label\n{lines}")
    conversion._say_what_is_lost(open_source(f"csv:{tmp_path}/a.csv"))
    assert "tell most of the numbers apart in 'time'; take" in capsys.readouterr().out


def test_rows_without_their_info(rows, tmp_path):
    source, folder = rows
    for path in folder.glob("*.tfrecord"):
        shutil.copy(path, tmp_path)
    written = open_source(f"tfrecord:{tmp_path}")
    assert (written.encoded, written.image_shape) == (False, (2,))
    assert written.image_fields == ["features[0]", "features[1]"]
    assert sorted(_in_files(written, "train")) == sorted(_in_order(source, "train"))


# --- the program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "train", "test"),
    [("synthetic:8x8x1:2:320", 320, 80), ("digits", 1437, 360)],
)
def test_the_program_converts(tmp_path, capsys, spec, train, test):
    flags = [f"--data_dir={tmp_path}/data", "--shards=1", "--image_size=4x5"]
    target = f"tfrecord:{tmp_path}/o t"
    assert main(["convert", spec, target, *flags]) == 0
    said = capsys.readouterr().out.splitlines()
    lines = [line for line in said if "examples," in line]
    first = f"{tmp_path}/o t/test-00000-of-00001.tfrecord: {test} examples, "
    assert re.fullmatch(rf"{first}[\d.]+ KB", sorted(lines)[0])
    splits = rf"\({train:,} in train, {test} in test\)"
    count = rf"{train + test:,} records {splits} in 2 files, [\d.]+ KB"
    command = f"python -m towers.train --dataset='{target}'"
    last = f"Done: {count}, in {tmp_path}/o t; train on them: {command}"
    assert re.fullmatch(last, said[-1])
    assert len(lines) == 2
    assert open_source(target).image_shape == (4, 5, 1)
    # Nothing is left to do.
    assert main(["convert", spec, target, *flags]) == 0
    assert "examples," not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Received no SOURCE; expected it: Data set to convert"),
        (["digits"], "Received no TARGET; expected it: Where to write it"),
        (["digits", "tfrecord:"], "Received tfrecord:; expected tfrecord:FOLDER"),
        (["digits", "out"], "Received out; expected tfrecord:FOLDER"),
        (["digits", "tfrecord:out/*"], r"Received tfrecord:out/\*; expected"),
        (["digit", "tfrecord:out"], "unknown data set 'digit': did you mean digits"),
        (["digits", "tfrecord:out", "--shards=0"], "shards.*0"),
        (
            ["digits", "tfrecord:out", "--shard=1"],
            "Received --shard, .*did you mean --shards",
        ),
        (["digits", "tfrecord:out", "--image_size=x"], "expected pixels, as 224"),
        (["digits", "tfrecord:out", "--raw=maybe"], "raw.*maybe"),
        (["csv:none", "tfrecord:out"], "no file matches 'none': expected files"),
        (["digits", "tfrecord:/proc/x"], "Cannot write to the folder /proc/x: no file"),
    ],
)
def test_a_command_line_that_cannot_be_read(
    arguments, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", *arguments]) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith("towers.input_pipeline.convert: ") and error.count("\n") == 1
    )
    assert re.search(message, error)
    assert os.listdir(tmp_path) == []


def test_the_program_explains_itself(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["convert", "--help"])
    assert ended.value.code == 0
    assert "--shards" in capsys.readouterr().out


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys):
    stopped = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(program, "_run", stopped)
    assert main(["convert", "digits", "tfrecord:out"]) == 130
    said = "towers.input_pipeline.convert: stopped by Ctrl-C; run it again to go on"
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)


def test_another_conversion_into_the_folder_is_said(tmp_path):
    with open(tmp_path / ".convert.lock", "w") as lock:
        # Of another opened file, as of another process.
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="Another conversion writes into"):
            convert(_arrays(), str(tmp_path))
    convert(_arrays(), str(tmp_path), shards=1)
    assert not (tmp_path / ".convert.lock").exists()
