"""Rows of numbers, scaled by the training data."""

import json

import numpy as np
import pytest

from tests.variants import slow
from towers.input_pipeline import (
    ArraySource,
    Scaling,
    make_dataset,
    measure_scaling,
    open_source,
)


def _source(rows, **held_out):
    rows = np.asarray(rows, np.float32)
    return ArraySource(rows, np.zeros(len(rows), int), **held_out)


def test_rows_are_scaled_by_the_training_data():
    rng = np.random.default_rng(0)
    # More than are read at once; far from 0, and of different sizes.
    rows = rng.normal([2000, -3, 0], [5, 1e-3, 1e6], (9000, 3)).astype(np.float32)
    test = np.zeros((2, 3), np.float32)
    source = _source(rows, x_test=test, y_test=np.zeros(2, int))
    scaling = measure_scaling(source)
    wide = rows.astype(np.float64)
    np.testing.assert_allclose(scaling.mean, wide.mean(0), rtol=1e-12)
    np.testing.assert_allclose(scaling.std, wide.std(0), rtol=1e-9)
    (x, _), *_ = make_dataset(source, "train", 9000, training=False, scaling=scaling)
    expected = (wide - scaling.mean) / scaling.std
    np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-6)
    ((x, _),) = make_dataset(source, "test", 2, scaling=scaling)
    np.testing.assert_allclose(x, scaling(test), rtol=1e-6)
    assert x.dtype == "float32"


def test_a_constant_column_is_divided_by_1_and_no_number_counts_for_nothing():
    rows = [[7.7, 1.0], [7.7, np.nan], [7.7, 3.0], [7.7, np.inf]]
    scaling = measure_scaling(_source(rows))
    assert scaling.std == (1.0, 1.0) and scaling.mean[1] == 2.0
    assert abs(scaling([[7.7, 1.0]])[0, 0]) < 1e-5


@pytest.mark.parametrize("kind", ["csv", slow("tfrecord")])
def test_only_the_training_rows_are_measured(tmp_path, kind, monkeypatch):
    text = ["a,b,label", *(f"{n},{n % 3},0" for n in range(40))]
    (tmp_path / "a.csv").write_text("\n".join(text))
    source = open_source(f"csv:{tmp_path}/a.csv")
    if kind == "tfrecord":
        from towers.input_pipeline.convert.conversion import convert

        convert(source, str(tmp_path / "t"))
        source = open_source(f"tfrecord:{tmp_path}/t")
    rows = np.concatenate([x for x, _ in make_dataset(source, "train", 7)])
    assert len(rows) < 40
    scaling = measure_scaling(source)
    np.testing.assert_allclose(scaling.mean, rows.mean(0), rtol=1e-6)
    assert scaling.names == ("a", "b")


def test_scaling_is_saved_exactly():
    scaling = Scaling(("a", "b"), (0.1, 1 / 3), (1.0, 2e-17))
    assert Scaling.from_json(json.loads(json.dumps(scaling.to_json()))) == scaling
    with pytest.raises(ValueError, match="lists of one length"):
        Scaling.from_json({"names": ["a"], "mean": [0, 1], "std": [1]})


def test_a_dict_is_scaled_where_it_is_dense():
    x = {"dense": np.float32([[3.0]]), "color": np.array([1])}
    scaled = Scaling(("a",), (1.0,), (2.0,))(x)
    assert scaled["dense"].numpy().tolist() == [[1.0]] and scaled["color"] is x["color"]


def test_what_cannot_be_scaled(digits):
    with pytest.raises(ValueError, match="no rows of numbers to scale"):
        measure_scaling(digits)
    with pytest.raises(
        ValueError, match="scaling makes 1 columns of 1, but examples of"
    ):
        make_dataset(_source([[1, 2]]), "train", 1, scaling=Scaling("a", (0,), (1,)))
