"""Columns of text that are learnt from as categories."""

import numpy as np
import pytest
import tensorflow as tf

from towers.input_pipeline import (
    cached,
    make_dataset,
    measure_scaling,
    open_source,
    quarantine,
)

COLORS = ["red", "blue", "green"]


def _write(folder, name="a.csv", colors=COLORS, count=40):
    rows = [
        f'{n},{colors[n % len(colors)]},"s{n % 2}", {n / 4},{n % 2}'
        for n in range(count)
    ]
    (folder / name).write_text("\n".join(["size,color,shop,price,label", *rows]))
    return f"csv:{folder}/{name}"


CHOSEN = ["price", "color", "size", "shop"]


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_text_that_is_named_becomes_ids(tmp_path, cache):
    spec = _write(tmp_path)
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


def test_only_the_training_data_has_words_and_others_are_0(tmp_path):
    _write(tmp_path, "train.csv", count=6)
    _write(tmp_path, "test.csv", [*COLORS, "pink", ""], count=5)
    source = open_source(f"csv:{tmp_path}/*.csv", feature_columns=["color"])
    assert source.table_sizes == {"color": 4} and source.image_shape == (0,)
    ((x, _),) = make_dataset(source, "test", 5)
    assert [*x] == ["color"] and x["color"].numpy().tolist() == [3, 1, 2, 0, 0]
    other = open_source(
        f"csv:{tmp_path}/test.csv",
        feature_columns=["color"],
        vocabularies=source.vocabularies,
        eval_fraction=0,
    )
    ((x, _),) = make_dataset(other, "test", 5)
    assert x["color"].numpy().tolist() == [3, 1, 2, 0, 0]
    with pytest.raises(ValueError, match=r"categories shop, but .* of color"):
        open_source(
            f"csv:{tmp_path}/test.csv",
            feature_columns=["size", "shop"],
            vocabularies=source.vocabularies,
        )


def test_text_that_is_not_named_is_refused_with_a_hint(tmp_path):
    with pytest.raises(ValueError, match=r"'color' \(such as 'red'\).*as categories"):
        open_source(_write(tmp_path))


def test_a_bad_number_beside_categories_is_a_bad_record(tmp_path):
    spec = _write(tmp_path)
    path = tmp_path / "a.csv"
    path.write_text(path.read_text().replace(" 2.5,", " nan,"))
    source = open_source(spec, feature_columns=CHOSEN, eval_fraction=0)
    found = quarantine.inspect(source, ["train"], 1)
    (bad,) = found.bad["train"]
    assert bad.fault == "price is nan, expected a number"
    source = source.without(found.bad, found.splits)
    ((x, _),) = make_dataset(source, "train", 40)
    assert len(x["color"]) == 39
