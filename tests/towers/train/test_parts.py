"""Parts of towers.train that need no run."""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import signal
import types
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import small
from tests.towers.train.runs import (
    TWO_STEPS,
    assembled,
    run_here,
    setup,
    snapshot,
    write_folder,
)
from towers import devices, input_pipeline
from towers.elastic import balance, requests
from towers.hosts import group
from towers.hosts.group import HostFailedError
from towers.input_pipeline.sources.targets import Target
from towers.numerics.errors import NotFinite
from towers.processes.signals import Stopped
from towers.program import ending, whole_file
from towers.tower.errors import ModelError
from towers.train import __main__ as train
from towers.train import callbacks, checks
from towers.train import run as train_run
from towers.train.job import Job
from towers.train.outputs import files
from towers.train.outputs import start as first_lines
from towers.train.parts import data as data_parts
from towers.train.parts import model as model_parts
from towers.train.parts import own_data
from towers.train.parts.devices import configure_devices, split_ratios
from towers.train.parts.training import build_optimizer, learning_rate
from towers.train.settings import Settings


@pytest.mark.parametrize(
    ("error", "saved", "said"),
    [
        (
            ending.Terminated(),
            "a/b",
            "Stopped by SIGTERM: the last checkpoint is a/b; ",
        ),
        (KeyboardInterrupt(), None, "Stopped by Ctrl-C: nothing was saved yet."),
        (ValueError("a bug"), None, ""),
    ],
)
def test_what_is_said_of_a_run_that_is_ended(monkeypatch, capsys, error, saved, said):
    job = mock.MagicMock()
    job.checkpoint.latest = saved
    monkeypatch.setattr(signal, "signal", mock.Mock())
    monkeypatch.setattr(train, "assemble", lambda settings: job)
    monkeypatch.setattr(train, "run", mock.Mock(side_effect=error))
    job.data.blaming.return_value.__exit__.return_value = False
    with contextlib.nullcontext() if said else pytest.raises(ValueError, match="a bug"):
        assert train.main(Settings()) == ending.cause_of(error)[1]
    assert capsys.readouterr().err.startswith(said and f"towers.train: {said}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_end_is_no_failure(monkeypatch, number):
    data = types.SimpleNamespace(blaming=contextlib.nullcontext)
    job = types.SimpleNamespace(data=data)
    monkeypatch.setattr(train, "assemble", lambda settings: job)
    monkeypatch.setattr(train, "run", lambda job: None)
    numbers = signal.SIGINT, signal.SIGTERM
    before = {each: signal.getsignal(each) for each in numbers}
    try:
        assert train.main(Settings()) == 0
        signal.raise_signal(number)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_another_seed_gives_other_weights(monkeypatch):
    monkeypatch.setattr(devices, "configure", lambda *_, **__: None)
    drawn = []
    for seed in (3, 4, 3):
        configure_devices(Settings(seed=seed))
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        drawn.append(model.get_weights()[0])
    np.testing.assert_array_equal(drawn[0], drawn[2])
    assert not np.array_equal(drawn[0], drawn[1])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", [1.0, 0.5 + 0.5 / 2**0.5, 0.5, 0.0]),
        ("linear", [1.0, 0.75, 0.5, 0.0]),
        ("step", [1.0, 1.0, 1.0, 0.01]),
    ],
)
def test_learning_rate(schedule, expected):
    asked = Settings(lr_schedule=schedule, learning_rate=1.0, train_epochs=4)
    # 95 images are 10 steps an epoch.
    rate = learning_rate(asked.but(batch_size=10), 95, 1)
    found = [float(rate(step)) for step in (0, 10, 20, 40)]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_learning_rate_of_unknown_length():
    asked = Settings(lr_schedule="cosine")
    with pytest.raises(ValueError, match="--max_train_steps"):
        learning_rate(asked, None, 1)
    assert float(learning_rate(asked.but(max_train_steps=8), None, 1)(8)) == 0.0


def test_optimizer():
    asked = Settings(optimizer="sgd", momentum=0.75, weight_decay=0.5)
    sgd = build_optimizer(asked, 95, 1)
    assert type(sgd) is keras.optimizers.SGD
    assert (sgd.momentum, sgd.weight_decay) == (0.75, 0.5)
    adamw = build_optimizer(Settings(optimizer="AdamW"), 95, 1)
    assert type(adamw) is keras.optimizers.AdamW


@pytest.mark.parametrize(
    ("end", "from_logits"),
    [
        ([keras.layers.Dense(3)], True),
        ([keras.layers.Dense(3, activation="softmax")], False),
        ([keras.layers.Dense(3), keras.layers.Softmax()], False),
        ([keras.layers.Dense(3), keras.layers.Activation("softmax")], False),
    ],
)
def test_loss_fits_the_models_end(end, from_logits):
    model = keras.Sequential([keras.Input((4,)), *end])
    model_parts.compile_model(setup(), model, 95)
    assert model.loss.get_config()["from_logits"] is from_logits
    assert model.optimizer.built


def test_nothing_left_names_the_flag_that_ended_it(tmp_path, capsys):
    asked = Settings(model_dir=str(tmp_path), max_train_steps=7)
    job = mock.Mock(settings=asked, model_dir=str(tmp_path), epoch=0, step=7)
    job.stopped_early = False
    with mock.patch.object(train_run.files, "describe") as described:
        assert train_run.train(job) == (job, None)
    # model.keras is of the flags that it was trained with.
    assert not described.called
    assert "has 7 steps already. Give more --max_train_steps" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}'])
def test_what_was_measured_before_may_be_unknown(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    assert set(train_run.measured_before(str(tmp_path)).values()) == {None}


def test_a_report_that_looks_at_the_lock_keeps_no_run_away(tmp_path, monkeypatch):
    (tmp_path / "lock").touch()
    with open(tmp_path / "lock") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_SH)
        waits = []
        monkeypatch.setattr(
            *(requests.time, "sleep"),
            lambda s: (waits.append(s), fcntl.flock(theirs, fcntl.LOCK_UN)),
        )
        with requests.locked(tmp_path):
            assert requests.is_running(tmp_path)
            with requests.answering(tmp_path):  # without another look
                pass
            assert requests.is_running(tmp_path)
    assert len(waits) == 1 and not requests.is_running(tmp_path)


def test_clean_removes_only_what_a_run_wrote(tmp_path):
    mine = [
        "notes.txt",
        "notes.txt.123.unfinished",
        "other.keras",
        "train/cat/1.png",
        "checkpoints/mine.h5",
    ]
    written = ["model.keras", "summary.json", "flags.txt", "unfinished.keras"]
    written += ["not_finite.npz.123.unfinished", "bad_records.json.unfinished"]
    written += ["checkpoints/ckpt-1-0/variables.index"]
    written += ["checkpoints/.unfinished/variables.index"]
    written += [f"{r}/events.out.tfevents.1.v2" for r in ("train", "validation")]
    written += ["train/plugins/profile/2026_11_21_09_04_01/host.xplane.pb"]
    for name in mine + written:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files.remove_run(str(tmp_path))
    left = {str(p.relative_to(tmp_path)) for p in snapshot(tmp_path)}
    assert left == set(mine)
    assert not (tmp_path / "validation").exists()
    assert not (tmp_path / "train" / "plugins").exists()


@pytest.mark.slow
def test_a_run_removes_what_killed_ones_have_left(tmp_path):
    for name in ("flags.txt", "log.csv", "report.html", "resize.json", "notes.txt"):
        (tmp_path / f"{name}.123.unfinished").touch()
    run_here(*TWO_STEPS, "--train_epochs=1", f"--model_dir={tmp_path}")
    # Others write reports and requests, and perhaps now.
    left = {path.name.partition(".")[0] for path in tmp_path.glob("*.unfinished")}
    assert left == {"report", "resize", "notes"}


def test_callbacks_are_in_order(tmp_path, capsys):
    data = "--dataset=synthetic:4x4x1:3:32", "--model=mlp", f"--model_dir={tmp_path}"
    job = assembled(
        *(*data, "--num_gpus=2", "--batch_size=8", "--variable_update=asynchronous"),
        *("--profile_steps=2,3", f"--preemption_notice={tmp_path}/notice"),
        *("--early_stopping=2", "--monitor=accuracy", "--ema=0.5"),
    )
    watch = callbacks.make_watch(job)
    with mock.patch.object(callbacks, "make_tensorboard") as shown:
        made = callbacks.make(job, watch, lines=True)
    names = [type(each).__name__ for each in made]
    assert names[:3] == ["Stall", "PreemptionNotice", "Resize"]
    assert names.index("SwapEMAWeights") < names.index(type(job.checkpoint).__name__)
    assert names[3] == "Profile" and names[-2:] == ["EarlyStopping", "Lines"]
    assert job.parallel.builder.staleness.measured in shown.call_args.args[1]
    settings = job.settings.but(learning_rate=0.5)
    train_run.renew_learning_rate(dataclasses.replace(job, settings=settings))
    assert float(job.model.optimizer.learning_rate) == 0.5
    assert capsys.readouterr().out == "Learning rate: 0.5, after 0.001.\n"


def test_pictures_are_mixed_in_training_only():
    about = setup(Settings(mix=("mixup:1",)), (4, 4, 1))
    prepared = model_parts.make_preprocess(about, 3)
    pictures = tf.constant([0, 255], tf.uint8, [2, 1, 1, 1]) * tf.ones(
        [4, 4, 1], "uint8"
    )
    x, y = prepared(pictures, tf.constant([0, 2]), training=False)
    assert (x[0, 0, 0, 0], x[1, 0, 0, 0]) == (-1, 1)
    np.testing.assert_array_equal(y, [[1, 0, 0], [0, 0, 1]])
    _, y = prepared(pictures, tf.constant([0, 2]), training=True)
    assert 0 < y[0, 0] < 1 and y[0, 0] + y[0, 2] == 1


def test_split_ratios():
    placed = devices.Devices(("/device:CPU:0", "/device:CPU:1"), "/device:CPU:0")
    assert split_ratios(Settings(), placed) == (1, 1)
    assert split_ratios(Settings(split_ratios=("3", "10")), placed) == (3, 10)
    with pytest.raises(ValueError, match=r"=3 for 2 towers; .* or --num_gpus=1\."):
        split_ratios(Settings(split_ratios=("3",)), placed)


def test_split_ratios_that_were_found(tmp_path, monkeypatch):
    placed = devices.Devices(("/device:CPU:0", "/device:CPU:1"), "/device:CPU:0")
    settings = Settings(split_ratios=("auto",), model_dir=str(tmp_path))
    settings = checks.check(settings)
    assert split_ratios(settings, placed) == (1, 1)
    balance.remember(str(tmp_path / requests.RATIOS), placed.towers, (2, 5))
    assert split_ratios(settings, placed) == (2, 5)
    assert split_ratios(settings.but(clean=True), placed) == (1, 1)
    three = devices.Devices((*placed.towers, "/device:CPU:2"), placed.home)
    assert split_ratios(settings, three) == (1, 1, 1)
    monkeypatch.setattr(group, "joined", lambda: mock.Mock(count=2))
    with pytest.raises(ValueError, match="--split_ratios=auto on several hosts"):
        split_ratios(settings, placed)


def test_a_batch_for_each_tower(tmp_path):
    job = assembled(
        *("--dataset=synthetic:4x4x1:3:60", "--model=mlp", f"--model_dir={tmp_path}"),
        *("--batch_size=4", "--elastic_batch=at_start", "--num_gpus=3"),
    )
    assert (job.batch_size, job.sizes) == (12, [4, 4, 4])
    assert job.data.steps_per_epoch() == 5
    text = job.settings.as_text()
    assert "--batch_size=4\n" in text and "--elastic_batch=at_start\n" in text


def test_flags_of_the_data_reach_it(tmp_path):
    (tmp_path / "a.csv").write_text("x,y,z\n" + "1,2,0\n" * 20)
    spec = f"csv:{tmp_path}/a.csv"
    columns = {"feature_columns": ("y",), "label_column": "z"}
    asked = Settings(dataset=spec, eval_fraction=0.2, **columns)
    checks.check_data(asked)
    source, _ = data_parts.open_sources(asked)
    assert (source.image_fields, source.splits["test"]) == (["y"], 4)
    # The tenth is not lost where another data set is evaluated on.
    asked = Settings(dataset=spec, eval_dataset=f"{spec}*")
    sources = data_parts.open_sources(asked)
    assert [each.splits for each in sources] == [{"train": 20}, {"train": 20}]
    (tmp_path / "b.csv").write_text("x,y,z\n1,2,owl\n")
    names = ("cat", "owl")
    target = Target("class", 2, names)
    like = types.SimpleNamespace(
        class_names=names, target=target, tokenizer=None, input_kind="image"
    )
    spec = f"csv:{tmp_path}/b.csv"
    held_out = data_parts.open_source(Settings(dataset="digits"), spec, 2, like)
    assert (held_out.num_classes, held_out.class_names) == (2, ("cat", "owl"))
    assert held_out.splits == {"train": 1}


def test_what_was_decided_is_said(tmp_path):
    (tmp_path / "a.csv").write_text("x,y,z\n" + "1,2,0\n1,2,1\n" * 10)
    source = input_pipeline.open_source(f"csv:{tmp_path}/a.csv")
    data = types.SimpleNamespace(
        source=source,
        held_out=(source, "test"),
        eval_batches=None,
        notes=lambda: source.notes,
    )
    asked = Settings(dataset="csv:a")
    job = types.SimpleNamespace(
        data=data, settings=asked, setup=setup(asked), batch_size=asked.batch_size
    )
    said = first_lines.data_notes(job)
    assert said[0].startswith("The labels are the column 'z', the last one; --label")
    assert said[1].startswith("The class 0 has no example in the validation data")
    assert said[2].startswith("10% of the rows, 2 in all, are held out for validat")
    assert said[3:] == [f"Validation {source.name}: 2 examples."]
    data.held_out = None
    job.settings = Settings(dataset="csv:a", data_dir="b", cache="auto:c")
    *_, nothing, data_dir, cache_dir = first_lines.data_notes(job)
    assert "--data_dir" not in job.settings.as_text()
    assert nothing.startswith("There is no validation data, so the training data is")
    assert data_dir.startswith("Note: --data_dir=b changes nothing, as only digits")
    assert cache_dir == "Note: --cache=auto:c changes nothing here."


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("Yes", "no", "yes"), ["The classes 'Yes' and 'yes' differ only in upper"]),
        (("YES", "Yes", "yes"), ["The classes 'YES', 'Yes' and 'yes' differ only in"]),
        (("a  b", "a b", "ab"), ["The classes 'a  b' and 'a b' differ only in"]),
        (("\u00c4", "A\u0308"), ["The classes '\u00c4' and 'A\u0308' differ only"]),
        (("ant", "bee"), []),
        (None, []),
    ],
)
def test_classes_that_look_alike_are_said(names, said):
    found = _alike_notes(names)
    assert [note.startswith(said[0]) for note in found] == [True] * len(said)


def test_of_many_groups_that_look_alike_some_are_said():
    names = [name for k in range(10) for name in (f"a{k}", f"A{k}")]
    *_, third, more = _alike_notes(names)
    assert third.startswith("The classes 'a2' and 'A2' differ only in upper")
    assert more == "So do 7 more groups of classes."


def _alike_notes(names):
    facts = types.SimpleNamespace(target=Target("class", 3, names))
    job = types.SimpleNamespace(
        data=types.SimpleNamespace(notes=tuple, held_out=None, eval_batches=None),
        settings=Settings(train_epochs=1),
        setup=types.SimpleNamespace(facts=facts),
    )
    *found, _ = first_lines.data_notes(job)
    return found


def test_data_sets_with_other_classes(tmp_path):
    write_folder(tmp_path / "train", ant=1, bee=1)
    write_folder(tmp_path / "test", ant=1, cat=1)
    ours, theirs = (
        input_pipeline.open_source(f"folder:{tmp_path / name}")
        for name in ("train", "test")
    )
    data_parts.check_same_kind(Settings(), ours, ours)
    with pytest.raises(ValueError, match=r"label 1 is 'cat' .* but 'bee'"):
        data_parts.check_same_kind(Settings(), ours, theirs)


def test_data_sets_with_other_sizes():
    ours, theirs = (
        input_pipeline.open_source(f"synthetic:{size}x{size}x1:10") for size in (8, 9)
    )
    with pytest.raises(ValueError, match=r"\(9, 9, 1\), but .* \(8, 8, 1\)"):
        data_parts.check_same_kind(Settings(), ours, theirs)
    data_parts.check_same_kind(Settings(image_size="8"), ours, theirs)


@pytest.mark.parametrize("head", [None, "softmax", "nested"])
def test_logits_are_told_from_probabilities(head):
    dense = keras.layers.Dense(4, activation=None if head is None else "softmax")
    last = keras.Sequential([dense]) if head == "nested" else dense
    flatten = keras.layers.Flatten()
    model = keras.Sequential([keras.Input((3, 3, 1)), flatten, last])
    assert model_parts.returns_logits(model, setup(shape=(3, 3, 1))) == (head is None)


def test_a_model_of_the_users_own_class():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(4, activation="softmax")

        def call(self, x):
            return self.dense(x)

    about = setup(Settings(mix=("mixup:1",)), (2,))
    with mock.patch.object(model_parts.models, "build", return_value=Model()):
        model = model_parts.build_model(about, "/CPU:0")
    placed = devices.Devices(("/CPU:0",), "/CPU:0")
    parallel = model_parts.build_towers(about, model, placed, 95)
    assert not parallel.loss.from_logits


def test_a_model_that_cannot_be_saved_is_told_at_once():
    class Model(keras.Model):
        def __init__(self, units):
            super().__init__()

    saves = keras.Sequential([keras.layers.Dense(2)])
    model_parts.check_can_be_saved(setup(), saves)
    with pytest.raises(ValueError, match=r"arguments Model was made; .*get_config"):
        model_parts.check_can_be_saved(setup(), Model(object()))


def test_a_model_whose_call_is_wrong():
    class Layer(keras.layers.Layer):
        def call(self, x):
            return x.absent

    with (
        mock.patch.object(model_parts.models, "build") as build,
        pytest.raises(ValueError, match=r"(?s)raised AttributeError .*absent"),
    ):
        build.return_value = keras.Sequential([Layer()])
        model_parts.build_model(setup(shape=(2,)), "/CPU:0")


def closing(**summary):
    """The closing lines of a run that has nothing but this."""
    names = "measured", "bad_records", "model", "checkpoint", "best", "last"
    known = {**dict.fromkeys(names), "steps": 9, "towers": [], "model_dir": "runs"}
    return train_run.closing_lines(known | summary, trained=False).splitlines()


def test_numbers_at_the_end_are_short_but_not_nothing():
    logs = {"loss": 3.68e17, "mse": 1.5e-5, "mae": 12345.678, "zero": 0.0, "r": -0.5}
    best = {"monitor": "loss", "epoch": 3, "model": "best.keras", "logs": logs}
    said = closing(epochs=3, train_loss=1.5e-5, best=best)
    assert said[1] == "  train loss 1.5e-05"
    figures = "loss 3.68e+17, mse 1.5e-05, mae 12,346, zero 0.0000, r -0.5000"
    assert said[2] == f"  best epoch 3, by loss: {figures}"


def test_each_number_at_the_end_is_said_of_its_epoch():
    best = {"monitor": "val_loss", "epoch": 3, "model": "best.keras"}
    best["logs"] = {"loss": 0.1, "val_loss": 0.5, "examples_per_sec": 9.0}
    # In Keras's order.
    logs = {"accuracy": 0.9, "loss": 0.05, "val_accuracy": 0.8, "val_loss": 0.7}
    last = {"epoch": 4, "logs": logs}
    said = closing(epochs=4, val_loss=0.7, best=best, last=last)
    assert said[1:3] == [
        "  best epoch 3, by val_loss: loss 0.1000, val_loss 0.5000",
        "  last epoch 4: loss 0.0500, accuracy 0.9000, val_loss 0.7000, "
        "val_accuracy 0.8000",
    ]
    assert "  best model   best.keras" in said
    # Where the last is the best, it is said once.
    last = {"epoch": 3, "logs": best["logs"]}
    said = closing(epochs=3, val_loss=0.5, best=best, last=last)
    first = "  best epoch 3, the last, by val_loss: loss 0.1000, val_loss 0.5000"
    assert said[1] == first and not any("last epoch" in line for line in said)
    # A run that is done is evaluated on other data.
    said = closing(epochs=3, val_loss=0.9, best=best, last=last)
    assert said[1:3] == ["  validation loss 0.9000", first]
    # What was evaluated is no log of an epoch: it ended within one.
    said = closing(epochs=3, val_loss=0.7, best={**best, "epoch": 2})
    assert said[1] == "  validation loss 0.7000 (model.keras, after epoch 3)"


def test_many_metrics_at_the_end_take_several_lines():
    logs = {f"val_a_long_name_of_a_metric_{k}": k / 7 for k in range(9)}
    last = {"epoch": 1, "logs": logs}
    first, *more = closing(epochs=1, last=last, **logs)[1:6]
    assert first.startswith("  last epoch 1: ")
    assert all(line.startswith("    val_") for line in more)
    assert all(60 < len(line) <= 100 for line in (first, *more[:-1]))
    parts = re.findall(r"(\S+) ([\d.]+)", "\n".join([first[15:], *more]))
    assert dict(parts) == {name: f"{value:.4f}" for name, value in logs.items()}


@pytest.mark.parametrize(
    ("asked", "examples", "expected"),
    [
        *((None, 1437, 23), (None, 10**6, 100), (None, None, 100)),
        *((100, 1437, 100), (5, 1437, 5)),
    ],
)
def test_short_epochs_have_lines(asked, examples, expected):
    data = types.SimpleNamespace(
        examples=examples, settings=types.SimpleNamespace(batch_size=64)
    )
    some = dict.fromkeys(field.name for field in dataclasses.fields(Job))
    some |= {"data": data, "settings": types.SimpleNamespace(log_steps=asked)}
    assert Job(**some).log_steps == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "expected"),
    [((), [1, 2, 3]), (("--log_steps=2",), [2])],
)
def test_short_epochs_have_scalars(tmp_path, flags, expected):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data = "--dataset=synthetic:4x4x1:3:8", "--batch_size=8", "--model=mlp"
    folder = f"--model_dir={tmp_path}", "--train_epochs=3"
    run_here(*data, *folder, *flags)
    logs = EventAccumulator(str(tmp_path / "train"))
    logs.Reload()
    steps = {
        event.step
        for tag in logs.Tags()["tensors"]
        if tag.startswith("batch")
        for event in logs.Tensors(tag)
    }
    assert sorted(steps) == expected, logs.Tags()["tensors"]


def test_commands_that_are_printed_quote_paths():
    said = closing(epochs=1, model_dir="/my runs/a")
    assert "  TensorBoard  tensorboard --logdir '/my runs/a'" in said


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        (
            [(3,)],
            1,
            r"takes \(None, 3\), but the rows of x are \(2,\); give another m",
        ),
        (
            [(2,)] * 2,
            1,
            r"takes \[\(None, 2\), \(None, 2\)\], but the rows of x are",
        ),
        (
            [(2,)],
            2,
            r"returns 2 tensors in a structure, but x has 3 classes",
        ),
    ],
)
def test_a_model_of_other_inputs_and_outputs(inputs, outputs, said):
    tensors = [keras.Input(shape) for shape in inputs]
    first = tensors[0] if len(tensors) == 1 else tensors
    made = [keras.layers.Dense(3)(tensors[-1]) for _ in range(outputs)]
    model = keras.Model(first, made[0] if outputs == 1 else made)
    with (
        mock.patch.object(model_parts.models, "build", return_value=model),
        pytest.raises(ValueError, match=said),
    ):
        model_parts.build_model(setup(shape=(2,)), "/CPU:0")


def test_a_table_is_evaluated_by_the_columns_it_was_trained_on(tmp_path):
    (tmp_path / "a.csv").write_text("kind,x,y,n\nbee,1,2,3\nant,4,5,6\n")
    (tmp_path / "b.csv").write_text("y,x,more,kind\n2,1,text,bee\n")
    (tmp_path / "c.csv").write_text("y,z,kind\n2,1,bee\n")
    ours, theirs, others = (f"csv:{tmp_path}/{name}.csv" for name in "abc")
    columns = {"label_column": "kind", "feature_columns": ("x", "y")}
    asked = Settings(dataset=ours, eval_dataset=theirs, **columns)
    source, _ = data_parts.open_sources(asked)
    # What was found counts, given or not.
    asked = asked.but(label_column=None, feature_columns=None)
    held_out = data_parts.open_source(asked, theirs, 2, like=source)
    row, label = held_out.decode(next(held_out.walk(f"{tmp_path}/b.csv")).raw)
    assert (row.numpy().tolist(), int(label)) == ([1, 2], 1)
    with pytest.raises(ValueError, match=r"'x', but .*c\.csv has the columns"):
        data_parts.open_source(asked, others, 2, like=source)


def test_only_the_first_batches_are_evaluated(tmp_path):
    (tmp_path / "a.csv").write_text("x,y,z\n" + "1,2,0\n1,2,1\n" * 20)
    asked = Settings(
        dataset=f"csv:{tmp_path}/a.csv", eval_fraction=0.5, batch_size=3, eval_steps=2
    )
    data = data_parts.open_data(asked, None).prepare()
    assert [len(y) for _, y in data.evaluation] == [3, 3]
    batches = tf.data.Dataset.range(9).batch(2)
    assert len(list(own_data.first_batches(batches, 4))) == 4
    assert own_data.first_batches(batches, None) is batches


class _Numbers(keras.utils.PyDataset):
    """Batches 0, 1, ... of which it may know the number."""

    def __init__(self, count):
        super().__init__(workers=2)
        self._count, self.begun = count, 0

    @property
    def num_batches(self):
        return self._count

    def __getitem__(self, index):
        return index

    def on_epoch_begin(self):
        self.begun += 1


@pytest.mark.parametrize(
    ("known", "asked", "has"), [(9, 4, 4), (3, 4, 3), (None, 4, 4)]
)
def test_of_a_pydataset_too_the_first_batches_are_evaluated(known, asked, has):
    data = _Numbers(known)
    some = own_data.first_batches(data, asked)
    assert (some.num_batches, some[2], some.workers) == (has, 2, 2)
    some.on_epoch_begin()
    some.on_epoch_end()
    assert data.begun == 1


@pytest.mark.parametrize(
    ("options", "examples", "held_out", "most"),
    [
        ({}, 1_281_167, False, 157),
        ({}, None, False, 157),
        ({}, 10_000, False, None),
        ({}, 1_281_167, True, None),
        ({"eval_steps": 3}, 1_281_167, False, 3),
        ({"eval_steps": 300}, 1_281_167, True, 300),
        ({"batch_size": 10_001}, 1_281_167, False, 1),
    ],
)
def test_of_training_data_only_some_is_evaluated(options, examples, held_out, most):
    settings = Settings(**{"dataset": "digits", "batch_size": 64, **options})
    assert own_data.most_batches_evaluated(settings, examples, held_out) == most


def test_what_is_evaluated_of_training_data_is_a_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(own_data, "MOST_TRAINING_EXAMPLES", 10)
    rows = "".join(f"{k},{k // 20}\n" for k in range(40))  # sorted by class
    (tmp_path / "a.csv").write_text(f"x,y\n{rows}")
    asked = Settings(
        dataset=f"csv:{tmp_path}/a.csv", eval_fraction=0, batch_size=4, scale="none"
    )
    data = data_parts.open_data(asked, None).prepare()
    first, again = ([*data.evaluation.as_numpy_iterator()] for _ in range(2))
    assert [len(labels) for _, labels in first] == [4, 4, 4]
    assert {int(label) for _, labels in first for label in labels} == {0, 1}
    np.testing.assert_equal(first, again)
    few = [*data.in_batches_of(20).evaluation.as_numpy_iterator()]
    assert len(few) == 1
    job = types.SimpleNamespace(
        data=data, settings=asked, setup=setup(asked), batch_size=asked.batch_size
    )
    (note,) = [note for note in first_lines.data_notes(job) if "no validation" in note]
    assert note.startswith(
        "There is no validation data, so 12 training examples at most, drawn at "
        "random, are evaluated, and the best epoch has the lowest "
    )


def test_rows_are_not_augmented():
    source = mock.Mock(image_shape=(2,), input_kind="row")
    for name, value in (("recipe", "cifar"), ("randaugment", ("2", "9"))):
        said = f"--{name}=.*, but .* has rows of numbers; expected images"
        with pytest.raises(ValueError, match=said):
            data_parts.choose_image_shape(Settings(**{name: value}), source)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((ValueError("no"), 1), (NotFinite("no"), 3), (HostFailedError("no"), 75)),
        *((ModelError("no"), 1), (Stopped(signal.SIGINT), 130)),
        *((KeyboardInterrupt(), 130), (ending.Terminated(), 143)),
    ],
)
def test_no_signal_disturbs_the_end(monkeypatch, capsys, error, code):
    done = []
    monkeypatch.setattr(signal, "signal", lambda *args: done.append(args))
    monkeypatch.setattr(train.gc, "collect", lambda: done.append("collected"))
    monkeypatch.setattr(train, "assemble", mock.Mock(side_effect=error))
    monkeypatch.setattr(train.os, "_exit", done.append)
    assert train.main(Settings()) == code
    # A data set may be on its way, which Python would wait for.
    assert (code in done) == isinstance(error, KeyboardInterrupt)
    ignored = [(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]
    assert done[-3:] == [*ignored, "collected"]


def test_a_path_need_not_be_utf_8(tmp_path):
    job, text = types.SimpleNamespace(model_dir=tmp_path), "--model_dir=r\udcfcn\n"
    whole_file.write_text(f"{tmp_path}/flags.txt", text)
    assert files.read(job, "flags.txt") == text
    assert b"r\xfcn" in (tmp_path / "flags.txt").read_bytes()


def test_who_asks_hears_of_each_epoch(monkeypatch):
    assert callbacks.reports_descriptor({}) is None
    read, write = os.pipe()
    monkeypatch.setenv("TOWERS_REPORTS", str(write))
    callback = callbacks.Reports(
        callbacks.reports_descriptor(), lambda: "checkpoints/ckpt-3-0", 2
    )
    model = small.tiny()
    callback.set_model(model)
    callback.on_train_begin()
    for step in range(1, 5):
        model.optimizer.iterations.assign(step)
        callback.on_train_batch_end(step - 1, {"loss": np.float32(step)})
    callback.on_epoch_end(2, {"loss": np.float32(0.5)})
    assert [*map(json.loads, os.read(read, 1000).splitlines())] == [
        {"progress": {"step": 0}},
        {"progress": {"step": 2, "loss": 2.0}},
        {"progress": {"step": 4, "loss": 4.0}},
        {"progress": {"step": 4, "loss": 0.5}},
        {
            "metrics": {"epoch": 3, "loss": 0.5},
            "checkpoint": "checkpoints/ckpt-3-0",
        },
    ]
    os.close(read)
    callback.on_epoch_end(3, {})  # nobody listens any more
    os.close(write)
