"""Columns of numbers are scaled as a run began, or by its training data."""

import json

import numpy as np
import pytest

from towers.input_pipeline import ArraySource, measure_scaling, open_source
from towers.train.checks import check_data
from towers.train.parts import data as data_parts
from towers.train.parts import scale
from towers.train.settings import Settings


@pytest.fixture
def table(tmp_path):
    rows = "\n".join(f"{n},{n * n},{n % 2}" for n in range(30))
    (tmp_path / "a.csv").write_text(f"a,b,label\n{rows}\n")
    return f"csv:{tmp_path}/a.csv"


def _began(folder, **found):
    """A run with a checkpoint, and what it has written of its columns."""
    (folder / "run" / "checkpoints" / "ckpt-1-0").mkdir(parents=True)
    if found:
        (folder / "run" / scale.PREPROCESSING).write_text(json.dumps(found))
    return str(folder / "run")


@pytest.mark.slow
def test_a_new_run_of_a_table_is_scaled_and_says_so(tmp_path, table):
    asked = Settings(dataset=table, model_dir=str(tmp_path / "run"), train_epochs=1)
    data = data_parts.open_data(asked, None).prepare()
    assert data.scaling == measure_scaling(open_source(table))
    assert any("--scale=none leaves them" in note for note in data.notes())
    (x, _), *_ = data.open_training(batch_size=30, repeat=False)
    np.testing.assert_allclose(np.mean(x, axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(np.std(x, axis=0), 1, atol=1e-5)
    source = open_source(table)
    # Only what may be missing later is filled in.
    unscaled, note = scale.choose(asked.but(scale="none"), source)
    assert (unscaled.mean, unscaled.std, note) == ((0.0, 0.0), (1.0, 1.0), "")
    # Of arrays, only if it is asked for.
    arrays = ArraySource(np.eye(4, dtype=np.float32), np.arange(4))
    assert scale.choose(asked, arrays) == (None, "")
    assert scale.choose(asked.but(scale="standard"), arrays)[0] is not None


def test_a_run_that_goes_on_scales_as_it_began(tmp_path, table):
    source = open_source(table)
    began = measure_scaling(source)
    changed = {**began.to_json(), "mean": [1.0, 2.0]}
    run = _began(tmp_path, scaling=changed, vocabularies={"c": ["x"]})
    asked = Settings(dataset=table, model_dir=run)
    scaling, note = scale.choose(asked, source)
    assert scaling.mean == (1.0, 2.0) and "as the run began" in note
    assert scale.read_columns(asked) == ({"c": ["x"]}, None)
    assert scale.choose(asked.but(clean=True), source)[0] == began
    assert scale.read_columns(asked.but(clean=True)) == (None, None)
    with pytest.raises(ValueError, match=r"--scale=none, but .* began with standard"):
        scale.choose(asked.but(scale="none"), source)
    others = open_source(table, feature_columns=["a"])
    with pytest.raises(ValueError, match=r"has the columns a, b, but .* a; expected"):
        scale.choose(asked, others)


def test_a_run_of_before_goes_on_without_scaling(tmp_path, table):
    asked = Settings(dataset=table, model_dir=_began(tmp_path))
    assert scale.choose(asked, open_source(table)) == (None, "")
    with pytest.raises(ValueError, match=r"--scale=standard, but .* began with none"):
        scale.choose(asked.but(scale="standard"), open_source(table))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"scaling": {"names": ["a"]}}'])
def test_a_damaged_file_is_one_sentence(tmp_path, table, text):
    run = _began(tmp_path, scaling=None)
    (tmp_path / "run" / scale.PREPROCESSING).write_text(text)
    with pytest.raises(ValueError, match=r"cannot be read: .*start over with --clean"):
        scale.choose(Settings(dataset=table, model_dir=run), open_source(table))


def test_what_has_no_rows_is_not_scaled(tmp_path):
    with pytest.raises(ValueError, match="--scale=standard for digits; expected it on"):
        check_data(Settings(dataset="digits", scale="standard"))
    images = ArraySource(np.zeros([2, 4, 4, 1], np.uint8), [0, 1])
    assert scale.choose(Settings(), images) == (None, "")
    with pytest.raises(ValueError, match="--scale=standard, but arrays has no rows"):
        scale.choose(Settings(scale="standard"), images)


def test_another_data_set_is_evaluated_by_the_targets_that_are_learnt(tmp_path):
    for name, last in (("a", "1.5"), ("b", "2")):
        rows = f"1,2,{last}\n" * 20
        (tmp_path / f"{name}.csv").write_text(f"x,y,z\n{rows}")
    ours, theirs = (f"csv:{tmp_path}/{name}.csv" for name in "ab")
    source, held_out = data_parts.open_sources(
        Settings(dataset=ours, eval_dataset=theirs)
    )
    # By itself, it would be of classes.
    assert held_out.target == source.target and source.target.kind == "numbers"
    with pytest.raises(ValueError, match=r"has 3 classes, but .* 1 number to predict"):
        data_parts.check_same_kind(Settings(), source, open_source(theirs))
