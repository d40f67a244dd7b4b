"""A run that Towers 0.2 has written, in `run_of_0_2`, goes on and is read.

It is that of commit da4c092a, the last one before the changes of 0.3, after two epochs:

    towers train --dataset=synthetic:2x2x1:2:640 --model=model.py:build --seed=1
    --batch_size=16 --num_gpus=2 --variable_update=auto --enable_xla=false
    --monitor=val_loss --keep_checkpoints=1 --train_epochs=2

Left out are best.keras and, of TensorBoard's files, all but scalars. The paths in
flags.txt are made up. A script has made `not_finite.npz` by `recorded_step.write` of
0.2.
"""

import json
import shutil
from pathlib import Path

import keras
import pytest

from tests.towers.train.runs import continued, main_here, summary_of
from towers.model.auto import Choice, recall
from towers.numerics import locate
from towers.report.read import read
from towers.train.run import measured_before

RUN = Path(__file__).with_name("run_of_0_2")
SUMMARY = json.loads((RUN / "summary.json").read_text())
# What 0.2 has printed of the third epoch, when it continued a copy of the run.
THIRD = {"val_loss": 0.9181578755378723, "val_accuracy": 0.3187499940395355}


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(RUN, tmp_path / "run"))


def test_it_goes_on(run):
    """With the flags that 0.2 has written, the third epoch is that of 0.2."""
    done = main_here(
        *(f"--flagfile={run / 'flags.txt'}", f"--model_dir={run}"),
        *(f"--model={run / 'model.py'}:build", "--train_epochs=3"),
        "--variable_update=parameter_server",
    )
    assert done.returncode == 0, done.stderr
    assert continued(done.stdout, run, steps=40) == (2, 0)
    summary = summary_of(run)
    assert summary["epochs"] == 3
    assert {name: summary[name] for name in THIRD} == pytest.approx(THIRD, rel=1e-5)
    # No key has an old name.
    assert not {"images_per_sec", "logs"} & summary.keys()
    speeds = read(str(run)).train.scalars["epoch_examples_per_sec"]
    assert speeds.steps.tolist() == [1, 2, 3]


def test_what_it_has_measured_is_known(run):
    known = measured_before(str(run))
    assert known["examples_per_sec"] == SUMMARY["examples_per_sec"] > 0
    assert known == {name: SUMMARY[name] for name in known}


def test_it_has_a_report(run):
    page = read(str(run))
    assert page.summary == SUMMARY
    assert page.train.scalars["epoch_loss"].steps.tolist() == [1, 2]
    assert page.train.scalars.keys() >= {
        *("epoch_examples_per_sec", "examples_per_sec/tower_1", "step_ms/compute"),
    }


def test_its_choice_is_remembered(run):
    file = run / "variable_update.json"
    key = json.loads(file.read_text())["for"]
    chosen = Choice("replicated", "ring")
    assert recall(str(file), key, [Choice(), chosen]) == chosen


def test_its_stopped_step_is_repeated(run):
    x = keras.Input((2,))
    model = keras.Model([x], keras.layers.Dense(1)(x))
    model.compile("sgd", "mse")
    said = "x[0][1] of the batch is not finite on tower 1 of 2"
    assert str(locate(model, run / "not_finite.npz")) == said
