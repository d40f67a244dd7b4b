"""Columns of text that are learnt from as categories."""

import csv
import re

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import parquet

from tests.towers.train.runs import read_settings
from tests.variants import slow
from towers.input_pipeline import (
    cached,
    make_dataset,
    measure_scaling,
    open_source,
    quarantine,
)
from towers.input_pipeline.sources.files.record import BadRecordError
from towers.train.parts.data import open_sources

COLORS = ["red", "blue", "green"]


def _write(folder, name="a.csv", colors=COLORS, count=40):
    rows = [
        f'{n},{colors[n % len(colors)]},"s{n % 2}", {n / 4},{n % 2}'
        for n in range(count)
    ]
    (folder / name).write_text("\n".join(["size,color,shop,price,label", *rows]))
    return f"csv:{folder}/{name}"


def _as_parquet(spec):
    """Writes a CSV file as Parquet, one of its columns with a dictionary."""
    path = spec.removeprefix("csv:")
    with open(path, newline="") as file:
        rows = [*csv.DictReader(file)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    for name, kind in (("size", int), ("label", int), ("price", float)):
        columns[name] = [kind(value) for value in columns[name]]
    # Nothing is the empty text.
    columns["color"] = pa.array([color or None for color in columns["color"]])
    columns["shop"] = pa.array(columns["shop"]).dictionary_encode()
    path = path.replace(".csv", ".parquet")
    parquet.write_table(pa.table(columns), path, row_group_size=7)
    return f"parquet:{path}"


CHOSEN = ["price", "color", "size", "shop"]


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        slow("csv", "none"),
        ("csv", "memory"),
        ("parquet", "none"),
        slow("parquet", "memory"),
    ],
)
def test_text_that_is_named_becomes_ids(tmp_path, kind, cache):
    spec = _write(tmp_path)
    if kind == "parquet":
        spec = _as_parquet(spec)
    source = open_source(spec, feature_columns=CHOSEN, eval_fraction=0)
    assert source.input_kind == "columns" and source.image_shape == (2,)
    assert source.table_sizes == {"color": 4, "shop": 3}
    assert source.vocabularies["color"] == ("blue", "green", "red")
    scaling = measure_scaling(source)
    assert scaling.names == ("price", "size")
    kept = cached(source, cache)
    assert (kept is source) == (cache == "none")
    assert kept.table_sizes == source.table_sizes and kept.input_kind == "columns"
    ((x, y),) = make_dataset(kept, "train", 40, training=False)
    # Row groups come in turn.
    order = np.argsort(x["dense"][:, 1].numpy())
    x = {name: tf.gather(each, order) for name, each in x.items()}
    y = tf.gather(y, order)
    assert {name: each.dtype for name, each in x.items()} == {
        "dense": tf.float32,
        "color": tf.int64,
        "shop": tf.int64,
    }
    np.testing.assert_array_equal(x["dense"], [[n / 4, n] for n in range(40)])
    names = ("", *source.vocabularies["color"])
    assert [names[i] for i in x["color"]] == [COLORS[n % 3] for n in range(40)]
    np.testing.assert_array_equal(x["shop"], 1 + np.arange(40) % 2)
    np.testing.assert_array_equal(y, np.arange(40) % 2)
    ((scaled, _),) = make_dataset(kept, "train", 40, scaling=scaling)
    np.testing.assert_allclose(tf.reduce_mean(scaled["dense"], axis=0), 0, atol=1e-6)


@pytest.mark.parametrize("kind", ["csv", slow("parquet")])
def test_only_the_training_data_has_words_and_others_are_0(tmp_path, kind):
    specs = [
        _write(tmp_path, "train.csv", count=6),
        _write(tmp_path, "test.csv", [*COLORS, "pink", ""], count=5),
    ]
    if kind == "parquet":
        specs = [*map(_as_parquet, specs)]
    source = open_source(f"{kind}:{tmp_path}/*.{kind}", feature_columns=["color"])
    assert source.table_sizes == {"color": 4} and source.image_shape == (0,)
    ((x, _),) = make_dataset(source, "test", 5)
    assert [*x] == ["color"] and x["color"].numpy().tolist() == [3, 1, 2, 0, 0]
    other = open_source(
        specs[1],
        feature_columns=["color"],
        vocabularies=source.vocabularies,
        eval_fraction=0,
    )
    ((x, _),) = make_dataset(other, "test", 5)
    assert x["color"].numpy().tolist() == [3, 1, 2, 0, 0]
    with pytest.raises(ValueError, match=r"categories shop, but .* of color"):
        open_source(
            specs[1],
            feature_columns=["size", "shop"],
            vocabularies=source.vocabularies,
        )


@pytest.mark.parametrize(
    ("colors", "is_category"), [(COLORS, True), ([f"c{n}" for n in range(40)], False)]
)
def test_text_that_is_not_named_is_a_category_if_it_repeats(
    tmp_path, colors, is_category
):
    source = open_source(_write(tmp_path, colors=colors))
    assert ("color" in source.vocabularies) == is_category
    notes = " ".join(source.notes)
    assert re.search(r"Categories, because .*'shop'; --feature_columns=size", notes)
    assert bool(re.search(r"Left out, because .*'color'\.", notes)) != is_category


def test_a_bad_number_beside_categories_is_a_bad_record(tmp_path):
    spec = _write(tmp_path)
    path = tmp_path / "a.csv"
    path.write_text(path.read_text().replace(" 2.5,", " inf,"))
    chosen = {"feature_columns": CHOSEN, "eval_fraction": 0}
    with pytest.raises(BadRecordError, match="line 12: price is inf, expected a num"):
        open_source(spec, **chosen)
    source = open_source(spec, **chosen, skip_bad=True)
    found = quarantine.inspect(source, ["train"], 1)
    (bad,) = found.bad["train"]
    assert bad.fault == "price is inf, expected a number"
    source = source.without(found.bad, found.splits)
    ((x, _),) = make_dataset(source, "train", 40)
    assert len(x["color"]) == 39


def test_a_fraction_that_is_held_out_has_no_words(tmp_path):
    # Each text comes once.
    spec = _write(tmp_path, colors=[f"c{n}" for n in range(40)])
    found = [
        open_source(each, feature_columns=["color"])
        for each in (spec, _as_parquet(spec))
    ]
    of_csv, of_parquet = (source.vocabularies["color"] for source in found)
    assert of_csv == of_parquet and len(of_csv) == 36
    for source in found:
        ((x, _),) = make_dataset(source, "test", 4)
        assert x["color"].numpy().tolist() == [0] * 4


def test_what_is_evaluated_on_has_the_ids_of_the_training_data(tmp_path):
    train = _write(tmp_path, "train.csv", count=9)
    held = _write(tmp_path, "held.csv", ["green", "pink"], count=9)
    flags = f"--dataset={train}", f"--eval_dataset={held}", "--model=dlrm"
    settings = read_settings(*flags, "--feature_columns=price,color")
    source, held_out = open_sources(settings)
    assert held_out.vocabularies == source.vocabularies
    ((x, _),) = make_dataset(held_out, "train", 9, training=False)
    assert x["color"].numpy().tolist() == [2, 0] * 4 + [2]


def test_categories_are_kept_in_memory_only(tmp_path):
    source = open_source(_write(tmp_path), feature_columns=["size", "color"])
    with pytest.raises(ValueError, match="columns of categories, which are kept in me"):
        cached(source, "disk", f"{tmp_path}/kept")


def test_a_column_is_not_called_as_the_numbers_are(tmp_path):
    spec = _write(tmp_path)
    path = tmp_path / "a.csv"
    path.write_text(path.read_text().replace("color", "dense"))
    with pytest.raises(
        ValueError, match="a column of categories named 'dense', which models"
    ):
        open_source(spec, feature_columns=["size", "dense"])
