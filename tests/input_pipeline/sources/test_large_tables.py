"""Tables that do not fit in memory, and what is kept of the pass over them."""

import gzip
import os

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import csv, parquet

from towers.input_pipeline import (
    cached,
    find_bad_record,
    make_dataset,
    measure_scaling,
    open_source,
)
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.sources import memory
from towers.input_pipeline.sources.files.record import Record
from towers.input_pipeline.sources.tables import (
    csv_file,
    reading,
    row_groups,
    table_pass,
)
from towers.machine import limits

pytestmark = pytest.mark.quick_one_in(2)


def table(rows=500):
    """Columns of numbers and of names, and classes by name."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=rows).round(3)
    return pa.table(
        {
            "x": x,
            "colour": rng.choice(["red", "green", "blue"], rows),
            "kind": np.where(x > 0, "owl", "cat"),
        }
    )


def write_csv(path):
    csv.write_csv(table(), path)


def write_gzip(path):
    csv.write_csv(table(), path)
    path.write_bytes(gzip.compress(path.read_bytes()))


def write_parquet(path):
    parquet.write_table(table(), path, row_group_size=64)


@pytest.fixture
def no_room(monkeypatch):
    """A machine whose memory has no room for rows, and blocks of some rows each."""
    monkeypatch.setattr(limits, "free_memory", lambda: 0.0)
    monkeypatch.setattr(limits, "SMALL", 0)
    monkeypatch.setattr(csv_file, "_BLOCK_BYTES", 1000)


WAYS = {"csv": write_csv, "csv.gz": write_gzip, "parquet": write_parquet}


@pytest.fixture(params=WAYS)
def spec(request, tmp_path):
    """A file of each format."""
    path = tmp_path / f"rows.{request.param}"
    WAYS[request.param](path)
    return f"{'parquet' if request.param == 'parquet' else 'csv'}:{path}"


def read(source, split="train", **options):
    """All examples of a split, in order."""
    data = make_dataset(source, split, 32, exact=True, **options)
    return [
        (float(x), int(colour), int(y))
        for some, labels in data.as_numpy_iterator()
        for x, colour, y in zip(
            some["dense"][:, 0], some["colour"], labels, strict=True
        )
    ]


def is_known(source):
    """Whether a source was not read."""
    return any("known from an earlier run" in note for note in source.notes)


@pytest.mark.slow
def test_rows_from_files_are_those_in_memory(spec, no_room, monkeypatch):
    far = open_source(spec)
    assert far.in_memory() is None
    assert cached(far, room=lambda *_: (0.0, 0.0)) is far
    monkeypatch.undo()
    near = cached(open_source(spec))
    assert near.origin is not near
    for split in ("train", "test"):
        some = read(far, split, training=False)
        assert some == read(near, split, training=False) and len(some) > 10
    shuffled = read(far, seed=1)
    assert shuffled == read(far, seed=1) != read(far, seed=2)
    assert sorted(shuffled) == sorted(read(near, seed=1))
    # From any position, as a run goes on that was killed.
    assert read(far, seed=1, start_record=100) == shuffled[100:]


def test_findings_that_cannot_be_written_are_said(spec, no_room, tmp_path, capsys):
    (tmp_path / "file").touch()
    open_source(spec, findings=f"{tmp_path}/file/findings")
    said = f"cannot be written to {tmp_path}/file/findings.npz (File exists): the next"
    assert said in capsys.readouterr().err


def test_rows_of_some_blocks(spec, no_room):
    source = open_source(spec, eval_fraction=0)
    in_order, shuffled = (
        source._read_rows([1, 0], "train", np.array(seeds, np.int64))
        for seeds in ([], [1, 2])
    )
    assert [*in_order[0]] == [*range(sum(block.rows for block in source._blocks[:2]))]
    assert [*shuffled[0]] != [*in_order[0]]
    to = np.argsort(shuffled[0])
    for part, wanted in zip(shuffled, in_order, strict=True):
        np.testing.assert_array_equal(part[to], wanted)


@pytest.mark.quick_one_in(6)
@pytest.mark.parametrize(("buffer_mb", "at_once"), [(0, 4), (1, 500)])
def test_rows_are_mixed_within_some_blocks(spec, no_room, buffer_mb, at_once):
    """As many as the buffer has room for, and at least four."""
    source = open_source(spec, eval_fraction=0)
    assert [*source.numbers("train")] == [*range(500)]
    seeds = tf.constant([1, 2], tf.int64)

    def numbers(**options):
        batches = source.batches("train", 7, buffer_mb=buffer_mb, **options)
        return [int(number) for some, _ in batches for number in some]

    assert numbers() == [*range(500)]
    shuffled = numbers(seeds=seeds)
    assert sorted(shuffled) == [*range(500)]
    firsts = [located.first for located in source._blocks]
    block_of = np.searchsorted(firsts, shuffled, side="right")
    assert len({*block_of[:200]}) == min(at_once, len(firsts))
    steps = np.diff(shuffled)
    assert (steps != 1).mean() > 0.9
    for start in (1, 63, 200, 499, 500):
        assert numbers(seeds=seeds, start=start) == shuffled[start:]


@pytest.mark.parametrize(("buffer_mb", "at_once"), [(0, 4), (1, 5), (100, 30)])
def test_pictures_are_read_by_their_size(tmp_path, encode, buffer_mb, at_once):
    rng = np.random.default_rng(1)
    noise = [encode(rng.integers(0, 256, [58, 58, 3], np.uint8)) for _ in range(10)]
    rows = {"image": noise * 30, "label": [0, 1] * 150}
    parquet.write_table(pa.table(rows), tmp_path / "a.parquet", row_group_size=10)
    source = open_source(f"parquet:{tmp_path}/a.parquet", eval_fraction=0)
    assert source.encoded and 9_000 < source.record_bytes("train") < 11_000
    assert source.reads_whole("train") == "a group of rows is read as a whole"
    seeds = tf.constant([1, 2], tf.int64)
    batches = source.batches("train", 10, seeds=seeds, buffer_mb=buffer_mb)
    numbers = [int(number) for some, _ in batches for number in some]
    assert sorted(numbers) == [*range(300)]
    assert len({number // 10 for number in numbers[: 10 * at_once]}) == at_once


def test_pictures_that_are_missing_or_named_twice(tmp_path, encode):
    picture = encode(np.zeros([8, 8, 3], np.uint8))
    rows = {"image": [picture, None, picture], "label": [0, 1, 0]}
    # Without statistics, the footer does not tell that one is missing.
    options = {"write_statistics": False}
    parquet.write_table(pa.table(rows), tmp_path / "a.parquet", **options)
    spec = f"parquet:{tmp_path}/a.parquet"
    source = open_source(spec, skip_bad=True, eval_fraction=0)
    found = quarantine.inspect(source, ["train"], 1)
    assert [record.place for record in found.bad["train"]] == ["row 1"]
    for named, message in (
        (
            {"feature_columns": ["label"]},
            "=label: expected images or numbers, so leave",
        ),
        ({"label_column": "image"}, "received image for the images and for the labels"),
    ):
        with pytest.raises(ValueError, match=message):
            open_source(spec, image_column="image", **named)


@pytest.mark.parametrize("whole_group", [False, True])
def test_bad_pictures_are_passed_over(tmp_path, encode, whole_group):
    path = tmp_path / "a.parquet"
    pictures = [encode(np.full([8, 8, 3], k, np.uint8)) for k in range(60)]
    if not whole_group:
        pictures[31] = pictures[31][:40]
    rows = {"image": pictures, "label": [0, 1] * 30}
    parquet.write_table(
        pa.table(rows), path, row_group_size=10, compression="none", use_dictionary=[]
    )
    if whole_group:
        group = parquet.ParquetFile(path).metadata.row_group(3)
        begin = group.column(0).data_page_offset
        content = bytearray(path.read_bytes())
        content[begin : begin + 20] = b"\xff" * 20
        path.write_bytes(content)
    source = open_source(f"parquet:{path}", skip_bad=True, eval_fraction=0)
    found = quarantine.inspect(source, ["train"], 20)
    (bad,) = found.bad["train"]
    lost = 10 if whole_group else 1
    assert (bad.number, bad.count) == ((30, 10) if whole_group else (31, 1))
    assert str(bad).count("row group 3") == whole_group and "\n" not in str(bad)
    good = source.without(found.bad, found.splits)
    assert good.splits == {"train": 60 - lost}
    data = make_dataset(good, "train", 16, image_shape=(8, 8, 3), exact=True)
    assert sum(len(labels) for _, labels in data) == 60 - lost


def test_bad_rows_of_one_file_are_none_of_another(no_room, tmp_path):
    for name, bad in (("train", 7), ("test", 3)):
        rows = [f"{k},{k % 2}" for k in range(120)]
        rows[bad] = "zz,0"
        (tmp_path / f"{name}.csv").write_text("\n".join(["x,label", *rows]))
    source = open_source(f"csv:{tmp_path}/*.csv", skip_bad=True)
    for split, row in (("train", 7), ("test", 3)):
        (path,) = source.files(split)
        bad = [record for record in source.walk(path) if record.fault]
        assert [record.number for record in bad] == [row]
        assert bad[0].path == path
    good = source.without(source.faults, source.good)
    assert all(find_bad_record(good, split) is None for split in ("train", "test"))


def test_a_row_group_that_cannot_be_read_again_is_said(no_room, tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet")
    source = open_source(f"parquet:{tmp_path}/a.parquet")

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(row_groups, "_open", fail)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Input/output error"):
        read(source, training=False)


def test_rows_that_have_become_bad_are_no_missing_numbers(no_room, tmp_path):
    path = tmp_path / "a.csv"
    write_csv(path)
    source = open_source(f"csv:{path}")
    state = path.stat()
    lines = path.read_text().splitlines()
    lines[200] = "z" * lines[200].index(",") + lines[200][lines[200].index(",") :]
    path.write_text("\n".join(lines) + "\n")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_size == state.st_size
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"changed.*row 199: x"):
        read(source, training=False)


@pytest.mark.parametrize("first", [True, False])
def test_a_file_with_nothing_but_its_header(tmp_path, first):
    rows = "".join(f"{k},{k % 2}\n" for k in range(50))
    (tmp_path / "b.csv").write_text(f"x,label\n{rows}")
    empty = tmp_path / ("a.csv" if first else "c.csv")
    empty.write_text("x,label\n")
    source = open_source(f"csv:{tmp_path}/*.csv", eval_fraction=0)
    assert source.splits == {"train": 50} and source.image_fields == ["x"]
    assert f"{empty} holds no record." in source.notes


def test_an_order_over_bad_records_that_overlap(no_room, tmp_path):
    path = tmp_path / "rows.csv"
    write_csv(path)
    source = open_source(f"csv:{path}", eval_fraction=0)
    bad = [
        Record("", "", number, fault="bad", count=count)
        for number, count in ((490, 99), (20, 1), (5, 30), (10, 2), (0, 1))
    ]
    good = source.without({"train": bad}, {"train": 459})
    assert [*good.numbers("train")] == [*range(1, 5), *range(35, 490)]


@pytest.mark.slow
def test_rows_that_are_passed_over_are_in_no_batch(no_room, tmp_path):
    path = tmp_path / "rows.csv"
    write_csv(path)
    lines = path.read_text().splitlines()
    lines[40] = lines[290] = "1e400,red,owl"
    path.write_text("\n".join(lines))
    source = open_source(f"csv:{path}", skip_bad=True)
    whole = {split: {*source.numbers(split)} for split in ("train", "test")}
    counts = {split: len(source.faults.get(split, ())) for split in whole}
    splits = {split: len(whole[split]) - counts[split] for split in whole}
    good = source.without(source.faults, splits)
    bad = {record.number for some in source.faults.values() for record in some}
    assert len(bad) == 2
    for split, numbers in whole.items():
        expected = sorted(numbers - bad)
        assert [*good.numbers(split)] == expected
        seeds = tf.constant([5, 6], tf.int64)
        read = [
            int(number)
            for some, _ in good.batches(split, 32, seeds=seeds, buffer_mb=1)
            for number in some
        ]
        assert sorted(read) == expected
        later = good.batches(split, 32, seeds=seeds, buffer_mb=1, start=33)
        assert [int(number) for some, _ in later for number in some] == read[33:]


@pytest.mark.quick_one_in(4)
def test_a_pass_that_was_made_is_not_made_again(spec, no_room, tmp_path, monkeypatch):
    known = str(tmp_path / "run" / "findings")
    first = open_source(spec, findings=known)
    assert os.path.isfile(f"{known}.npz")

    def refuse(*_):
        raise AssertionError("the rows are read again")

    with monkeypatch.context() as patched:
        patched.setattr(reading, "read_parts", refuse)
        second = open_source(spec, findings=known)
    said = f"What {spec} holds is known from an earlier run."
    assert [note for note in second.notes if note != said] == [*first.notes]
    assert second.notes.count(said) == 1
    assert second.vocabularies == first.vocabularies
    assert second.class_names == first.class_names == ("cat", "owl")
    np.testing.assert_array_equal(second.moments.mean, first.moments.mean)
    assert read(second, seed=1) == read(first, seed=1)


def test_another_file_or_other_columns_are_read(spec, no_room, tmp_path, capsys):
    known = str(tmp_path / "findings")
    open_source(spec, findings=known)
    other = open_source(spec, findings=known, feature_columns=["x"])
    assert not is_known(other)
    path = spec.partition(":")[2]
    open_source(spec, findings=known)
    os.utime(path, (1, 1))
    assert not is_known(open_source(spec, findings=known))
    with open(f"{known}.npz", "r+b") as file:
        file.truncate(100)
    assert not is_known(open_source(spec, findings=known))
    assert "findings.npz cannot be read" in capsys.readouterr().err


def test_bad_rows_are_known_from_an_earlier_run(no_room, tmp_path):
    path = tmp_path / "rows.csv"
    write_csv(path)
    lines = path.read_text().splitlines()
    lines[40], lines[90] = "?,red", "1e400,red,owl"
    path.write_text("\n".join(lines))
    options = {"findings": str(tmp_path / "findings"), "skip_bad": True}
    first, second = (open_source(f"csv:{path}", **options) for _ in range(2))
    assert is_known(second) and not is_known(first)
    assert first.faults == second.faults
    (bad,) = {str(record) for some in first.faults.values() for record in some} - {
        f"{path}: line 41: has 2 fields, expected 3 as the header"
    }
    assert bad.startswith(f"{path}: line 91: x is inf")


def test_a_table_that_changes_while_it_is_read_is_said(spec, no_room):
    source = open_source(spec)
    path = spec.partition(":")[2]
    os.utime(path, (1, 1))
    with pytest.raises(Exception, match="has changed since the run began"):
        read(source)


def test_rows_are_let_go_of_where_they_are_not_kept(spec):
    source = open_source(spec)
    assert cached(source, "none") is source
    assert source.in_memory() is None


def test_what_is_free_decides_nothing_of_a_run_to_repeat(spec, monkeypatch):
    kept = cached(open_source(spec), deterministic=True)
    assert kept.note.endswith("of numbers kept in memory")
    # Too large to be kept on any machine.
    monkeypatch.setattr(limits, "SMALL", 100)
    source = open_source(spec)
    assert cached(source, deterministic=True) is source


def test_hosts_keep_rows_together_or_not_at_all(spec, no_room, monkeypatch):
    monkeypatch.undo()
    source = open_source(spec)
    asked = []

    def another_host_cannot(fits):
        asked.append(fits)
        return False

    kept = cached(source, room=lambda *_: (0.0, 0.0), agree=another_host_cannot)
    assert kept is source and asked == [True]


@pytest.mark.parametrize("room", [None, 0])
def test_a_table_that_is_all_for_evaluation(tmp_path, monkeypatch, room):
    if room is not None:
        monkeypatch.setattr(limits, "free_memory", lambda: float(room))
        monkeypatch.setattr(limits, "SMALL", room)
    csv.write_csv(table(), tmp_path / "val.csv")
    source = open_source(f"csv:{tmp_path}/val.csv")
    kept = cached(source, room=lambda *_: (0.0, 0.0)) if room == 0 else cached(source)
    assert source.splits == kept.splits == {"test": 500}
    assert len(read(kept, "test", training=False)) == 500


def test_too_many_texts_are_no_category_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(table_pass, "_MOST_TEXTS", 50)
    monkeypatch.setattr(csv_file, "_BLOCK_BYTES", 400)
    names = [f"name {k % 60}" for k in range(900)]
    rows = "".join(f"{k},{name},{k % 2}\n" for k, name in enumerate(names))
    (tmp_path / "a.csv").write_text(f"x,name,label\n{rows}")
    spec = f"csv:{tmp_path}/a.csv"
    source = open_source(spec)
    assert not source.vocabularies and source.image_fields == ["x"]
    asked = open_source(spec, feature_columns=["x", "name"])
    assert len(asked.vocabularies["name"]) == 60


def test_findings_that_are_damaged_change_nothing(spec, no_room, tmp_path, capsys):
    known, file = str(tmp_path / "findings"), tmp_path / "findings.npz"
    first = open_source(spec, findings=known)
    content = dict(np.load(file))
    del content["target_0"]
    np.savez(file, **content)
    second = open_source(spec, findings=known)
    assert "findings.npz cannot be read" in capsys.readouterr().err
    np.testing.assert_array_equal(second.moments.count, first.moments.count)
    file.write_bytes(b"")
    assert not is_known(open_source(spec, findings=known))


@pytest.mark.parametrize("missing", ["mean", "median"])
def test_a_column_without_any_number_is_left_out(tmp_path, missing):
    columns = {"x": [1.0, 2.0] * 10, "none": [None] * 20, "label": [0, 1] * 10}
    types = [("x", pa.float64()), ("none", pa.float64()), ("label", pa.int64())]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table(columns, schema=pa.schema(types)), path)
    source = open_source(f"parquet:{path}", missing=missing)
    assert source.image_fields == ["x"]
    assert "Left out, because empty: 'none'." in source.notes
    asked = open_source(
        f"parquet:{path}", missing=missing, feature_columns=["x", "none"]
    )
    assert measure_scaling(asked).fill[1] == 0


def test_arrays_of_users_are_copied():
    x = memory.zeros((4096, 64), np.float64)
    own = np.array(x)
    tensors = [*map(memory.as_tensor, (x, own))]
    x[0, 0] = own[0, 0] = 7
    assert [float(tensor[0, 0]) for tensor in tensors] == [7, 0]


@pytest.mark.parametrize(
    ("labels", "names"),
    [(["1_0", "1_1"], ("1_0", "1_1")), (["yes", "no", "nan"], ("nan", "no", "yes"))],
)
def test_what_only_python_takes_for_a_number_is_a_name(tmp_path, labels, names):
    rows = "".join(f"{k},{labels[k % len(labels)]}\n" for k in range(60))
    (tmp_path / "a.csv").write_text(f"x,label\n{rows}")
    assert open_source(f"csv:{tmp_path}/a.csv").class_names == names


def test_a_bad_cell_changes_no_text_of_its_block(tmp_path):
    rows = ["a\u00a0,1,0", " a,2,1"] * 20
    for name, more in (("good", []), ("bad", ["b,x,1"])):
        text = "\n".join(["name,x,label", *rows, *more])
        (tmp_path / f"{name}.csv").write_text(text)
    good, bad = (
        open_source(f"csv:{tmp_path}/{name}.csv", skip_bad=True)
        for name in ("good", "bad")
    )
    assert bad.faults and bad.vocabularies["name"] == good.vocabularies["name"]
