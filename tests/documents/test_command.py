"""What is done for a command of a page."""

import sys

import pytest

from tests.documents import command
from tests.documents.blocks import ROOT

_SHORT = [*command.SHORT["train"]]


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("train", ["--model=cnn"], ["--model=cnn", *_SHORT]),
        ("train", ["--eval_only"], ["--eval_only"]),
        ("doctor", [], []),
        ("generate", ["runs/a"], ["runs/a", "--max_tokens=8"]),
        (
            "launch",
            ["--hosts=32", "--", "--model=cnn"],
            ["--hosts=2", "--", "--model=cnn", *_SHORT],
        ),
        ("launch", ["--hosts=2:4", "--", "a.py"], ["--hosts=2:2", "--", "a.py"]),
        ("queue", ["--search=random:20"], ["--search=random:2", *_SHORT]),
    ],
)
def test_commands_of_towers_are_shortened(name, args, expected):
    assert command.shorten(name, args) == expected
    asked = command.deed(["towers", name, *args])
    assert asked == command.Deed((sys.executable, "-m", "towers", name, *expected))


@pytest.mark.parametrize("words", [["towers", "train"], ["towers", "resize", "runs/a"]])
def test_a_module_is_its_command(words):
    as_module = ["python", "-m", f"towers.{words[1]}", *words[2:]]
    assert command.deed(as_module) == command.deed(words)
    assert command.resized([words]) == (("runs/a",) if words[1] == "resize" else ())


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("pip install -e .[dev,gpu]", "pip install"),
        ("python -m pip install keras-towers[text]", "pip install"),
        ("make train", "make"),
        ("python -m pytest tests/test_docs.py", "pytest"),
        ("python scripts/bench_towers.py --work=mlp", "python scripts/"),
        ("python -m scripts.gpu_truth --minutes=9", "python scripts/"),
        ("tensorboard --logdir runs", "tensorboard"),
        ("towers service dispatcher --port=5050", "towers service"),
        ("towers train --model_dir=runs/a", "towers train, then towers resize"),
        ("mpirun -n 8 towers train", "mpirun"),
    ],
)
def test_what_is_done_otherwise(line, why, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = command.deed(line.split(), resized=("runs/a",))
    assert done.why == why and why in command.OTHERWISE
    assert "8" not in done.words or why != "mpirun"


@pytest.mark.parametrize(
    "wanted", [".[nothing]", "keras-towers[nothing]", "a==b==", ""]
)
def test_a_requirement_that_is_wrong(wanted, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError):
        command.deed(["pip", "install", *filter(None, [wanted])])
