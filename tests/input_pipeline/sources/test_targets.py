"""What a model is to give: numbers, labels of which several hold, masks."""

import numpy as np
import pytest

from tests.input_pipeline.sources.test_tables import KINDS, _read, _write
from tests.variants import slow
from towers.input_pipeline import cached, make_dataset, open_source
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.records.checks import find_bad_records, scan_labels
from towers.input_pipeline.sources.arrays import ArraySource
from towers.input_pipeline.sources.files.record import BadRecordError
from towers.input_pipeline.sources.targets import Target

ROWS = np.arange(24, dtype=np.float32).reshape(12, 2)
BITS = (np.arange(36).reshape(12, 3) * 7 % 5 < 2).astype(int)


@pytest.mark.parametrize(
    ("y", "asked", "target"),
    [
        (np.arange(12) / 7, None, Target("numbers", 1)),
        (BITS + 0.5, None, Target("numbers", 3)),
        (np.arange(12) % 3, "numbers", Target("numbers", 1)),
        (BITS.astype(bool), None, Target("labels", 3)),
        (BITS, "labels", Target("labels", 3)),
    ],
)
def test_targets_of_arrays(y, asked, target):
    source = ArraySource(ROWS, y, ROWS[:5], y[:5], target=asked)
    assert source.target == target
    assert (source.num_classes, source.class_names) == (0, None)
    (batch,) = make_dataset(source, "test", 8)
    np.testing.assert_array_equal(batch[1], y[:5].reshape(5, -1).astype(np.float32))
    assert batch[1].dtype == "float32"


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        (BITS, {}, 'expected target="numbers" or target="labels"'),
        ([0.5, np.nan] * 6, {}, "expected each to be a number"),
        (BITS * 2, {"target": "labels"}, "expected each to be 0 or 1"),
        (np.arange(12) / 7, {"target": "class"}, "labels are float64 .*integers"),
        (np.arange(12) / 7, {"num_classes": 3}, "1 numbers, but num_classes is 3"),
        (BITS / 2, {"class_names": "ab"}, "3 numbers, but num_classes is None"),
        ([0] * 12, {"target": "tags"}, "target is 'tags': expected one of class"),
    ],
)
def test_targets_of_arrays_that_do_not_fit(y, options, message):
    with pytest.raises(ValueError, match=message):
        ArraySource(ROWS, y, **options)


def _columns(**labels):
    rows = len(next(iter(labels.values())))
    return {"a": [0.25 * n for n in range(rows)]} | labels


PRICES = [1.5, 2.25, -3.0, 1e3] * 10
WET, HOT = [0, 1] * 20, [1, 1, 0, 0] * 10


@pytest.mark.quick_one_in(2)
@KINDS
@pytest.mark.parametrize(
    ("labels", "options", "kind_of_target", "note"),
    [
        ({"price": PRICES}, {}, "numbers", "as large as 1,000, and models learn"),
        ({"wet": WET, "hot": HOT}, {"label_column": "hot,wet"}, "labels", "several"),
        slow({"wet": WET, "p": PRICES}, {"label_column": ["p", "wet"]}, "numbers", ""),
        slow({"wet": WET}, {"target": "labels"}, "labels", ""),
        slow({"year": [*range(40)]}, {"target": "numbers"}, "numbers", ""),
    ],
)
def test_targets_of_tables(tmp_path, kind, labels, options, kind_of_target, note):
    spec = _write(tmp_path, kind, _columns(**labels))
    source = open_source(spec, eval_fraction=0, **options)
    names = source.target.names
    assert source.target == Target(kind_of_target, len(labels), names)
    assert source.splits == {"train": 40} and source.num_classes == 0
    assert sorted(names) == sorted(labels) and any(note in n for n in source.notes)
    rows, found = _read(source, "train")
    assert [row[0] for row in rows] == [0.25 * n for n in range(40)]
    assert found == [list(row) for row in zip(*(labels[n] for n in names), strict=True)]
    scan_labels(source, "train")
    kept = cached(source, "memory")
    assert kept.target == source.target
    batch = next(iter(make_dataset(kept, "train", 40, training=False)))
    assert batch[1].numpy().tolist() == found


@KINDS
def test_whole_numbers_that_may_be_no_classes(tmp_path, kind):
    spec = _write(tmp_path, kind, _columns(label=[*range(40)]))
    source = open_source(spec)
    assert source.target.kind == "class"
    assert any("most rows have another one; --task=regr" in n for n in source.notes)


@KINDS
@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ({"label": PRICES}, {"target": "class"}, "has fractions in .*--task=regr"),
        ({"label": PRICES}, {"num_classes": 3}, "has fractions in"),
        ({"label": ["x", "y"] * 20}, {"target": "numbers"}, "has text in the labels'"),
        ({"label": PRICES}, {"target": "mask"}, "'mask': expected one of class, num"),
        ({"b": WET, "c": HOT}, {"label_column": "b,d"}, "label_column is 'd', but"),
        ({"b": WET, "c": HOT}, {"label_column": "b,b"}, "each once"),
        (
            {"b": WET, "c": HOT},
            {"label_column": "b,c", "target": "class"},
            "one column of classes",
        ),
        (
            {"label": PRICES},
            {"target": "numbers", "num_classes": 3},
            "target='numbers', and 3 for classes",
        ),
    ],
)
def test_targets_of_tables_that_do_not_fit(tmp_path, kind, labels, options, message):
    spec = _write(tmp_path, kind, _columns(**labels))
    with pytest.raises(ValueError, match=message):
        open_source(spec, **options)


@KINDS
def test_targets_that_are_no_numbers_are_bad_records(tmp_path, kind):
    prices = [*PRICES]
    prices[3], prices[5] = float("nan"), None if kind == "parquet" else ""
    spec = _write(tmp_path, kind, _columns(price=prices))
    fault = "nothing in the column 'price', expected a number"
    if kind == "csv":
        fault = "price is nan, expected a number"
    with pytest.raises(BadRecordError, match=fault):
        open_source(spec)
    source = open_source(spec, skip_bad=True)
    bad = [*find_bad_records(source, "train"), *find_bad_records(source, "test")]
    assert len(bad) == 2 and any(fault in record.fault for record in bad)
    found = quarantine.inspect(source, ["train", "test"], most=2)
    source = source.without(found.bad, found.splits)
    read = [y for split in source.splits for y in _read(source, split)[1]]
    assert len(read) == 38 and np.isfinite(read).all()


def test_a_label_that_is_neither_0_nor_1_is_a_bad_record(tmp_path):
    columns = _columns(wet=[0] * 150 + [2], hot=[1] * 151)
    spec = _write(tmp_path, "csv", columns)
    with pytest.raises(BadRecordError, match=r"line 152: wet is 2, expected 0 or 1"):
        open_source(spec, label_column="wet,hot", target="labels")
    # Nobody has said that they are bits.
    assert open_source(spec, label_column="wet,hot").target.kind == "numbers"


@pytest.mark.quick_one_in(4)
@KINDS
@pytest.mark.parametrize(
    ("labels", "options", "kind_of_target", "size", "note"),
    [
        # As pandas writes whole numbers that had gaps.
        ([0.0, 1.0, 2.0] * 40, {}, "class", 3, "are whole, and are taken for classes"),
        ([1.0, 2.0] * 60, {}, "class", 3, "are whole, and are taken for classes"),
        ([10.0, 20.0] * 60, {}, "numbers", 1, "--task=classification"),
        ([10.0, 20.0] * 60, {"target": "class"}, "class", 21, ""),
        ([0.0, 1.0] * 60, {"target": "numbers"}, "numbers", 1, ""),
        # What decides stands behind the first rows.
        ([0.0, 1.0] * 60 + [0.5], {}, "numbers", 1, "The target is the number in"),
        ([0, 1] * 60 + [1_700_000], {}, "numbers", 1, "is more than there are rows"),
        ([f"n{k}" for k in range(110)] * 2, {}, "class", 110, ""),
        (
            *([f"n{k}" for k in range(110)], {"label_column": "label"}),
            *("class", 110, "each row is a class of its own"),
        ),
    ],
)
def test_labels_are_guessed_by_the_whole_column(
    tmp_path, kind, labels, options, kind_of_target, size, note
):
    spec = _write(tmp_path, kind, _columns(label=labels))
    source = open_source(spec, eval_fraction=0, **options)
    assert (source.target.kind, source.target.size) == (kind_of_target, size)
    assert any(note in each for each in source.notes) or not note
    found = _read(source, "train")[1]
    if kind_of_target == "numbers":
        assert found == [[label] for label in labels]
    else:
        names = sorted({*labels}) if isinstance(labels[0], str) else range(size)
        assert [names[label] for label in found] == labels


def test_a_fraction_among_classes_is_no_class(tmp_path):
    spec = _write(tmp_path, "csv", _columns(label=[0.0, 1.0] * 20))
    path = open_source(spec).files("train")[0]
    with open(path, "a") as file:
        file.write("\n0,1.5\n")
    options = {"eval_fraction": 0, "num_classes": 2, "target": "class"}
    with pytest.raises(ValueError, match="has fractions in the labels' column"):
        open_source(spec, **options)
