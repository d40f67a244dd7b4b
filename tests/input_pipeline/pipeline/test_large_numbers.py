"""Numbers far from 0, such as Unix seconds, are centred before they are float32."""

from typing import ClassVar

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from pyarrow import parquet

from tests.input_pipeline.sources.test_tfds_targets import _Builder
from tests.input_pipeline.sources.test_tfds_targets import _open as open_builder
from tests.variants import slow
from towers.input_pipeline import (
    cached,
    columns_merged_by_float32,
    make_dataset,
    measure_scaling,
    open_source,
)
from towers.input_pipeline.pipeline import scaling as scaling_of_rows

SECONDS = 1_700_000_000 + np.arange(60)


class TinyTimes(_Builder):
    """A set of Unix seconds, and a class."""

    features: ClassVar = {
        "time": np.int64,
        "width": np.float32,
        "label": tfds.features.ClassLabel(num_classes=2),
    }
    keys = ({"time": "time", "width": "width"}, "label")

    def one(self, index):
        return {"time": int(SECONDS[index]), "width": 1.0, "label": index % 2}


def _csv(folder, times, **columns):
    columns = {"time": times, **columns, "label": [k % 2 for k in range(60)]}
    lines = [
        ",".join(columns),
        *(",".join(map(str, r)) for r in zip(*columns.values(), strict=True)),
    ]
    (folder / "a.csv").write_text("\n".join(lines) + "\n")
    return f"csv:{folder}/a.csv"


def _parquet(folder, times, **columns):
    columns = {"time": times, **columns, "label": [k % 2 for k in range(60)]}
    parquet.write_table(pa.table(columns), folder / "a.parquet")
    return f"parquet:{folder}/a.parquet"


def _open(kind, folder):
    """A source of a column of times, and the times."""
    whole = {"eval_fraction": 0}
    if kind == "tfds":
        return open_builder(TinyTimes, folder), SECONDS[:8]
    if kind == "csv":
        return open_source(_csv(folder, SECONDS), **whole), SECONDS
    if kind == "csv with categories":
        spec = _csv(folder, SECONDS, mood=["so", "odd"] * 30)
        return open_source(spec, feature_columns=["time", "mood"], **whole), SECONDS
    times = {
        "parquet of seconds": SECONDS,
        "parquet of milliseconds": 1000 * SECONDS,
        "parquet of doubles": SECONDS + 0.25,
    }[kind]
    return open_source(_parquet(folder, times), **whole), times


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        ("csv", "none"),
        ("csv", "memory"),
        slow("csv", "disk"),
        ("csv with categories", "memory"),
        slow("parquet of seconds", "none"),
        ("parquet of milliseconds", "none"),
        slow("parquet of doubles", "none"),
        ("tfds", "none"),
    ],
)
def test_times_are_told_apart_once_they_are_scaled(tmp_path, kind, cache):
    source, times = _open(kind, tmp_path)
    scaling = measure_scaling(source)
    assert scaling.mean[0] == pytest.approx(times.mean(), abs=1e-3, rel=0)
    assert scaling.std[0] == pytest.approx(times.std(), rel=1e-6)
    source = cached(source, cache, str(tmp_path))
    ((x, *_),) = make_dataset(source, "train", 60, training=False, scaling=scaling)
    x = x["dense"] if isinstance(x, dict) else x
    assert x.dtype == tf.float32
    expected = np.sort((times - times.mean()) / times.std())
    np.testing.assert_allclose(np.sort(x[:, 0]), expected, atol=1e-6)


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    ("values", "merged"),
    [
        (SECONDS, True),
        (SECONDS * 1000, True),
        (16_777_216 + np.arange(60), False),  # every second one is lost
        (np.arange(60), False),
        (1.7e9 + 1e5 * np.arange(60), False),
        (np.full(60, 1.7e9), False),
        ([0.1 + 0.2, 0.3] * 30, False),  # decimals, as they are rounded
    ],
)
def test_what_float32_cannot_tell_apart_is_found(tmp_path, values, merged):
    source = open_source(_csv(tmp_path, values))
    found = ["time"] if merged else []
    assert columns_merged_by_float32(source, scaled=False) == (found, [])
    assert columns_merged_by_float32(source, scaled=True) == ([], [])
    source = open_source(
        _csv(tmp_path, [1, 2] * 30, price=values),
        label_column="price",
        target="numbers",
    )
    assert columns_merged_by_float32(source, scaled=True) == (
        [],
        ["price"] if merged else [],
    )


def test_no_record_is_read_where_no_number_can_be_lost(tmp_path, monkeypatch):
    source = open_source(_csv(tmp_path, SECONDS))
    monkeypatch.setattr(source, "batches", None)
    assert columns_merged_by_float32(source, scaled=True) == ([], [])
    # Images are read, and decoded, by whoever trains on them.
    monkeypatch.setattr(type(source), "input_kind", "image")
    assert columns_merged_by_float32(source, scaled=False) == ([], [])


def test_numbers_are_rounded_only_where_float32_loses_some(tmp_path, monkeypatch):
    rounded = []
    monkeypatch.setattr(
        scaling_of_rows, "_without_rounding", lambda x: rounded.append(x) or x
    )
    source = open_source(_csv(tmp_path, SECONDS, width=[*range(60)]))
    assert columns_merged_by_float32(source, scaled=False) == (["time"], [])
    assert len(rounded) == 1


def test_what_float32_cannot_hold_is_a_bad_row(tmp_path):
    with pytest.raises(ValueError, match=r"line 61: time is 1e\+39, expected a num"):
        open_source(_csv(tmp_path, [1.0] * 59 + [1e39]))
