"""Each example with a step of its own: its command is the file's, and it trains."""

import ast
import importlib
import pathlib

import numpy as np
import pytest

from examples.steps import common
from tests.variants import slow

ROOT = pathlib.Path(__file__).parents[1]
NAMES = sorted({path.stem for path in ROOT.glob("examples/steps/*.py")} - {"common"})
# The others take longer to trace.
QUICK = "accumulate", "siamese"


@pytest.mark.parametrize("name", NAMES)
def test_the_command(name):
    text = (ROOT / f"examples/steps/{name}.py").read_text()
    said = ast.get_docstring(ast.parse(text)).splitlines()
    assert f"    python -m examples.steps.{name} --gpus=2" in said


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else slow(name) for name in NAMES]
)
def test_it_trains(name):
    """By plain Keras: all weights that train change, and all losses are finite."""
    example = importlib.import_module(f"examples.steps.{name}")
    model = example.build()
    before = [each.numpy() for each in model.trainable_variables]
    flags = "--gpus=1", "--batch_size=6", "--epochs=2", "--steps=4"
    history = common.main(lambda: model, example.data, flags).history
    assert all(np.isfinite(values).all() for values in history.values()), history
    # A teacher only answers.
    teacher = getattr(model, "teacher", None)
    still = {id(each) for each in teacher.weights} if teacher else set()
    for variable, value in zip(model.trainable_variables, before, strict=True):
        same = np.array_equal(variable, value)
        assert same == (id(variable) in still), variable.path


@pytest.mark.slow
def test_dcgan_with_batch_normalization():
    example = importlib.import_module("examples.steps.dcgan")
    flags = "--gpus=1", "--batch_size=6", "--epochs=1", "--steps=2"
    history = common.main(lambda: example.build("batch"), example.data, flags).history
    assert np.isfinite([history["d_loss"], history["g_loss"]]).all()
