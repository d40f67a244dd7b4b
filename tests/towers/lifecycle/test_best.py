"""The best of a run's checkpoints: by what, and how it is used."""

import types

import keras
import numpy as np
import pytest
from absl import flags

from tests.small import tiny
from tests.towers.lifecycle.test_resume import (  # noqa: F401
    begin,
    finite,
    pipeline,
    record,
)
from towers.lifecycle.checkpoint import Checkpoint
from towers.lifecycle.checkpoints.best import Monitor
from towers.lifecycle.continuing import resume
from towers.model.tower_model import TowerModel
from towers.train import continued
from towers.train.settings import NAMES, Settings

pytestmark = pytest.mark.usefixtures("record")


def fit(folder, scores, x=None, name="val_loss", restore="last", **options):
    """Fits an epoch for each score, which the weights then are."""
    plain, parallel = begin(1)
    checkpoint = Checkpoint(folder, **options)
    checkpoint.restore(plain, restore)
    epochs, left = checkpoint.position.epoch + len(scores), iter(scores)

    def says(epoch, logs):
        logs[name] = next(left)
        if np.isfinite(logs[name]):
            weights = [np.full(w.shape, logs[name]) for w in plain.get_weights()]
            plain.set_weights(weights)

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=says), checkpoint]
    x = finite() if x is None else x
    parallel.fit(x, epochs=epochs, callbacks=callbacks, verbose=0)
    return checkpoint, plain


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("options", "best"),
    [
        ({}, (3, 1.0)),
        ({"name": "loss"}, (3, 1.0)),
        ({"name": "val_f", "monitor": "val_f", "mode": "max"}, (2, 5.0)),
        ({"name": "f", "monitor": "f", "mode": "min"}, (3, 1.0)),
    ],
)
def test_by_the_metric_that_is_named(tmp_path, options, best, capsys):
    checkpoint, model = fit(
        tmp_path, [2.0, 5.0, 1.0, 1.0, np.nan], keep_checkpoints=1, **options
    )
    found = checkpoint.find_best(model)
    assert (found.epoch, found.value) == best
    assert found.monitor == options.get("name", "val_loss")
    # The first of those that are as good.
    assert names(tmp_path) == [f"ckpt-{best[0]}-0", "ckpt-5-0"]
    by_loss = (
        "There is no validation data; the best checkpoint is that of the lowest loss."
    )
    assert (by_loss in capsys.readouterr().err) == (options.get("name") == "loss")


def test_a_worse_run_leaves_the_best(tmp_path):
    fit(tmp_path, [2.0, 1.0, 3.0], keep_checkpoints=9)
    for scores, found in (((9.0, 8.0, 7.0), (2, 1.0)), ((0.5,), (7, 0.5))):
        checkpoint, model = fit(tmp_path, scores, keep_checkpoints=1)
        best = checkpoint.find_best(model)
        assert (best.epoch, best.value) == found
    assert names(tmp_path) == ["ckpt-7-0"]
    # By another metric: that is in the history, of the epochs that are still there.
    other = Checkpoint(tmp_path, monitor="loss")
    assert other.restore(model) and other.find_best(model).value == 0.0


def test_goes_on_from_the_best(tmp_path):
    fit(tmp_path, [3.0, 1.0, 2.0, 4.0], keep_checkpoints=9)
    plain, _ = begin(1)
    checkpoint = Checkpoint(tmp_path, keep_checkpoints=9)
    assert checkpoint.restore(plain, "best")
    assert checkpoint.latest == f"{tmp_path}/ckpt-2-0"
    assert all((weights == 1.0).all() for weights in plain.get_weights())
    # Until something else is saved, nothing is lost.
    given_up = [f"{tmp_path}/ckpt-4-0", f"{tmp_path}/ckpt-3-0"]
    assert checkpoint.discarded == given_up and len(names(tmp_path)) == 4
    checkpoint, _ = fit(tmp_path, [1.5], restore="best", keep_checkpoints=9)
    assert names(tmp_path) == ["ckpt-1-0", "ckpt-2-0", "ckpt-3-0"]
    assert checkpoint.model.history.history["val_loss"] == [3.0, 1.0, 1.5]
    assert checkpoint.find_best(plain).epoch == 2
    assert checkpoint.restore(plain, f"{tmp_path}/ckpt-1-0")
    assert all((weights == 3.0).all() for weights in plain.get_weights())
    with pytest.raises(ValueError, match=r"checkpoint 'x'; expected 'last', 'best'"):
        checkpoint.restore(plain, "x")
    assert not Checkpoint(tmp_path / "none").restore(plain, "best")


def test_a_metric_that_is_not_there_is_an_error(tmp_path):
    words = "monitor='val_f', which the epoch has not measured; expected one of loss"
    with pytest.raises(ValueError, match=words):
        fit(tmp_path, [1.0], name="loss", monitor="val_f", mode="max")
    with pytest.raises(ValueError, match="mode='up'; expected 'auto', 'min' or 'max'"):
        Checkpoint(tmp_path, mode="up")
    with pytest.raises(ValueError, match="monitor=3; expected the name of a metric"):
        Checkpoint(tmp_path, monitor=3)
    with pytest.raises(ValueError, match="'loss', and the epoch has measured nothing"):
        Monitor("loss", "min").score({}, False, None)
    # An epoch without validation, in a run with some.
    assert Monitor("val_f", "max").score({"loss": 1.0}, True, None) is None


def test_the_direction_is_that_of_keras():
    model = tiny(metrics=["accuracy"], run_eagerly=True)
    model.test_on_batch(np.zeros([2, 4, 4, 1]), np.zeros(2))
    for name, mode in (("val_accuracy", "max"), ("loss", "min")):
        monitor = Monitor(name)
        monitor.settle(model)
        assert monitor.mode == mode
    with pytest.raises(ValueError, match="'f', but Keras does not know whether"):
        Monitor("f").settle(model)


def test_other_data_are_said(tmp_path, capsys):
    fit(tmp_path, [1.0], x=pipeline())
    capsys.readouterr()
    fit(tmp_path, [1.0], x=pipeline(batch_size=3))
    assert capsys.readouterr().err == (
        f"towers: Note: The run {tmp_path}/ckpt-1-0 goes on with other data, from "
        "their beginning: batch size 4 before, 3 now; steps_per_epoch 6 before, 7 "
        "now.\n"
    )
    with pytest.raises(
        resume.ResumeError, match=r"21 classes, but received data with 30"
    ):
        fit(tmp_path, [1.0], x=pipeline(classes=30))
    names = [*"abcdefghijklmnopqrstu"]
    with pytest.raises(resume.ResumeError, match="class 'b', but received 'B' for it"):
        resume.check_classes("run", names, ["a", "B", *names[2:]])


def test_other_data_to_validate_on_are_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(TowerModel, "evaluate", lambda *_, **__: {"loss": 1.0})
    for count in (3, 3, 2):
        capsys.readouterr()
        parallel, checkpoint = begin(1)[1], Checkpoint(tmp_path)
        epochs = len(names(tmp_path)) + 1
        options = {"epochs": epochs, "callbacks": [checkpoint], "verbose": 0}
        held_out = np.zeros([count, 1, 1, 1]), np.zeros(count)
        parallel.fit(finite(), validation_data=held_out, **options)
        said = capsys.readouterr().err
        words = "is validated on other data: examples 3 before, 2 now; the best"
        assert (words in said) == (count == 2)


def test_changed_flags_are_said():
    now = Settings(batch_size=32, deterministic=True, momentum=0.5)
    before = Settings(image_size="32", momentum=0.5).as_text() + "--gone=1\n"
    # As if they were new in this version.
    before = before.replace("--momentum=0.5\n", "").replace("--seed=0\n", "")
    said = continued.changed_flags(before, now)
    assert said and "batch_size" not in said  # the data's note says it
    assert continued.changed_flags(before, now, trains=False) == (
        "Changed since the last run: --batch_size=32 (before 64); --deterministic "
        "(before --nodeterministic); no --image_size (before 32); --momentum=0.5 "
        "(not given before)."
    )
    # Of an evaluation, those that change what the model sees.
    of_input = continued.changed_flags(before, now, False, continued.OF_THE_INPUT)
    assert of_input == "Changed since the last run: no --image_size (before 32)."
    assert {*continued.OF_THE_INPUT} <= {*NAMES}
    assert continued.changed_flags(now.as_text(), now) is None
    # The flags of 0.2 are read as those that replace them.
    now = Settings(save_every=("3", "0min"), monitor="min:loss", dataset="digits")
    old = "--dataset=digits\n--save_steps=3\n--save_minutes=0\n--stall_seconds=300\n"
    old += "--monitor=loss\n--monitor_mode=min\n--all_reduce_alg=auto\n"
    assert continued.changed_flags(old, now, trains=False) is None


def test_the_flags_of_the_run_before_leave_verbosity_as_it_is(monkeypatch):
    monkeypatch.setattr(flags.FLAGS["verbosity"], "present", 1)
    before = Settings().as_text()
    assert continued.changed_flags(before, Settings(seed=1)).count("--seed=1") == 1
    assert flags.FLAGS["verbosity"].present == 1


@pytest.mark.parametrize("validates", [True, False])
def test_monitor_of_the_command_line(tmp_path, validates):
    first = "val_loss" if validates else "loss"

    def monitor(**asked):
        setup = types.SimpleNamespace(settings=Settings(**asked))
        made = continued.make_checkpoint(setup, str(tmp_path), validates)
        monitor = made.run.checkpoints.monitor
        return monitor.name, monitor.mode

    assert monitor() == (first, "min")
    if validates:
        assert monitor(monitor="val_accuracy") == ("val_accuracy", "max")
    else:
        with pytest.raises(ValueError, match="expected accuracy, or an --eval"):
            monitor(monitor="val_accuracy")
        assert continued.best_text(Settings()) == "lowest loss"
        assert continued.best_text(Settings(monitor="accuracy")) == "highest accuracy"


def test_a_model_that_was_saved_is_evaluated(tmp_path):
    model, other, path = tiny(), tiny(seed=2), f"{tmp_path}/best.keras"
    model.save(path)
    asked, checkpoint = Settings(checkpoint=path), Checkpoint(tmp_path)
    with pytest.raises(ValueError, match="from which no run can go on"):
        continued.restore(asked, checkpoint, str(tmp_path), other)
    asked = asked.but(eval_only=True)
    continued.restore(asked, checkpoint, str(tmp_path), other)
    assert continued.text(asked, checkpoint, other) == [f"Evaluating {path}."]
    with pytest.raises(ValueError, match="Cannot read the weights of --checkpoint"):
        continued.restore(asked, checkpoint, str(tmp_path), tiny(units=5))
    for a, b in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_of_another_model(tmp_path, recwarn):
    model, other = (
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(units, name="dense")])
        for units in (2, 3)
    )
    model.compile("sgd", "mse")
    other.compile("adam", "mse")
    other.optimizer.build(other.trainable_variables)
    other.save(tmp_path / "other.keras")
    said = r"other\.keras: .*\(2, 3\).*; expected a model that was saved with --model="
    asked = Settings(checkpoint=f"{tmp_path}/other.keras", eval_only=True)
    with pytest.raises(ValueError, match=said):
        continued.restore(asked, None, str(tmp_path), model)
    assert not [each for each in recwarn if "Skipping" in str(each.message)]
