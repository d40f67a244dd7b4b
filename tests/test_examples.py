"""Each example: its command is one that can be typed, and it trains."""

import ast
import json
import math
import pathlib
import re
import shlex

import pytest

from tests.documents.blocks import read
from tests.towers.train.runs import heard, main_here, read_settings
from tests.variants import slow
from towers.find_batch_size import probe
from towers.find_batch_size.search_flags import Search
from towers.parity import __main__ as parity_program
from towers.train.settings import TASKS

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
# The others take longer to trace.
QUICK = ("classification",)
# What its summary has, beside the loss.
METRICS = {
    "classification": ["accuracy"],
    "regression": ["mae"],
    "binary": ["accuracy", "auc"],
    "multilabel": ["accuracy", "auc"],
    "segmentation": ["accuracy", "mean_iou"],
    "text_classification": ["accuracy"],
    "tagging": ["accuracy"],
    "language_model": ["accuracy", "perplexity", "bits_per_byte"],
    "several_outputs": ["digit_accuracy", "ink_mae"],
    "detection": ["overlap"],
}


def flags_of(name):
    """The arguments of an example's command, without how long to train, and on what."""
    flags = [each for each in command(name) if not re.match("--(train_e|moni)", each)]
    # Python's library is read by another test.
    if name == "language_model":
        flags += ["--dataset=text:examples/*.py", "--sequence_length=32"]
    return flags


def command(name):
    """The arguments of the command in an example's documentation."""
    text = ast.get_docstring(ast.parse((ROOT / f"examples/{name}.py").read_text()))
    (line,) = (line for line in text.splitlines() if "towers train" in line)
    return shlex.split(line.strip().removeprefix("towers train "))


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_command(name, tmp_path):
    settings = read_settings(*command(name), f"--model_dir={tmp_path}/run")
    assert settings.model == f"examples/{name}.py"


def test_there_is_one_of_each_task():
    assert {*TASKS, "several_outputs", "detection"} == {*EXAMPLES} == {*METRICS}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else slow(name) for name in EXAMPLES]
)
def test_it_trains(name, tmp_path):
    run = f"--model_dir={tmp_path}", "--train_epochs=1", "--max_train_steps=3"
    done = main_here(*flags_of(name), *run)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    found = {key for key in summary if key.startswith("val_")}
    assert {f"val_{each}" for each in ("loss", *METRICS[name])} <= found
    assert all(math.isfinite(summary[key]) for key in found)
    assert summary["steps"] == 3


@pytest.mark.slow
def test_the_file_of_the_page_trains(tmp_path):
    page = read(ROOT / "docs/train/own_model.md")
    block = next(block for block in page if block.language == "python")
    (tmp_path / "my_model.py").write_text(block.code)
    flags = f"--model={tmp_path}/my_model.py", f"--model_dir={tmp_path}/run"
    done = main_here(*flags, "--train_epochs=1")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert {"val_price_mae", "val_sold_accuracy"} <= summary.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "binary"])
def test_towers_give_the_numbers_of_one_device(name, tmp_path):
    short = "--batch_size=12", "--parity_steps=1", f"--model_dir={tmp_path}/run"
    settings = read_settings(*flags_of(name), *short)
    done = heard(parity_program.check, settings)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "name",
    [
        slow("segmentation"),
        slow("tagging"),
        slow("several_outputs"),
    ],
)
def test_a_batch_size_is_tried(name, tmp_path, monkeypatch):
    # Of a process of its own, which this one is not.
    monkeypatch.setattr(probe, "limit_memory", lambda limit_mb: None)
    told, run = {}, f"--model_dir={tmp_path}/run"
    settings = read_settings(*flags_of(name), "--batch_size=6", run)
    probe.probe(Search(**vars(settings)), lambda **facts: told.update(facts))
    assert told["fits"] and told["batch_size"] == 6
