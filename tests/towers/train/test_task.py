"""Tasks: what they expect, compute and predict."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.towers.train.runs import setup
from tests.variants import slow
from towers.input_pipeline.sources.targets import Target
from towers.train.parts import model as model_parts
from towers.train.parts import task as tasks
from towers.train.parts.facts import DataFacts
from towers.train.parts.task import TASKS
from towers.train.settings import Settings

layers = keras.layers


def about(name, size, target_shape=(), shape=(4,)):
    """What a run of a task is about."""
    kind = TASKS[name].kind
    return setup(Settings(task=name), shape, size, kind, target_shape)


@pytest.mark.parametrize(
    ("name", "size", "target_shape", "expected", "others"),
    [
        ("classification", 3, (), [(None, 3), (None, 4)], [(None, 2), (None, 2, 3)]),
        ("regression", 2, (2,), [(None, 2)], [(None, 3), (None,)]),
        ("regression", 1, (1,), [(None, 1), (None,)], [(None, 2)]),
        ("binary", 2, (), [(None, 1), (None,)], [(None, 2)]),
        ("multilabel", 3, (3,), [(None, 3)], [(None, 4), (None, 3, 1)]),
        ("segmentation", 3, (8, 8), [(None, 8, 8, 3)], [(None, 4, 4, 3), (None, 3)]),
        ("tagging", 5, (7,), [(None, 7, 5), (None, None, 5)], [(None, 6, 5)]),
        ("language_model", 9, (7,), [(None, 7, 9)], [(None, 9), (None, 7, 8)]),
    ],
)
def test_the_output_that_is_expected(name, size, target_shape, expected, others):
    facts, task = about(name, size, target_shape).facts, TASKS[name]
    for shape in expected:
        assert task.fits(shape, facts), shape
    for shape in others:
        assert not task.fits(shape, facts), shape
    assert task.fits(task.output_shape(facts), facts)


def test_an_output_of_another_shape_is_said(monkeypatch):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    monkeypatch.setattr(model_parts.models, "build", lambda *_, **__: model)
    said = (
        r"returns \(None, 3\), but x has 2 numbers to predict; expected one output of "
        r"shape \(None, 2\), a value for each number\."
    )
    with pytest.raises(ValueError, match=said):
        model_parts.build_model(about("regression", 2, (2,)), "/CPU:0")


@pytest.mark.parametrize(
    ("kind", "input_kind", "size", "asked", "chosen"),
    [
        ("class", "image", 2, None, "classification"),
        ("class", "row", 2, "binary", "binary"),
        ("class", "tokens", 3, None, "text_classification"),
        ("numbers", "row", 1, None, "regression"),
        ("labels", "row", 4, None, "multilabel"),
        ("mask", "image", 4, None, "segmentation"),
        ("tags", "tokens", 4, None, "tagging"),
        ("tokens", "tokens", 4, None, "language_model"),
    ],
)
def test_the_task_is_that_of_the_data(kind, input_kind, size, asked, chosen):
    facts = DataFacts("x", input_kind, None, Target(kind, size))
    assert tasks.choose(asked, facts).name == chosen


@pytest.mark.parametrize(
    ("size", "asked", "said"),
    [
        (3, "binary", "x has 3 classes; expected two, so use --task=classification"),
        (
            *(1, "regression"),
            "x has 1 class; expected --task=classification or binary or text_class",
        ),
    ],
)
def test_data_that_are_not_for_the_task(size, asked, said):
    with pytest.raises(ValueError, match=said):
        tasks.choose(asked, DataFacts("x", "row", None, Target("class", size)))


@pytest.mark.parametrize("activation", [None, "sigmoid"])
def test_logits_of_labels_are_told_from_probabilities(activation):
    kernel = keras.initializers.RandomNormal(seed=1)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, activation, kernel_initializer=kernel)]
    )
    found = model_parts.returns_logits(model, about("multilabel", 3, (3,)))
    assert found == (activation is None)


NAMES = ["ant", "bee", "cow"]


@pytest.mark.parametrize(
    ("name", "outputs", "expected"),
    [
        (
            *("classification", [[0, np.log(2), 0]]),
            {
                "class": "bee",
                "probability": pytest.approx(0.5),
                "probabilities": pytest.approx({"ant": 0.25, "bee": 0.5, "cow": 0.25}),
            },
        ),
        *(
            (
                *("binary", [[logit]]),
                {
                    "class": name,
                    "probability": pytest.approx(max(second, 1 - second)),
                    "probabilities": pytest.approx({"ant": 1 - second, "bee": second}),
                },
            )
            for logit, name, second in (
                (np.log(3), "bee", 0.75),
                (-np.log(3), "ant", 0.25),
            )
        ),
        ("regression", [[1.5]], {"value": 1.5}),
        ("regression", [[1, 2, 3]], {"ant": 1.0, "bee": 2.0, "cow": 3.0}),
        (
            *("multilabel", [[0.0, -np.log(3), np.log(3)]]),
            {
                "labels": ["ant", "cow"],
                "probabilities": pytest.approx({"ant": 0.5, "bee": 0.25, "cow": 0.75}),
            },
        ),
        ("tagging", [[[1, 2, 0], [0, 0, 3]]], {"tags": ["bee", "cow"]}),
        ("language_model", [[[1, 2, 0], [0, 0, 3]]], {"tokens": [1, 2]}),
    ],
)
def test_predictions(name, outputs, expected):
    (found,) = TASKS[name].decode(np.array(outputs), NAMES)
    assert found == expected


def test_a_prediction_of_a_mask_without_names():
    (found,) = TASKS["segmentation"].decode(np.eye(3)[None, :2], from_logits=False)
    np.testing.assert_array_equal(found["mask"], [0, 1])


def test_probabilities_stay_as_they_are():
    (found,) = TASKS["classification"].decode(np.array([[0.25, 0.75]]), None, False)
    assert found == {
        "class": "1",
        "probability": 0.75,
        "probabilities": {"0": 0.25, "1": 0.75},
    }


def test_what_text_logs():
    logs = {"loss": np.log(4), "val_loss": np.log(8), "accuracy": 0.5}
    found = TASKS["language_model"].logs(logs, {"loss": 4.0})
    expected = {"perplexity": 4, "val_perplexity": 8, "bits_per_byte": 0.5}
    assert found == pytest.approx(expected)
    assert TASKS["tagging"].logs(logs, {}) == {}
    assert TASKS["language_model"].logs({"loss": 1e4}, {}) == {"perplexity": np.inf}


def test_what_is_better():
    assert tasks.better("val_loss") == tasks.better("mae") == "min"
    assert tasks.better("digit_accuracy") == tasks.better("mean_iou") == "max"
    assert tasks.better("closs") == "auto"


def ys(name, rng):
    """Targets for two examples of a task."""
    if name == "regression":
        return rng.normal(size=(2, 3))
    if name == "multilabel":
        return np.array([[1, 0, 1], [0, 0, 1]])
    shape = {"segmentation": (2, 4, 4), "tagging": (2, 4), "language_model": (2, 4)}
    return rng.integers(0, 2, shape.get(name, (2,)))


@pytest.mark.parametrize(
    "name", [name if name in ("binary", "tagging") else slow(name) for name in TASKS]
)
def test_loss_and_metrics_are_kerass_and_load_without_us(name, tmp_path):
    """What is saved opens in plain Keras; logits and probabilities give the same."""
    task, rng = TASKS[name], np.random.default_rng(0)
    y = task.target(tf.constant(ys(name, rng)))
    size = 1 if name == "binary" else 3
    shape = (*y.shape[1:], size) if task.of_classes else (size,)
    found = []
    for logits in (True, False):
        model = keras.Sequential(
            [keras.Input(shape), layers.Activation("linear" if logits else "softmax")]
        )
        if not task.of_classes and task.probability and not logits:
            model = keras.Sequential([keras.Input(shape), layers.Activation("sigmoid")])
        if task.probability is None:
            model = keras.Sequential([keras.Input(shape), layers.Identity()])
        model.compile("sgd", task.loss(logits), metrics=task.metrics(logits, 3))
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
        x = np.linspace(-2, 3, 2 * int(np.prod(shape))).reshape([2, *shape])
        model.run_eagerly = True
        found.append(model.evaluate(x, y, verbose=0, return_dict=True))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert all(np.isfinite(value) for value in found[0].values())
