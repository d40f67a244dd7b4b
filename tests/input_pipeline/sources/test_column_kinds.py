"""Columns of tables are read as training read them, whatever the first rows have."""

import datetime

import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from tests.towers.train.runs import read_settings
from towers.input_pipeline import open_source
from towers.predict import tables
from towers.train.outputs.preprocessing import Preprocessing
from towers.train.parts import scale
from towers.train.parts.data import open_sources

DAY, YEAR = datetime.date(2024, 5, 31), 2024
# What training had, what the file has in the first 100 rows, and in the next.
EMPTY = [
    ("number", None, 7.0, 7.0),
    ("date", None, DAY, 19874.0),
    ("truth", None, True, 1.0),
    ("text", None, "02134", "02134"),
]
OTHERS = [
    ("date", YEAR, YEAR, "expected a date such as", "has int64 in the column 'a'"),
    ("number", DAY, DAY, "expected a number", r"has date32\[day\] in the column 'a'"),
    ("truth", YEAR, YEAR, "expected true or false", "but training had truth values"),
    ("number", "x", "x", "expected a number", "has string in the column 'a'"),
]


def known(kind):
    """What a run has written that has learnt from a column."""
    of_text = kind == "text"
    return Preprocessing(
        *("classification", True, "columns" if of_text else "row", (1,)),
        features=() if of_text else ("a",),
        tables={"a": 2} if of_text else {},
        vocabularies={"a": ["02134"]} if of_text else {},
        column_kinds={"a": kind},
    )


def write(folder, suffix, first, later, labels=(0, 1)):
    column = pa.array([first] * 100 + [later] * 20)
    table = pa.table({"a": column, "b": [*range(120)], "label": [*labels] * 60})
    path = folder / f"x.{suffix}"
    if suffix == "csv":
        csv.write_csv(table, path)
    else:
        parquet.write_table(table, path)
    return str(path)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(("kind", "first", "later", "expected"), EMPTY)
def test_first_rows_may_be_empty(tmp_path, suffix, kind, first, later, expected):
    path = write(tmp_path, suffix, first, later)
    (rows,) = tables.blocks(known(kind), path)
    assert rows.columns["a"][-1] == expected and rows.numbers[-1] == 120
    texts = {"a": ["02134"]} if kind == "text" else {}
    source = open_source(
        f"{suffix}:{path}",
        column_kinds={"a": kind},
        vocabularies=texts,
        eval_fraction=0,
    )
    assert source.column_kinds == {"a": kind, "b": "number"}
    assert source.good["train"] == 120 and dict(source.vocabularies) == texts


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("kind", [kind for kind, *_ in EMPTY])
def test_all_rows_may_be_empty(tmp_path, suffix, kind):
    path = write(tmp_path, suffix, None, None)
    (rows,) = tables.blocks(known(kind), path)
    assert len(rows.faults) == (0 if kind == "text" else 120)
    texts = {"a": ["02134"]} if kind == "text" else {}
    source = open_source(
        f"{suffix}:{path}",
        feature_columns=["a", "b"],
        column_kinds={"a": kind},
        vocabularies=texts,
    )
    assert source.column_kinds == {"a": kind, "b": "number"}


@pytest.mark.parametrize(("kind", "first", "later", "of_csv", "of_parquet"), OTHERS)
def test_another_kind_is_a_fault(tmp_path, kind, first, later, of_csv, of_parquet):
    path = write(tmp_path, "csv", first, later)
    (rows,) = tables.blocks(known(kind), path)
    assert len(rows.faults) == 120 and of_csv in rows.faults[1]
    with pytest.raises(ValueError, match=of_csv):
        open_source(f"csv:{path}", column_kinds={"a": kind})
    path = write(tmp_path, "parquet", first, later)
    with pytest.raises(ValueError, match=of_parquet):
        next(tables.blocks(known(kind), path))
    with pytest.raises(ValueError, match=of_parquet):
        open_source(f"parquet:{path}", column_kinds={"a": kind})


def test_runs_of_before_read_numbers_of_any_kind(tmp_path):
    before = Preprocessing("regression", True, "row", (1,), features=("a",))
    for suffix in ("csv", "parquet"):
        path = write(tmp_path, suffix, None, 7.0)
        (rows,) = tables.blocks(before, path)
        assert rows.columns["a"][-1] == 7
        (rows,) = tables.blocks(before, write(tmp_path, suffix, DAY, DAY))
        assert rows.columns["a"][0] == 19874


def test_a_column_that_is_named_may_begin_empty(tmp_path):
    path = write(tmp_path, "csv", None, 7.0)
    source = open_source(f"csv:{path}", feature_columns=["a", "b"], eval_fraction=0)
    assert source.column_kinds == {"a": "number", "b": "number"}
    assert source.moments.mean[0] == 7


def test_texts_of_digits_are_no_numbers_in_evaluation(tmp_path):
    (tmp_path / "eval").mkdir()
    path = write(tmp_path, "csv", "W1", "02134")
    other = write(tmp_path / "eval", "csv", "02134", "W1")
    text = open(other).read()
    with open(other, "w") as file:
        file.write(text.replace('"', ""))
    source, held_out = open_sources(
        read_settings(f"--dataset=csv:{path}", f"--eval_dataset=csv:{other}")
    )
    assert source.column_kinds == held_out.column_kinds == {"b": "number", "a": "text"}
    assert held_out.vocabularies == source.vocabularies == {"a": ("02134", "W1")}
    with pytest.raises(ValueError, match="categories none, but there are vocabularies"):
        open_source(f"csv:{other}", vocabularies=source.vocabularies)


def test_kinds_are_kept_beside_the_model(tmp_path):
    known("date").save(str(tmp_path))
    assert Preprocessing.load(str(tmp_path)).column_kinds == {"a": "date"}


def test_a_run_goes_on_with_its_kinds(tmp_path, monkeypatch):
    known("date").save(str(tmp_path))
    monkeypatch.setattr(scale, "_goes_on", lambda settings: True)
    path = write(tmp_path, "csv", YEAR, YEAR)
    settings = read_settings(f"--dataset=csv:{path}", f"--model_dir={tmp_path}")
    with pytest.raises(ValueError, match="expected a date such as"):
        open_sources(settings)
