"""zipf: made-up clicks, with columns of numbers and of ids."""

import numpy as np
import pytest
import tensorflow as tf

from towers import input_pipeline
from towers.input_pipeline import specs
from towers.input_pipeline.sources.tables.zipf import ZipfSource


def _all(source, split="train"):
    (batch,) = source.batches(split, 10**6)
    x, y = source.parse(batch[1])
    return {name: values.numpy() for name, values in x.items()}, y.numpy()


def test_few_ids_are_frequent():
    source = input_pipeline.open_source("zipf:2:3x1000:20000")
    assert source.input_kind == "columns"
    assert source.splits == {"train": 20000, "test": 5000}
    assert source.table_sizes == dict.fromkeys(("table_0", "table_1", "table_2"), 1000)
    x, y = _all(source)
    assert x["dense"].shape == (20000, *source.image_shape)
    assert {*x} == {"dense", *source.table_sizes}
    ranks = np.arange(1000)
    chances = np.log((ranks + 2) / (ranks + 1)) / np.log(1001)
    for name in source.table_sizes:
        assert x[name].dtype == np.int64
        shares = np.bincount(x[name], minlength=1000) / 20000
        np.testing.assert_allclose(shares[:5], chances[:5], atol=0.01)
        assert x[name].max() >= 990
    assert (x["table_0"] != x["table_1"]).any()
    assert np.abs(x["dense"]).max() <= 1 and abs(x["dense"].mean()) < 0.02
    assert {*y} == {0, 1} and 0.2 < y.mean() < 0.8


def test_labels_can_be_learnt():
    """By a linear model of numbers and ids, whose tables are small."""
    source = ZipfSource(2, 2, 5, 4000, seed=1)
    parts = {}
    for split in source.splits:
        x, y = _all(source, split)
        ids = [np.eye(5)[x[name]] for name in source.table_sizes]
        parts[split] = np.concatenate([x["dense"], *ids], axis=1), y
    x, y = parts["train"]
    weights = np.linalg.lstsq(x, y - 0.5, rcond=None)[0]
    x, y = parts["test"]
    assert ((x @ weights > 0) == y).mean() > max(y.mean(), 1 - y.mean()) + 0.1


def test_an_example_depends_on_seed_and_number_alone():
    one, other = ZipfSource(2, 2, 9, 40, seed=1), ZipfSource(2, 2, 9, 40, seed=2)
    x, y = _all(one)
    some, labels = one.parse(tf.constant([7, 3], tf.int64))
    for name, values in some.items():
        np.testing.assert_array_equal(values, x[name][[7, 3]])
    np.testing.assert_array_equal(labels, y[[7, 3]])
    assert (_all(other)[0]["dense"] != x["dense"]).any()


def test_a_pipeline_of_columns_goes_on_where_it_was():
    source = input_pipeline.open_source("zipf:0:2x9:10")
    options = {"batch_size": 4, "start_epoch": 1}
    batches = [*input_pipeline.Pipeline(source, "train", **options).dataset()]
    assert [len(y) for _, y in batches] == [4, 4, 2]
    assert {*batches[0][0]} == {"table_0", "table_1"}
    later = input_pipeline.Pipeline(source, "train", **options, start_record=8)
    ((x, y),) = later.dataset()
    np.testing.assert_array_equal(y, batches[2][1])
    np.testing.assert_array_equal(x["table_1"], batches[2][0]["table_1"])


@pytest.mark.parametrize("rest", ["", "3:4", "3:0x5", "3:2x0", "3:2x5:0", "x:2x5"])
def test_what_cannot_be_read(rest):
    with pytest.raises(ValueError, match=r"expected (one of|zipf:NUMBERS:TABLESxROWS)"):
        specs.check(f"zipf:{rest}")
