"""Flags of training, against what Keras does on one device."""

import csv
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.towers.train.runs import (
    assembled,
    assert_same_bits,
    run_here,
    summary_of,
    weights,
)
from towers import input_pipeline
from towers.input_pipeline.sources.targets import Target
from towers.train import callbacks, checks
from towers.train import run as train_run
from towers.train.parts import metrics
from towers.train.parts import setup as setup_parts
from towers.train.parts import training as training_parts
from towers.train.parts.facts import DataFacts
from towers.train.parts.setup import Setup
from towers.train.parts.task import TASKS
from towers.train.parts.training import build_optimizer, learning_rate
from towers.train.settings import Settings

# Three steps an epoch.
DATA = ("--dataset=synthetic:4x4x1:3:48", "--batch_size=16", "--model=mlp")
DATA = (*DATA, "--deterministic", "--seed=3")
# In each epoch one of two batches is half of a step.
OPTIMIZER = (
    *("--lr_schedule=cosine", "--warmup_steps=1", "--learning_rate=0.01"),
    *("--clip_norm=0.5", "--accumulate_steps=2", "--ema=0.9"),
)
CosineDecay = keras.optimizers.schedules.CosineDecay


class _Killed(Exception):
    pass


def killed(monkeypatch, *flags, batches):
    """Runs, and is killed within a batch, after so many."""

    class Kill(keras.callbacks.Callback):
        done = 0

        def on_train_batch_end(self, batch, logs=None):
            self.done += 1
            if self.done == batches:
                raise _Killed

    with monkeypatch.context() as patch:
        made = callbacks.make
        patch.setattr(callbacks, "make", lambda *a, **k: [*made(*a, **k), Kill()])
        with pytest.raises(_Killed):
            run_here(*flags)


def trained_plainly(flags, optimizer, smooth=None, metrics=(), **options):
    """Trains the model of a job without a line of ours; the model and its history."""
    job = assembled(*flags)
    model = keras.models.clone_model(job.model)
    model.set_weights(job.model.get_weights())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if smooth is not None:
        loss = keras.losses.CategoricalCrossentropy(True, label_smoothing=smooth)
    metrics = ["accuracy", *metrics]
    model.compile(optimizer, loss, metrics=metrics, run_eagerly=True)

    def prepared(images, labels):
        labels = labels if smooth is None else tf.one_hot(labels, 3)
        return input_pipeline.normalize(images), labels

    training = job.data.open_training().map(prepared)
    evaluation = job.data.evaluation.map(prepared)
    epochs, steps = job.settings.train_epochs, job.data.steps_per_epoch()
    options = {"validation_data": evaluation, "shuffle": False, "verbose": 0} | options
    history = model.fit(training, epochs=epochs, steps_per_epoch=steps, **options)
    return model, history.history


@pytest.mark.slow
def test_optimizer_flags_are_those_of_keras(tmp_path):
    flags = *DATA, *OPTIMIZER, "--train_epochs=2"
    job = assembled(*flags, f"--model_dir={tmp_path}")
    train_run.run(job)
    # It counts what is accumulated: 3 batches an epoch.
    schedule = CosineDecay(0.0, 6 - 2, warmup_target=0.01, warmup_steps=2)
    optimizer = keras.optimizers.Adam(
        *(schedule,),
        **{"global_clipnorm": 0.5, "gradient_accumulation_steps": 2},
        **{"use_ema": True, "ema_momentum": 0.9},
    )
    plain, history = trained_plainly(
        flags, optimizer, callbacks=[keras.callbacks.SwapEMAWeights()]
    )
    for name in ("val_loss", "val_accuracy", "loss"):
        ours = job.model.history.history[name]
        np.testing.assert_allclose(ours, history[name], rtol=1e-5)
    # Keras has put the averages in the place of the weights.
    ours, best = weights(tmp_path), tmp_path / "best.keras"
    for a, b in zip(ours, plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    summary = summary_of(tmp_path)
    assert summary["steps"] == 6 // 2
    assert summary["val_loss"] == pytest.approx(history["val_loss"][-1], rel=1e-5)
    # What was validated is what is saved.
    loaded = keras.models.load_model(best)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    data = [(input_pipeline.normalize(x), y) for x, y in job.data.evaluation]
    found = np.average(
        [float(loss(y, loaded(x))) for x, y in data], weights=[len(y) for _, y in data]
    )
    assert found == pytest.approx(min(history["val_loss"]), rel=1e-5)
    assert float(loaded.optimizer.learning_rate) >= 0


@pytest.mark.slow
def test_killed_while_it_accumulates_and_averages(tmp_path, monkeypatch):
    flags = *DATA, *OPTIMIZER, "--train_epochs=2", "--save_every=1"
    path, whole = tmp_path / "run", tmp_path / "whole"
    killed(monkeypatch, *flags, f"--model_dir={path}", batches=4)
    found = {p.name for p in (path / "checkpoints").iterdir()}
    # Between the two halves of a step.
    assert "ckpt-1-0" in found and "ckpt-1-1" not in found
    for folder in (path, whole):
        run_here(*flags, f"--model_dir={folder}")
    for name in ("model.keras", "best.keras"):
        ours, theirs = (keras.models.load_model(p / name) for p in (path, whole))
        assert_same_bits(ours.get_weights(), theirs.get_weights())
    # Done, and asked for again: the averages are evaluated, not the weights.
    run_here(*flags, f"--model_dir={path}")
    assert summary_of(path)["val_loss"] == summary_of(whole)["val_loss"]
    assert_same_bits(weights(path), weights(whole))


@pytest.mark.slow
def test_killed_among_batches_of_several_lengths(tmp_path, monkeypatch):
    lines = [f"{'a' * (k % 37 + 1)},{k % 2}\n" for k in range(160)]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(lines))
    flags = (
        *(f"--dataset=csv:{tmp_path}/a.csv", "--text_column=text", "--seed=3"),
        *("--sequence_length=32", "--group_by_length", "--deterministic"),
        *("--model=transformer_encoder", "--model_options=layers=1,width=8,heads=2"),
        *("--batch_size=8", "--train_epochs=2", "--save_every=1"),
    )
    path, whole = tmp_path / "run", tmp_path / "whole"
    killed(monkeypatch, *flags, f"--model_dir={path}", batches=23)
    for folder in (path, whole):
        run_here(*flags, f"--model_dir={folder}")
    assert_same_bits(weights(path), weights(whole))
    assert summary_of(path)["val_loss"] == summary_of(whole)["val_loss"]


OBJECTIVE = (
    *("--label_smoothing=0.2", "--class_weight=balanced", "--log_csv"),
    # It falls: the first epoch stays the best.
    *("--early_stopping=2", "--monitor=max:", "--optimizer=sgd"),
    *("--metrics=SparseTopKCategoricalAccuracy", "--learning_rate=0.01"),
)


def logged(folder):
    with open(folder / "log.csv", newline="") as file:
        return [*csv.DictReader(file)]


@pytest.mark.slow
def test_flags_of_the_objective_are_those_of_keras(tmp_path, capsys):
    flags = *DATA, *OBJECTIVE, "--train_epochs=5"
    run_here(*flags, f"--model_dir={tmp_path}")
    out = capsys.readouterr().out
    weights_of_classes = [float(each) for each in re.findall(r" \d ([\d.]+)[,.]", out)]
    assert "Class weights: 0 " in out
    assert "Stopped early: val_loss has not been better for 2 epochs." in out
    assert "Done: 3 epochs" in out
    counts = np.zeros(3)
    for _, labels in assembled(*flags).data.open_training(repeat=False):
        counts += np.bincount(labels, minlength=3)
    found = dict(enumerate(counts.sum() / (3 * counts)))
    np.testing.assert_allclose(weights_of_classes, [*found.values()], rtol=1e-2)
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, mode="max")
    metrics = [keras.metrics.TopKCategoricalAccuracy(name="top_k")]
    _, history = trained_plainly(
        *(flags, keras.optimizers.SGD(0.01, momentum=0.9), 0.2, metrics),
        **{"callbacks": [stop], "class_weight": found},
    )
    rows = logged(tmp_path)
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    names = dict.fromkeys(["loss", "accuracy", "val_loss", "val_accuracy"])
    names = {name: name for name in names}
    names["val_top_k"] = "val_sparse_top_k_categorical_accuracy"
    for theirs, ours in names.items():
        values = [float(row[ours]) for row in rows]
        np.testing.assert_allclose(values, history[theirs], rtol=1e-5)


@pytest.mark.slow
def test_killed_before_it_stops_early(tmp_path, capsys, monkeypatch):
    flags = *DATA, *OBJECTIVE, "--train_epochs=5"
    path, whole = tmp_path / "run", tmp_path / "whole"
    run_here(*flags, f"--model_dir={whole}")
    rows = logged(whole)
    # Killed in the second epoch, it stops where it would have.
    killed(monkeypatch, *flags, f"--model_dir={path}", batches=5)
    assert len(logged(path)) == 1
    (path / "log.csv").write_text((whole / "log.csv").read_text())  # it had got further
    run_here(*flags, f"--model_dir={path}")
    assert logged(path) == rows
    assert_same_bits(weights(path), weights(whole))
    capsys.readouterr()
    run_here(*flags, f"--model_dir={path}")
    out = capsys.readouterr().out
    assert "Stopped early: val_loss" in out
    assert "has 3 epochs already. Give more --early_stopping, or" in out
    assert_same_bits(weights(path), weights(whole))


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "step"])
def test_warm_up(schedule):
    asked = Settings(lr_schedule=schedule, learning_rate=0.5, train_epochs=2)
    # 8 steps, 2 batches for each.
    asked = asked.but(batch_size=10, warmup_steps=4, accumulate_steps=2)
    rate = learning_rate(asked, 80, 1)
    steps = [0, 2, 4, 7, 8, 10, 12, 16]
    rising = [0.0, 0.125, 0.25, 0.4375, 0.5]
    falling = {
        "constant": [0.5, 0.5, 0.5],
        "cosine": [float(CosineDecay(0.5, 8)(step)) for step in (2, 4, 8)],
        "linear": [0.375, 0.25, 0.0],
        "step": [0.5, 0.5, 0.005],
    }
    found = [float(rate(step)) for step in steps]
    np.testing.assert_allclose(found, rising + falling[schedule], atol=1e-6)
    if schedule != "constant":
        with pytest.raises(ValueError, match="--warmup_steps=8 for a run of 16 steps"):
            learning_rate(asked.but(warmup_steps=8), 80, 1)


def test_options_of_the_optimizer():
    asked = Settings(clip_norm=0.5, accumulate_steps=3, ema=0.75)
    made = build_optimizer(asked, 95, 1)
    config = made.get_config()
    names = "global_clipnorm", "gradient_accumulation_steps", "use_ema", "ema_momentum"
    assert [config[name] for name in names] == [0.5, 3, True, 0.75]
    plain = build_optimizer(Settings(), 95, 1).get_config()
    assert [plain[name] for name in names[:3]] == [None, None, False]


def of_task(name, size=2, **asked):
    """A setup as far as its objective needs it."""
    kind = TASKS[name].kind
    target = Target(kind, size, ("ant", "bee") if kind == "class" else None)
    facts = DataFacts("csv:a.csv", "row", keras.KerasTensor((None, 4)), target)
    return Setup(Settings(**asked), facts, TASKS[name])


def test_metrics_are_those_of_the_task():
    asked = ("precision", "AUC", "F1Score")
    found = training_parts.metrics(of_task("binary", metrics=asked), logits=False)
    # What the task measures already is not measured twice.
    assert [metric.name for metric in found] == [
        "auc",
        "accuracy",
        "precision",
        "f1_score",
    ]
    # A logit of 0 is a probability of 1/2.
    precision = training_parts.metrics(
        of_task("binary", metrics=asked[:2]), logits=True
    )[-1]
    precision.update_state([[1.0], [0.0], [1.0]], [[0.2], [-0.1], [-3.0]])
    assert float(precision.result()) == 1.0
    (_, iou) = training_parts.metrics(
        of_task("classification", metrics=("MeanIoU",)), True
    )
    iou.update_state([0, 1], [[3.0, 1.0], [2.0, 5.0]])
    assert float(iou.result()) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="F1Score, which needs probabilities"):
        training_parts.metrics(of_task("binary", metrics=asked), logits=True)


def test_names_of_metrics():
    assert {*metrics.METRICS} == {*TASKS}
    for task, names in metrics.METRICS.items():
        assert all(hasattr(keras.metrics, name) for name in names)
        metrics.check(names, task)
    found = Settings(metrics=("mae", "f1_score", "mean_IoU")).metric_names
    assert found == ["MeanAbsoluteError", "F1Score", "MeanIoU"]
    with pytest.raises(ValueError, match="=AUC for --task=classification; expected s"):
        facts = of_task("classification", 3).facts
        setup_parts.of(Settings(metrics=("auc",)), facts, None)


def test_labels_are_smoothed_where_there_are_some():
    smooth = {"label_smoothing": 0.2}
    loss = training_parts.loss(of_task("multilabel", 3, **smooth), logits=True)
    assert type(loss) is keras.losses.BinaryCrossentropy
    assert loss.get_config()["label_smoothing"] == 0.2
    assert not training_parts.is_one_hot(of_task("binary", **smooth))
    with pytest.raises(ValueError, match=r"=0\.2 for --task=segmentation; expected it"):
        training_parts.loss(of_task("segmentation", **smooth), logits=True)


def test_classes_are_weighted_by_name_or_number():
    found = training_parts.class_weight(
        of_task("binary", class_weight=("bee:5",)), None
    )
    assert found == {0: 1.0, 1: 5.0}
    numbered = of_task("classification", class_weight=("0:2", "1:0.5"))
    assert training_parts.class_weight(numbered, None) == {0: 2.0, 1: 0.5}
    said = training_parts.class_weight_text(numbered, {0: 2.0, 1: 0.5})
    assert said == "Class weights: ant 2, bee 0.5."
    for asked, task, message in (
        (("owl:2",), "classification", "no class 'owl'; expected some of 0, 1, ant"),
        (("0:2",), "regression", "no classes of examples; leave it out"),
        (("balanced",), "classification", "file of your own, which are not counted"),
    ):
        with pytest.raises(ValueError, match=message):
            training_parts.class_weight(of_task(task, class_weight=asked), None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"clip_norm": 0.0}, "--clip_norm=0.0; expected more than 0"),
        ({"ema": 1.0}, "--ema=1.0; expected more than 0 and less than 1"),
        ({"accumulate_steps": 0}, "--accumulate_steps=0; expected at least 1"),
        ({"early_stopping": 0}, "--early_stopping=0; expected at least 1"),
        ({"label_smoothing": 1.0}, "--label_smoothing=1.0; expected at least 0 and"),
        ({"warmup_steps": -1}, "--warmup_steps=-1; expected at least 0"),
        ({"warmup_steps": 5, "max_train_steps": 5}, "end the warm-up and training"),
        ({"metrics": ("Recal",)}, "expected metrics of keras.metrics, such as Recall"),
        (
            {"metrics": ("categorical_accuracy",)},
            "one-hot labels; expected --metrics=SparseCategoricalAccuracy, as labels",
        ),
        ({"metrics": ("accuracy",)}, "classes or labels measures accuracy already"),
        (
            {"metrics": ("precision",)},
            "file of your own defines, or --task=binary for two classes.",
        ),
        (
            {"task": "regression", "metrics": ("auc",)},
            "=AUC for --task=regression; expected some of MeanSquaredError, Root",
        ),
        ({"class_weight": ("0", "1")}, "--class_weight=0,1; expected balanced, or a"),
        ({"class_weight": ("a:1", "a:2")}, "--class_weight=a:1,a:2; expected balanc"),
        ({"class_weight": ("a:-1",)}, "--class_weight=a:-1; expected balanced, or"),
        ({"class_weight": ("a:b",)}, "--class_weight=a:b; expected balanced, or a"),
        ({"class_weight": ("a:1",), "mix": ("mixup:0.2",)}, "with --mix=mixup:0.2"),
    ],
)
def test_bad_flags_of_training(flags, message):
    with pytest.raises(ValueError, match=message):
        checks.check(Settings(**flags))


@pytest.mark.parametrize(
    "flags",
    [
        {"class_weight": ("balanced",)},
        {"label_smoothing": 0.1},
        {"mix": ("mixup:0.2",)},
    ],
)
def test_parity_compares_plain_losses(flags):
    with pytest.raises(ValueError, match=r"leave (it|them) out"):
        checks.check_not_mixed(Settings(**flags))
