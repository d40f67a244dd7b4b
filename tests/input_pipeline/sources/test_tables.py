"""Columns of CSV and Parquet; what is held out; what is said of both."""

import re

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import parquet

from tests.variants import slow
from towers.input_pipeline import open_source, scan_labels
from towers.input_pipeline.records.checks import find_bad_records
from towers.input_pipeline.sources.files import splits
from towers.input_pipeline.sources.files.record import FILE, BadRecordError
from towers.input_pipeline.specs import takes


def _write(folder, kind, columns, name="a"):
    """Writes columns, and returns the spec of all files there."""
    path = folder / f"{name}.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.table(columns), path, row_group_size=7)
    else:
        rows = [
            ",".join(columns),
            *(",".join(map(str, r)) for r in zip(*columns.values(), strict=True)),
        ]
        path.write_text("\n".join(rows))
    return f"{kind}:{folder}/*"


def _read(source, split):
    """Rows and labels, by the batch as the pipeline takes them."""
    rows, labels = [], []
    for _, records in source.batches(split, 8):
        row, label = source.parse(records)
        rows += row.numpy().tolist()
        labels += label.numpy().tolist()
    return rows, labels


KINDS = pytest.mark.parametrize("kind", ["csv", "parquet"])


@KINDS
@pytest.mark.parametrize("option", ["label_column", "feature_columns"])
def test_a_column_that_is_not_there(tmp_path, kind, option):
    spec = _write(tmp_path, kind, {"width": [1, 2], "label": [0, 1]})
    name = ["wdith"] if option == "feature_columns" else "wdith"
    with pytest.raises(ValueError, match=r"'wdith', but .* has the columns width, lab"):
        open_source(spec, **{option: name})


@pytest.mark.parametrize("labels", [["a", "b"], [0, 1]])
def test_labels_of_which_only_the_first_can_be_read(tmp_path, labels):
    """The guess needs all labels; a group that is damaged further down is named."""
    rng, path = np.random.default_rng(0), tmp_path / "a.parquet"
    columns = {"x": rng.random(9_000), "label": rng.choice(labels, 9_000)}
    options = {"data_page_size": 500, "use_dictionary": False, "compression": "gzip"}
    parquet.write_table(pa.table(columns), path, **options)
    column = parquet.ParquetFile(path).metadata.row_group(0).column(1)
    end = column.data_page_offset + column.total_compressed_size
    content = bytearray(path.read_bytes())
    content[end - 60 : end] = bytes(60)
    path.write_bytes(content)
    with pytest.raises(BadRecordError, match=f"{path}: row group 0: cannot be r"):
        open_source(f"parquet:{path}")


def test_an_image_column_that_is_not_there(tmp_path):
    spec = _write(tmp_path, "parquet", {"a": [1, 2], "label": [0, 1]})
    with pytest.raises(
        ValueError, match=r"image_column is 'img', but .* columns a, label"
    ):
        open_source(spec, image_column="img")


@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
@pytest.mark.parametrize("option", ["image_column", "label_column"])
def test_a_field_that_is_not_there(
    tmp_path, kind, option, image_example, grey, write_tfrecord
):
    if kind == "tfrecord":
        write_tfrecord(tmp_path / "a", [image_example(grey(1), 0)])
    else:
        from array_record.python import array_record_module

        writer = array_record_module.ArrayRecordWriter(str(tmp_path / "a"), "")
        writer.write(image_example(grey(1), 0))
        writer.close()
    fields = r"has the fields image/class/label \(int64\), image/encoded \(bytes\) but"
    with pytest.raises(ValueError, match=f"{fields} .*foo.*--{option}"):
        open_source(f"{kind}:{tmp_path}/a", **{option: "foo"})


@pytest.mark.parametrize(
    ("spec", "option", "kinds"),
    [
        ("digits", {"image_column": "a"}, "tfrecord:, array_record:, parquet:"),
        ("folder:a", {"label_column": "a"}, "tfds:, tfrecord:, array_record:, parq"),
        ("csv:a", {"image_column": "a"}, "tfrecord:, array_record:, parquet:"),
        ("csv:a", {"train_split": "a"}, "digits, tfds:"),
        ("tfrecord:a", {"feature_columns": ["a"]}, "tfds:, parquet:, csv:"),
        ("tfrecord:a", {"eval_fraction": 0.5}, "parquet:, csv:, npz:, npy:"),
        ("synthetic:2x2x1:2", {"num_classes": 2}, "tfds:, tfrecord:, array_record:, p"),
    ],
)
def test_what_does_not_apply_is_an_error(spec, option, kinds):
    (name,) = option
    with pytest.raises(ValueError, match=f"received {name} for .*only for {kinds}"):
        open_source(spec, **option)
    assert not takes(spec, name)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"image/encoded": b"x", "image/class/label": b"cat"},
            "label' of bytes: ex",
        ),
        (
            {"image/encoded": b"x", "image/class/label": 0.5},
            "label' of float: ex",
        ),
        (
            {"image/encoded": 3, "image/class/label": 0},
            "encoded' of int64: ex",
        ),
    ],
)
def test_a_field_of_another_type(tmp_path, fields, said, write_tfrecord):
    of = {bytes: "bytes_list", float: "float_list", int: "int64_list"}
    features = {
        name: tf.train.Feature(**{of[type(value)]: {"value": [value]}})
        for name, value in fields.items()
    }
    example = tf.train.Example(features=tf.train.Features(feature=features))
    write_tfrecord(tmp_path / "a", [example.SerializeToString()])
    with pytest.raises(ValueError, match=said):
        open_source(f"tfrecord:{tmp_path}/a")


def test_a_table_that_is_called_a_tfrecord(tmp_path):
    (tmp_path / "a.tfrecord").write_text("a,b,label\n1,2,0\n3,4,1\n")
    with pytest.raises(ValueError, match=r"no header of a TFRecord, but b'a,b,lab"):
        open_source(f"tfrecord:{tmp_path}/a.tfrecord")


@KINDS
def test_columns_that_are_chosen(tmp_path, kind):
    columns = {"id": [7, 9], "name": ["x", "y"], "b": [1, 2], "a": [3, 4], "y": [1, 0]}
    spec = _write(tmp_path, kind, columns)
    source = open_source(spec, feature_columns=["a", "b"], label_column="y")
    assert (source.image_shape, source.image_fields) == ((2,), ["a", "b"])
    assert _read(source, "train") == ([[3, 1], [4, 2]], [1, 0])
    for wrong in (["a", "y"], ["a", "a"], []):
        with pytest.raises(ValueError, match="expected at least one, each once, and"):
            open_source(spec, feature_columns=wrong, label_column="y")
    with pytest.raises(TypeError, match="unexpected argument 'label_key'"):
        open_source(spec, label_key="y", label_column="y")


@KINDS
def test_a_column_of_text(tmp_path, kind):
    columns = {
        "Name": [f"n{row}" for row in range(20)],
        "age": [*range(0, 40, 2)],
        "Sex": ["f", "m"] * 10,
        "label": [0, 1] * 10,
    }
    spec = _write(tmp_path, kind, columns)
    source = open_source(spec, label_column="label")
    # Texts that repeat are categories.
    assert source.image_fields == ["age"] and source.input_kind == "columns"
    assert source.vocabularies == {"Sex": ("f", "m")}
    (note,) = (note for note in source.notes if note.startswith("Left out, because"))
    assert re.search(r"'Name'\. --feature_columns=age,Sex,Name takes", note)
    assert any("that repeat: 'Sex'; --feature_columns=age" in n for n in source.notes)
    # Without any number, nothing is left to learn from.
    (tmp_path / "texts").mkdir()
    texts = {"Name": ["Ann", "Bo"], "label": [0, 1]}
    texts = _write(tmp_path / "texts", kind, texts)
    with pytest.raises(
        ValueError, match=r"'Name': name columns to learn from"
    ) as caught:
        open_source(texts)
    # Which would hint at passing over the row.
    assert not isinstance(caught.value, BadRecordError)
    # What is named is wanted, and becomes a category.
    assert open_source(spec, feature_columns=["age", "Sex"]).input_kind == "columns"


@pytest.mark.parametrize("kind", ["csv", slow("parquet")])
def test_names_of_classes(tmp_path, kind):
    names = ["owl", "cat", "dog", "cat"]
    spec = _write(tmp_path, kind, {"a": [1, 2, 3, 4], "animal": names})
    source = open_source(spec)
    assert (source.num_classes, source.class_names) == (3, ("cat", "dog", "owl"))
    assert _read(source, "train") == ([[1], [2], [3], [4]], [2, 0, 1, 0])
    scan_labels(source, "train")
    assert source.notes == (
        "The labels are the column 'animal', the last one; --label_column (in Python, "
        "label_column) names another.",
    )
    others = open_source(spec, class_names=("dog", "bat", "cat", "owl"))
    assert (others.num_classes, others.notes) == (4, source.notes)
    assert _read(others, "train")[1] == [3, 2, 0, 2]
    with pytest.raises(ValueError, match="has the class 'dog' in the column 'animal'"):
        open_source(spec, class_names=("owl", "cat"))
    assert open_source(spec, num_classes=3).class_names == ("cat", "dog", "owl")
    with pytest.raises(
        ValueError, match=r"num_classes is 4, but .* has 3 classes, cat"
    ):
        open_source(spec, num_classes=4)


@KINDS
def test_text_that_is_no_class(tmp_path, kind):
    names = [f"n{i}" for i in range(12)]
    spec = _write(tmp_path, kind, {"a": [*range(0, 24, 2)], "name": names})
    with pytest.raises(
        ValueError, match=r"another text in each row of .* --label_colu"
    ):
        open_source(spec)


@KINDS
def test_what_is_said_of_columns_and_labels(tmp_path, kind):
    columns = {"n": [*range(5, 17)], "a": [1, 4] * 6, "label": [1, 2, 3] * 4}
    source = open_source(_write(tmp_path, kind, columns))
    assert source.num_classes == 4
    assert source.notes[0].startswith("The column 'n' counts the rows, from 5, and")
    assert "--feature_columns=a (in Python" in source.notes[0]
    assert source.notes[1].startswith(
        "The labels are 1 to 3: 4 classes, and 0 never appears; number the classes"
    )
    assert source.notes[-1].startswith(
        "10% of the rows, 1 in all, are held out for val"
    )


@pytest.mark.parametrize("kind", [slow("csv"), "parquet"])
def test_a_tenth_is_held_out(tmp_path, kind):
    for file in range(2):
        values = [*range(100 * file, 100 * file + 25)]
        _write(tmp_path, kind, {"a": values, "label": [0, 0, 0, 0, 1] * 5}, f"f{file}")
    source = open_source(f"{kind}:{tmp_path}/*")
    assert source.splits == {"train": 44, "test": 6}
    (train, _), (test, labels) = _read(source, "train"), _read(source, "test")
    # One of each ten; of the second file each a row earlier, as files may have few.
    held_out = {9, 15, 21, 108, 114, 120}
    assert {row[0] for row in test} == held_out
    assert {row[0] for row in train} == {*range(25), *range(100, 125)} - held_out
    # These come in turn, and every tenth is one and the same.
    assert {*labels} == {0, 1}
    for split in source.splits:
        walked = [*source.walk(source.files(split)[1], split)]
        numbers = {record.number - FILE for record in walked}
        held = {8, 14, 20}
        assert numbers == (held if split == "test" else {*range(25)} - held)
    assert open_source(f"{kind}:{tmp_path}/*", eval_fraction=0).splits == {"train": 50}
    many = open_source(f"{kind}:{tmp_path}/*", eval_fraction=0.5, num_classes=2)
    assert many.splits["test"] in (len(_read(many, "test")[0]), None)
    _write(tmp_path, kind, {"a": [1], "label": [1]}, "test")
    assert open_source(f"{kind}:{tmp_path}/*").splits == {"train": 50, "test": 1}
    with pytest.raises(ValueError, match="files that are held out by their names, suc"):
        open_source(f"{kind}:{tmp_path}/*", eval_fraction=0.2)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 0.015])
def test_the_fraction_is_counted_as_it_is_taken(share):
    for first in (0, 3 * FILE):
        held = splits.is_held_out(first + np.arange(997), share)
        assert held.sum() == splits.count_held_out(first, 997, share)
        assert abs(held.sum() - 997 * share) < 2
    in_turn = np.arange(10_000)[splits.is_held_out(np.arange(10_000), share)] % 10
    assert np.bincount(in_turn).min() > 0.4 * len(in_turn) / 10
    of_files = splits.is_held_out(np.arange(1000) * FILE, share)
    assert abs(of_files.sum() - 1000 * share) < 2
    with pytest.raises(ValueError, match="eval_fraction is 1: expected at least 0 and"):
        splits.check_fraction(1)


def test_a_folder_says_what_it_holds_out(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(20):
            (tmp_path / name / f"{i:02}.png").touch()
    source = open_source(f"folder:{tmp_path}")
    assert source.splits == {"train": 36, "test": 4}
    assert source.notes[0].startswith("10% of the files of each class, 4 in all, are")
    source = open_source(f"folder:{tmp_path}", eval_fraction=0.25)
    assert source.splits == {"train": 30, "test": 10}
    assert not open_source(f"folder:{tmp_path}", eval_fraction=0).notes


@pytest.mark.parametrize(
    ("labels", "many"), [([-1, 1] * 6, True), ([-1, 0] + [1] * 10, False)]
)
def test_many_bad_records_are_told_from_one(tmp_path, labels, many):
    spec = _write(tmp_path, "csv", {"a": [1] * 12, "label": labels})
    with pytest.raises(BadRecordError, match="line 2: label -1 is negative") as caught:
        open_source(spec)
    assert caught.value.many is many
    assert ("; and 5 of the 11 behind it cannot be used" in str(caught.value)) is many


def test_columns_of_one_name(tmp_path):
    (tmp_path / "a.csv").write_text("a,a,label\n1,2,0\n")
    with pytest.raises(
        ValueError, match=r"a\.csv has two columns 'a': expected different"
    ):
        open_source(f"csv:{tmp_path}/a.csv")


def test_some_labels_are_numbers_and_some_are_names(tmp_path):
    (tmp_path / "a.csv").write_text("a,label\n1,0\n2,bee\n")
    with pytest.raises(
        ValueError, match="'bee', expected a whole number from 0; where"
    ):
        open_source(f"csv:{tmp_path}/a.csv")


def test_labels_that_are_no_classes(tmp_path):
    (tmp_path / "a.csv").write_text("a,label\n1,0\n2,9999999999\n")
    with pytest.raises(
        ValueError, match="labels up to 9,999,999,999 in 'label', which is"
    ):
        open_source(f"csv:{tmp_path}/a.csv", target="class")
    # Nobody has said that they are.
    source = open_source(f"csv:{tmp_path}/a.csv")
    assert source.target.kind == "numbers"
    assert any("9,999,999,999, is more than there are" in n for n in source.notes)
    assert (
        open_source(f"csv:{tmp_path}/a.csv", num_classes=10**10).num_classes == 10**10
    )


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (b"", "line 10: nothing in the column 'kind', expected the name of a class"),
        (
            b"caf\xe9",
            r"line 10: kind is 'caf.', expected text in UTF-8",
        ),
    ],
)
def test_names_of_classes_that_are_bad(tmp_path, last, said):
    rows = [b"%d,%s" % (k, b"owl" if k % 3 else b"cat") for k in range(8)]
    (tmp_path / "a.csv").write_bytes(b"\n".join([b"a,kind", *rows, b"9," + last]))
    with pytest.raises(ValueError, match=said):
        open_source(f"csv:{tmp_path}/a.csv", eval_fraction=0)


@KINDS
def test_an_empty_cell_is_said_with_what_to_do(tmp_path, kind):
    columns = {"a": [1, None, 3], "b": [1, 2, 3], "label": [0, 1, 0]}
    spec = _write(tmp_path, kind, columns)
    if kind == "csv":
        path = tmp_path / "a.csv"
        path.write_text(path.read_text().replace("None", ""))
    source = open_source(spec, eval_fraction=0)
    assert source.missing_columns == ("a",)
    options = {"eval_fraction": 0, "missing": "fail", "skip_bad": True}
    (bad,) = find_bad_records(open_source(spec, **options), "train")
    assert (
        "write one, such as the column's mean, in every such row, or lea" in bad.fault
    )


@KINDS
@pytest.mark.parametrize("name", ["city/name", " "])
def test_names_of_categories_that_keras_refuses(tmp_path, kind, name):
    spec = _write(tmp_path, kind, {"a": [1, 2], name: ["x", "y"], "label": [0, 1]})
    if kind == "csv":
        name = name.strip()  # spaces around it are no part of it
    with pytest.raises(ValueError, match=f"named '{name}', which Keras .* rename the"):
        open_source(spec, feature_columns=["a", name])
