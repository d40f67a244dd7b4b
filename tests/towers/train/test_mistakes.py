"""The mistakes of a run's best model, as Keras finds them in best.keras."""

import io
import os
import re
import signal
import subprocess
import sys
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from tensorboard.backend.event_processing import plugin_event_multiplexer
from tensorboard.util import tensor_util

from tests.limits import HANG_S
from tests.towers.train.runs import (
    QUICKLY,
    ROOT,
    TWO_STEPS,
    assembled,
    heard,
    main_here,
    ours,
    run_here,
    summary_of,
)
from towers import input_pipeline
from towers.monitoring.tensorboard import pictures
from towers.report.read import read
from towers.train.outputs import mistakes

LINE = re.compile(r"^  mistakes     (.*/mistakes\.png): (.*)$", re.M)
ROWS = ("--model=mlp", "--batch_size=16", "--train_epochs=1", "--eval_fraction=0.25")


@pytest.fixture(scope="module")
def worse(data_dir, tmp_path_factory):
    """A run that was good, and got worse as it went on."""
    path = tmp_path_factory.mktemp("run")
    flags = f"--data_dir={data_dir}", "--model=mlp", f"--model_dir={path}", "--seed=3"
    # By short steps, many digits are told apart; by long ones, few are.
    for more in (
        ["--train_epochs=1", "--learning_rate=2e-4"],
        ["--train_epochs=2", "--learning_rate=10"],
    ):
        done = heard(run_here, *flags, *more)
    done.path, done.flags = path, flags
    done.data = [*assembled(*flags).data.evaluation]
    return done


def predicted(path, data):
    """What a saved model returns for images, as Keras calls it; and their labels."""
    model = keras.models.load_model(path)
    images = np.concatenate([x for x, _ in data])
    labels = np.concatenate([y for _, y in data])
    return model.predict(input_pipeline.normalize(images), verbose=0), labels


def counted(outputs, labels):
    counts = np.zeros([outputs.shape[1]] * 2, int)
    np.add.at(counts, (labels, outputs.argmax(-1)), 1)
    return counts


def shown(folder):
    """What TensorBoard has last by tag: bytes of a text, or of a picture."""
    runs = plugin_event_multiplexer.EventMultiplexer()
    runs.AddRunsFromDirectory(str(folder))
    runs.Reload()
    return {
        tag: tensor_util.make_ndarray(runs.Tensors("train", tag)[-1].tensor_proto)
        for plugin in ("images", "text")
        for tag in runs.PluginRunToTagToContent(plugin).get("train", {})
    }


def pixels(path):
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture)


def test_the_matrix_is_that_of_the_best_model(worse):
    best, last = (
        counted(*predicted(worse.path / name, worse.data))
        for name in ("best.keras", "model.keras")
    )
    assert summary_of(worse.path)["best"]["epoch"] == 1
    assert (best != last).any()
    tags = shown(worse.path)
    _, _, *rows = tags["confusion_counts"].item().decode().splitlines()
    cells = [[int(cell.strip() or 0) for cell in row.split("|")[2:-1]] for row in rows]
    np.testing.assert_array_equal(cells, best)
    drawn = pictures.confusion(best, [*"0123456789"])
    _, _, png = tags["confusion"]
    np.testing.assert_array_equal(tf.io.decode_png(png), drawn)
    file = pixels(worse.path / "mistakes.png")
    height, width, _ = drawn.shape
    np.testing.assert_array_equal(file[:height, :width], drawn)
    wrong = best.sum() - best.trace()
    path, said = LINE.search(worse.stdout).groups()
    assert path == str(worse.path / "mistakes.png")
    assert said == f"{wrong} of {best.sum()} validation examples, by the best model"
    assert ours(worse) == []


def test_the_worst_images_are_shown_first(worse):
    outputs, labels = predicted(worse.path / "best.keras", worse.data)
    images = np.concatenate([x for x, _ in worse.data])
    margins = outputs.max(-1) - outputs[np.arange(len(labels)), labels]
    worst = np.argsort(-margins, kind="stable")[:16]
    assert (margins[worst] > 0).all() and (margins > 0).sum() > 16
    guesses = outputs.argmax(-1)
    captions = [f"{labels[i]}\ntaken for {guesses[i]}" for i in worst]
    sheet = pictures.sheet(images[worst], captions)
    tags = shown(worse.path)
    _, _, png = tags["misclassified"]
    np.testing.assert_array_equal(tf.io.decode_png(png), sheet)
    height, width, _ = sheet.shape
    file = pixels(worse.path / "mistakes.png")
    np.testing.assert_array_equal(file[-height:, :width], sheet)
    lines = tags["misclassified_as"].item().decode().splitlines()
    assert lines[0] == f"1. {labels[worst[0]]}, taken for {guesses[worst[0]]}"


def test_the_metrics_of_the_best_and_of_the_last_epoch(worse):
    summary = summary_of(worse.path)
    best, last = summary["best"]["logs"], summary["last"]["logs"]
    # As Keras evaluates the two files.
    for name, logs in (("best.keras", best), ("model.keras", last)):
        outputs, labels = predicted(worse.path / name, worse.data)
        accuracy = np.mean(outputs.argmax(-1) == labels)
        assert logs["val_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    end = " ".join(worse.stdout[worse.stdout.index("Done: ") :].split())
    for head, logs in (
        ("best epoch 1, by val_loss", best),
        ("last epoch 2", last),
    ):
        values = [
            f"{name} {logs[name]:{'.4f' if logs[name] < 1000 else ',.0f'}}"
            for name in ("loss", "accuracy", "val_loss", "val_accuracy")
        ]
        assert f"{head}: {', '.join(values)}" in end


def test_the_report_counts_trainings(worse):
    run = read(str(worse.path))
    assert len([*(worse.path / "train").glob("events.*.after_training")]) == 2
    assert len(run.train.sessions) == 2
    assert {"confusion", "misclassified"} <= run.train.images.keys()


@pytest.mark.slow
def test_a_run_that_was_killed_meanwhile(tmp_path):
    """It was saved already. Run again, it draws what was not drawn."""
    path, flags = tmp_path / "run", (*TWO_STEPS, f"--model_dir={tmp_path / 'run'}")
    program = (
        "import os, runpy, signal; from PIL import Image\n"
        "def save(image, file, kind):\n"
        "    file.write(b'half'); file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Image.Image.save = save\n"
        "runpy.run_module('towers.train', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", program, *QUICKLY, *flags, "--train_epochs=1"]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = summary_of(path)
    assert (path / "best.keras").exists() and not (path / "mistakes.png").exists()
    done = heard(run_here, *flags, "--train_epochs=1")
    assert "Nothing left to train" in done.stdout and LINE.search(done.stdout)
    assert pixels(path / "mistakes.png").ndim == 3
    assert not [*path.glob("mistakes.png.*")]
    assert summary_of(path)["val_loss"] == pytest.approx(before["val_loss"])
    assert ours(done) == []


def test_a_picture_that_cannot_be_drawn_is_a_line(tmp_path):
    def draw(*args):
        raise OSError("No space left on device")

    flags = *TWO_STEPS, f"--model_dir={tmp_path}", "--train_epochs=1"
    with mock.patch.object(mistakes, "draw_mistakes", draw):
        done = main_here(*flags)
    assert done.returncode == 0
    (said,) = ours(done)
    place = f"{tmp_path}/mistakes.png"
    assert said == (
        f"Warning: The mistakes of the model are not shown in {place}: "
        "No space left on device."
    )
    assert summary_of(tmp_path)["epochs"] == 1
    assert "Done: 1 epoch" in done.stdout and not LINE.search(done.stdout)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("mistakes")]


def test_a_part_of_the_validation_data(data_dir, tmp_path):
    done = heard(
        run_here,
        *("--model=mlp", f"--data_dir={data_dir}", f"--model_dir={tmp_path}"),
        *("--max_train_steps=1", "--eval_steps=2"),
    )
    _, said = LINE.search(done.stdout).groups()
    assert re.fullmatch(r"\d+ of the first 128 validation examples", said)
    # No epoch has ended, so the evaluated model is the only one.
    assert "best epoch" not in done.stdout and "last epoch" not in done.stdout
    assert re.search(
        r"^  validation accuracy [\d.]+, validation loss", done.stdout, re.M
    )


@pytest.mark.slow
def test_of_averaged_weights(data_dir, tmp_path):
    """They are what best.keras has, and are far from the weights."""
    flags = "--model=mlp", f"--data_dir={data_dir}", f"--model_dir={tmp_path}"
    done = heard(run_here, *flags, "--ema=0.9", "--train_epochs=1")
    data = [*assembled(*flags, "--ema=0.9").data.evaluation]
    counts = counted(*predicted(tmp_path / "best.keras", data))
    wrong = counts.sum() - counts.trace()
    _, said = LINE.search(done.stdout).groups()
    assert said == f"{wrong} of 360 validation examples, by the best model"


@pytest.mark.slow
def test_of_hosts_that_divide_the_variables(data_dir, tmp_path):
    flags = "--model=mlp", f"--data_dir={data_dir}", f"--model_dir={tmp_path}"
    command = (
        *(sys.executable, "-m", "towers.launch", "--hosts=2", "--", *flags),
        *("--num_gpus=1", "--variable_update=sharded", "--seed=1"),
        *("--learning_rate=0.03", "--train_epochs=4"),
    )
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    data = [*assembled(*flags).data.evaluation]
    best, last = (
        counted(*predicted(tmp_path / name, data))
        for name in ("best.keras", "model.keras")
    )
    assert best.trace() != last.trace()
    _, said = LINE.search(done.stdout).groups()
    assert (
        said
        == f"{best.sum() - best.trace()} of 360 validation examples, by the best model"
    )


def rows(path, target):
    """A table of two columns, and a third one that depends on them."""
    random = np.random.default_rng(0)
    lines = [f"{a:.3f},{b:.3f},{target(a)}\n" for a, b in random.normal(size=[80, 2])]
    path.write_text("a,b,label\n" + "".join(lines))
    return f"--dataset=csv:{path}"


def test_of_a_table_there_is_a_matrix_only(tmp_path):
    table = rows(tmp_path / "a.csv", lambda a: "cat" if a > 0 else "ant")
    run_here(table, *ROWS, f"--model_dir={tmp_path / 'run'}")
    tags = shown(tmp_path / "run")
    assert "confusion" in tags and "misclassified" not in tags
    _, _, png = tags["confusion"]
    with Image.open(io.BytesIO(png)) as picture:
        np.testing.assert_array_equal(pixels(tmp_path / "run/mistakes.png"), picture)


def test_of_training_data_where_none_are_held_out(tmp_path):
    table = rows(tmp_path / "a.csv", lambda a: "cat" if a > 0 else "ant")
    flags = *ROWS, "--eval_fraction=0", f"--model_dir={tmp_path / 'run'}"
    done = heard(run_here, table, *flags)
    wrong = round(80 * (1 - summary_of(tmp_path / "run")["train_accuracy"]))
    _, said = LINE.search(done.stdout).groups()
    assert said == f"{wrong} of 80 training examples, by the best model"
    assert "\n  train accuracy " in done.stdout
    assert "\n  best epoch 1, the last, by loss: " in done.stdout


def test_nothing_where_there_are_no_classes(tmp_path):
    table = rows(tmp_path / "a.csv", lambda a: f"{2 * a:.3f}")
    done = heard(run_here, table, *ROWS, f"--model_dir={tmp_path / 'run'}")
    assert "best epoch 1, the last, by val_loss: " in done.stdout
    assert "mistakes" not in done.stdout
    assert not (tmp_path / "run/mistakes.png").exists()
    assert "confusion" not in shown(tmp_path / "run")
