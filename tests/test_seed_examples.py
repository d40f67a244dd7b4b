"""Each seed, checked against a number that towers have not computed."""

import ast
import importlib
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.linear_model import LinearRegression

from examples.seeds import own_pipeline

FOLDER = pathlib.Path(__file__).parents[1] / "examples/seeds"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def _run(name, *arguments):
    return importlib.import_module(f"examples.seeds.{name}").main(*arguments)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_small_and_says_its_command(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) < 60
    said = ast.get_docstring(ast.parse(text)).splitlines()
    assert f"Run it with `python -m examples.seeds.{name}`." in said
    assert "Without GPUs, it runs on logical CPUs." in said


def test_quadratic():
    data = np.random.default_rng(0).normal(3, 1, size=1000)
    # The distance shrinks by 1 - 2 * 0.1 in each step.
    expected = data.mean() * (1 - 0.8**50)
    np.testing.assert_allclose(_run("quadratic"), expected, rtol=1e-5)


def test_vector_add():
    np.testing.assert_array_equal(_run("vector_add"), 11.0 * np.arange(7))


def test_tower_loop():
    """By numpy: the gradients of a softmax, for the same weights and batches."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    kernel, bias = (each.numpy().astype("float64") for each in model.weights)
    x, y = load_digits(return_X_y=True)
    for _ in range(3):
        for some, labels in zip(
            np.split(x / 16, range(100, 1797, 100)),
            np.split(np.eye(10)[y], range(100, 1797, 100)),
            strict=True,
        ):
            scores = np.exp(some @ kernel + bias)
            p = scores / scores.sum(axis=1, keepdims=True)
            loss = -np.log((p * labels).sum(axis=1)).mean()
            kernel -= 0.5 * some.T @ (p - labels) / len(some)
            bias -= 0.5 * (p - labels).mean(axis=0)
    np.testing.assert_allclose(_run("tower_loop"), loss, rtol=1e-4)


def test_matmul_on_gpu():
    found = _run("matmul_on_gpu")
    np.testing.assert_array_equal(found, [[22, 28], [49, 64]])
    assert found.device.endswith("CPU:2")


@pytest.mark.slow
def test_model_checkpoint(tmp_path):
    best, again = _run("model_checkpoint", str(tmp_path / "best.keras"))
    model = keras.models.load_model(tmp_path / "best.keras")
    keras.utils.set_random_seed(0)
    x = np.random.normal(size=(100, 8)).astype("float32")
    kernel, bias = (each.numpy() for each in model.weights)
    expected = np.mean(((x @ kernel + bias)[:, 0] - x.sum(axis=1)) ** 2)
    np.testing.assert_allclose([best, again], expected, rtol=1e-5)


@pytest.mark.slow
def test_own_pipeline():
    x, y = (np.concatenate(each) for each in zip(*own_pipeline.pipeline(), strict=True))
    assert x.shape == (1000, 1)
    line = LinearRegression().fit(x, y)
    expected = [line.coef_[0], line.intercept_]
    np.testing.assert_allclose(_run("own_pipeline"), expected, atol=0.05)


def test_parallel_map():
    assert {*_run("parallel_map", 20).values()} == {sum(n * n for n in range(20))}


def test_model_parallel():
    """By numpy: two layers, differentiated by hand."""
    draw = tf.random.Generator.from_seed(0)
    w1, w2, x = (
        draw.normal(shape).numpy().astype("float64")
        for shape in ([4, 8], [8, 1], [32, 4])
    )
    expected = []
    for _ in range(50):
        hidden = np.maximum(x @ w1, 0)
        error = hidden @ w2 - x.sum(axis=1, keepdims=True)
        expected.append(np.mean(error**2))
        back = 2 * error / 32
        w1, w2 = (
            w1 - 0.01 * x.T @ (back @ w2.T * (hidden > 0)),
            w2 - 0.01 * hidden.T @ back,
        )
    np.testing.assert_allclose(_run("model_parallel"), expected, rtol=1e-4)
