"""Whatever goes over all records, before training or in its place, shows how far it is.

Each case is a pass over data; what would be shown of it, if it took long, is compared.
"""

import io
import os

import numpy as np
import pytest
from PIL import Image

from tests.progress_seen import Seen
from towers.input_pipeline import (
    BadRecordError,
    blame_records,
    checked_files,
    make_dataset,
    open_source,
    scan_labels,
)
from towers.input_pipeline.convert import conversion
from towers.input_pipeline.records import checks, quarantine
from towers.input_pipeline.sources import base

RECORDS = 4


@pytest.fixture
def seen(monkeypatch):
    return Seen(monkeypatch)


@pytest.fixture
def records(tmp_path, image_example, grey, write_tfrecord):
    """Writes two files of records; returns their spec."""
    for k in range(2):
        some = [image_example(grey(n), n) for n in range(RECORDS)]
        write_tfrecord(tmp_path / f"train-{k}", some)
    return f"tfrecord:{tmp_path}/train-*"


def _texts(folder):
    for name in ("bad", "good"):
        (folder / name).mkdir()
        for k in range(3):
            (folder / name / f"{k}.txt").write_text(f"{name} {k}")
    return f"folder:{folder}"


def _masks(folder):
    content = io.BytesIO()
    Image.fromarray(np.ones([4, 4], np.uint8)).save(content, "PNG")
    for name in ("images", "masks"):
        (folder / name).mkdir()
        for k in range(3):
            (folder / name / f"{k}.png").write_bytes(content.getvalue())
    return f"folder:{folder}"


@pytest.mark.parametrize(
    ("make", "shown", "expected"),
    [
        (_texts, "Listing ", (2, 2)),
        (_texts, "Reading folder:", (6, 6)),
        (_texts, "Tokenising folder:", (6, 6)),
        (_masks, "Reading the masks of folder:", (3, 3)),
    ],
)
def test_folders(tmp_path, seen, make, shown, expected):
    open_source(make(tmp_path), eval_fraction=0)
    assert seen.of(shown) == [expected]


def test_tokens_of_texts(tmp_path, seen):
    for k in range(3):
        (tmp_path / f"{k}.txt").write_text("a text\n" * 100)
    source = open_source(f"text:{tmp_path}/*.txt", eval_fraction=0.5, sequence_length=4)
    source.prepare()
    assert seen.of("Tokenising texts") == [(2100, 2100)]


def test_labels_that_are_counted_say_how_to_avoid_it(records, seen):
    what = f"Reading the labels of {records} to count its classes, as --num_classes is"
    open_source(records, num_classes=RECORDS)
    assert seen.of(what) == []
    open_source(records)
    assert seen.of(what) == [(2, 2)]


def test_labels_that_are_checked(records, seen):
    scan_labels(open_source(records, num_classes=RECORDS), "train")
    assert seen.of("Checking the files of ") == [(2, 2)]


def test_records_that_are_checked(records, seen):
    source = open_source(records, num_classes=RECORDS)
    found = quarantine.inspect(source, ["train"], 0)
    assert found.splits == {"train": 2 * RECORDS}
    assert seen.of("Checking tfrecord:") == [(2 * RECORDS, None)]
    os.truncate(source.files("train")[0], 300)
    quarantine.inspect(source, ["train"], 1)
    assert seen.of("Looking for bad records in ") == [(2, 2)]


def test_files_whose_times_are_looked_at(records, seen):
    base.fingerprint(open_source(records, num_classes=RECORDS))
    assert seen.of("Looking for changed files") == [(2, 2)]


def test_checksums_of_a_cache(tmp_path, seen):
    with checked_files.written(str(tmp_path / "a"), [".ids"]) as new:
        (tmp_path / f"{new}.ids").write_bytes(bytes(2**24 + 1))
    assert checked_files.are_good(str(tmp_path / "a"), [".ids"])
    assert seen.of("Computing checksums of ") == [(2, 2)] * 2


def test_records_that_are_converted(tmp_path, records, seen):
    source = open_source(records, num_classes=RECORDS)
    conversion.convert(source, str(tmp_path / "out"), shards=1)
    assert seen.of("Counting the records of ") == [(2 * RECORDS, None)]


def test_a_label_that_was_not_looked_at_is_named_as_it_is_trained_on(
    records, seen, monkeypatch
):
    """Of much data, only some labels are read before training."""
    monkeypatch.setattr(checks, "_SCAN_ALL_BELOW_MB", 0)
    monkeypatch.setattr(checks, "_SAMPLED_FILES", 1)
    monkeypatch.setattr(checks, "_SAMPLE_PER_FILE", 1)
    source = open_source(records, num_classes=RECORDS - 1)
    scan_labels(source, "train")
    data = make_dataset(source, "train", 4, image_shape=(8, 8, 3))
    wanted = f"train-0: record 3 .* {RECORDS - 1} is outside"
    with pytest.raises(BadRecordError, match=wanted), blame_records(source):
        list(data)
    assert seen.of("Looking for the record that cannot be read") == [(0, None)]
