"""towers.train, started as a user starts it: `python -m towers.train` in a process."""

import fcntl
import glob
import inspect
import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import flagsaver
from PIL import Image

from tests import once, warm
from tests.terminal import read_all
from towers import devices, input_pipeline
from towers.builders.strategies import STRATEGIES
from towers.collectives import reduce
from towers.lifecycle.checkpoints.manager import SaveError
from towers.monitoring import profile
from towers.numerics.not_finite import NotFinite
from towers.report.read import read
from towers.tower.errors import ModelError
from towers.train import __main__ as train
from towers.train import checks, settings
from towers.train import flags as train_flags
from towers.train import run as train_run
from towers.train.job import assemble
from towers.train.outputs import files
from towers.train.outputs import start as first_lines
from towers.train.outputs import summary as last_lines
from towers.train.parts import data as data_parts
from towers.train.parts import model as model_parts
from towers.train.parts.devices import configure_devices, split_ratios
from towers.train.parts.model import build_optimizer, learning_rate
from towers.train.settings import Settings

ROOT = Path(__file__).parents[3]
# Of an epoch of digits: 1,437 images at 64 a batch.
STEPS = 23
# Of the default job.
EPOCHS = 8
TIMEOUT_S = 300
# Trying others takes seconds, in each run.
QUICKLY = ("--variable_update=parameter_server",)


def start(*flags, program=("-m", "towers.train"), **options):
    """Starts a run, whose output can be read line by line."""
    return subprocess.Popen(
        [sys.executable, *program, *map(str, (*QUICKLY, *flags))],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        text=True,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"},
    )


def finish(process):
    """Waits for a run; its exit code, output and errors."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(*flags, code=0):
    """Runs to the end, which has to be with this exit code."""
    done = warm.run("towers.train", *QUICKLY, *flags, timeout_s=TIMEOUT_S)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def read_settings(*flags):
    """The settings of a command line, checked as a program checks them."""
    argv = ["towers.train", *map(str, (*QUICKLY, *flags))]
    with flagsaver.flagsaver():
        return checks.check_model_dir(train_flags.read(argv, "What it is for."))


def assembled(*flags):
    """The job of a command line, in this process."""
    return assemble(read_settings(*flags))


def run_here(*flags):
    """Runs to the end in this process: what needs no signal and no exit code."""
    job = assembled(*flags)
    train_run.run(job)
    return job


def wait_for(process, beginning):
    """Reads a run's output up to a line; returns it with all before."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(beginning):
            return lines
    raise AssertionError("".join(lines) + process.stderr.read())


def ours(done):
    """The sentences on stderr that are from us."""
    return re.findall(r"^towers(?:\.train)?: (.*)", done.stderr, re.M)


def snapshot(folder):
    """Each file below a folder, with its content."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weights(folder):
    """The weights of the model that a run has saved."""
    return keras.models.load_model(folder / "model.keras").get_weights()


def assert_same_bits(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def png(value, side=8):
    """An image of one value, encoded."""
    buffer = io.BytesIO()
    Image.fromarray(np.full([side, side, 3], value, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def write_tfrecord(path, images, labels):
    """Writes encoded images with labels, under the default names."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for image, label in zip(images, labels, strict=True):
            feature = {
                "image/encoded": tf.train.Feature(
                    bytes_list=tf.train.BytesList(value=[image])
                ),
                "image/class/label": tf.train.Feature(
                    int64_list=tf.train.Int64List(value=[label])
                ),
            }
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString())


def write_folder(root, **classes):
    """Writes so many images for each class."""
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f"{i:02}.png").write_bytes(png(i))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """The digits, written once; tests must not change them."""

    def make(path):
        input_pipeline.open_source("digits", data_dir=path).prepare()
        return path

    return once.make(tmp_path_factory, "data", make)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of the default job, but for its length; not to be changed.

    Later epochs change little.
    """

    def make(folder):
        # A data_dir of its own, so that this run has to write the digits, too.
        done = run(
            *(f"--data_dir={folder / 'data'}", f"--model_dir={folder / 'run'}"),
            *(f"--train_epochs={EPOCHS}", "--log_steps=50"),
        )
        done.path = folder / "run"
        return done

    return once.make(tmp_path_factory, "trained", make)


# Small, deterministic, and never done before it is killed.
REPEATABLE = (
    *("--model=mlp", "--deterministic", "--train_epochs=8", "--seed=3"),
    *("--save_steps=5", "--log_steps=10"),
)


# With --cache=memory, which is what --cache=auto comes to.
ONE_EPOCH = ("--model=mlp", "--deterministic", "--train_epochs=1", "--cache=memory")


@pytest.fixture(scope="module")
def whole(data_dir, tmp_path_factory):
    """The model_dir of a deterministic run that nothing interrupted."""

    def make(path):
        run(*REPEATABLE, f"--data_dir={data_dir}", f"--model_dir={path}")
        return path

    return once.make(tmp_path_factory, "whole", make)


@pytest.fixture(scope="module")
def killed(data_dir, tmp_path_factory):
    """The model_dir of the same run, killed; not to be changed."""

    def make(path):
        process = start(*REPEATABLE, f"--data_dir={data_dir}", f"--model_dir={path}")
        wait_for(process, "epoch 2/8, step 30")
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (path / "model.keras").exists()
        return path

    return once.make(tmp_path_factory, "killed", make)


def loss(folder):
    return json.loads((folder / "summary.json").read_text())["val_loss"]


@pytest.fixture(scope="module")
def one_epoch(data_dir, tmp_path_factory):
    """A deterministic run of one epoch; not to be changed."""

    def make(path):
        done = run(*ONE_EPOCH, f"--data_dir={data_dir}", f"--model_dir={path}")
        assert "112.3 KB of pixels kept in memory." in done.stdout
        return path

    return once.make(tmp_path_factory, "one_epoch", make)


@pytest.fixture(scope="module")
def shared(data_dir, tmp_path_factory):
    """The same with shares, one for each of three towers."""

    def make(path):
        done = run(
            *(*ONE_EPOCH, f"--data_dir={data_dir}", f"--model_dir={path}"),
            *("--split_ratios=2,3,3", "--loss_placement=gathered"),
        )
        for tower, size in enumerate((16, 24, 24)):
            line = rf"^ +{tower} +/device:CPU:{tower} .* {size}$"
            assert re.search(line, done.stdout, re.M)
        return path

    return once.make(tmp_path_factory, "shared", make)


# A whole run.


@pytest.mark.oldest
def test_what_a_run_writes(trained):
    files = {str(p.relative_to(trained.path)) for p in trained.path.rglob("*")}
    assert {"model.keras", "summary.json", "flags.txt"} <= files
    assert {
        f"checkpoints/ckpt-{epoch}-0/variables.index" for epoch in (6, 7, 8)
    } <= files
    for name in ("train", "validation"):
        assert glob.glob(f"{trained.path}/{name}/events.out.tfevents.*")
    assert "unfinished.keras" not in files


def test_what_a_run_says(trained):
    out = trained.stdout
    # Where it runs, and on what.
    assert re.search(r"^tower +device .* local batch$", out, re.M)
    for tower in (0, 1):
        assert re.search(rf"^ +{tower} +/device:CPU:{tower} .* 32$", out, re.M)
    assert "Variables live on /device:CPU:0" in out
    assert re.search(r"^Model cnn: [\d,]+ parameters \([\d.,]+ KB\)\.$", out, re.M)
    data = "Data digits: 1,437 training images of 8x8x1, 10 classes"
    assert f"{data}, 112.3 KB of pixels kept in memory.\n" in out
    # One line an interval, and one an epoch.
    lines = re.findall(r"^epoch .*$", out, re.M)
    assert [line.partition(":")[0] for line in lines] == [
        "epoch 1/8 done, step 23",
        "epoch 2/8 done, step 46",
        "epoch 3/8, step 50",
        "epoch 3/8 done, step 69",
        "epoch 4/8 done, step 92",
        "epoch 5/8, step 100",
        "epoch 5/8 done, step 115",
        "epoch 6/8 done, step 138",
        "epoch 7/8, step 150",
        "epoch 7/8 done, step 161",
        "epoch 8/8 done, step 184",
    ]
    rate = r"examples/sec: [\d,.]+ \+/- [\d,.]+ \(jitter = [\d,.]+\)"
    assert re.search(rf": {rate}, accuracy ", lines[-1])
    # How it ended.
    verdicts = re.findall(r"^(step \d+|whole run): [\w -]+-bound: towers", out, re.M)
    assert verdicts == ["step 50", "step 100", "step 150", "whole run"]
    path = trained.path
    end = out[out.index("Done: ") :]
    assert end.startswith("Done: 8 epochs, 184 steps on 2 towers.\n")
    assert re.search(rf"^  {rate}$", end, re.M)
    for tower in (0, 1):
        line = rf"^    tower {tower}: {rate}, computing \d+% of the time$"
        assert re.search(line, end, re.M)
    step = r"[\d.]+ waiting for input, .* computing \(by tower: [\d.]+, [\d.]+\)"
    assert re.search(rf"^  a step: [\d.]+ ms: {step}, .* in Python$", end, re.M)
    assert re.search(r"^  this process, \d+ cores +[\d,]+ MB", end, re.M)
    assert f"model        {path}/model.keras\n" in end
    assert f"checkpoint   {path}/checkpoints/ckpt-8-0\n" in end
    assert f"tensorboard --logdir {path}\n" in end
    assert "Traceback" not in trained.stderr
    assert ours(trained) == []


@pytest.mark.oldest
def test_stderr_has_no_chatter(trained):
    # TFDS speaks at INFO, draws bars; absl's marks of the level begin the line.
    # Lines of TensorFlow's own C++ come before anything of ours runs.
    assert not re.search(r"^[IW]\d{4} [\d:.]+ \d+ \w+\.py:", trained.stderr, re.M)
    assert "examples/s" not in trained.stderr


@pytest.mark.oldest
def test_summary_is_what_plain_keras_gives(trained, data_dir):
    summary = json.loads((trained.path / "summary.json").read_text())
    source = input_pipeline.open_source("digits", data_dir=data_dir)
    source.prepare()
    test = input_pipeline.make_dataset(
        source, "test", batch_size=50, image_shape=(8, 8, 1), training=False
    ).map(lambda images, labels: (input_pipeline.normalize(images), labels))
    model = keras.models.load_model(trained.path / "model.keras")
    plain = model.evaluate(test, verbose=0, return_dict=True)
    assert summary["val_accuracy"] == pytest.approx(plain["accuracy"], abs=1e-6)
    assert summary["val_loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert f"validation accuracy {plain['accuracy']:.4f}" in trained.stdout
    assert int(model.optimizer.iterations) == EPOCHS * STEPS

    assert summary["examples_per_sec"] > 0
    assert 0 <= summary["waiting"] < 1
    assert summary["verdict"] in trained.stdout
    for line in summary["measured"].splitlines():
        assert f"  {line}\n" in trained.stdout
    for key, value in {
        "epochs": EPOCHS,
        "steps": EPOCHS * STEPS,
        "towers": ["/device:CPU:0", "/device:CPU:1"],
        "batch_size": 64,
        "class_names": [*"0123456789"],
        "model": f"{trained.path}/model.keras",
        "checkpoint": f"{trained.path}/checkpoints/ckpt-8-0",
        "model_dir": str(trained.path),
        "logs": str(trained.path),  # until 0.3
    }.items():
        assert summary[key] == value


def test_tensorboard_has_the_flags_and_both_runs(trained):
    tags = {}
    for name in ("train", "validation"):
        (path,) = (trained.path / name).glob("events.out.tfevents.*")
        tags[name] = {
            value.tag: value
            for event in tf.compat.v1.train.summary_iterator(str(path))
            for value in event.summary.value
        }
    assert {"epoch_accuracy", "batch_accuracy"} <= tags["validation"].keys()
    learning = {"examples_per_sec/tower_1", "step_ms/compute", "waiting"}
    assert {*learning, "input", "confusion", "confusion_counts"} <= tags["train"].keys()
    assert {"model", "devices", "versions", "verdict"} <= tags["train"].keys()
    text = tf.make_ndarray(tags["train"]["model"].tensor).item().decode()
    assert "Total params" in text and "conv2d" in text
    text = tf.make_ndarray(tags["train"]["versions"].tensor).item().decode()
    assert f"    TensorFlow: {tf.__version__}\n" in text
    text = tf.make_ndarray(tags["train"]["flags"].tensor).item().decode()
    # Indented, which Markdown shows as it is.
    flags = (trained.path / "flags.txt").read_text()
    assert text == textwrap.indent(flags, "    ")


def test_a_step_takes_as_long_in_all_places(trained):
    """In the last lines, in summary.json, and, step by step, in TensorBoard."""
    summary = json.loads((trained.path / "summary.json").read_text())
    split = summary["step_ms"]
    said = float(re.search(r"a step: ([\d.,]+) ms", summary["measured"])[1])
    assert said == pytest.approx(sum(split.values()), abs=0.051)
    assert summary["waiting"] == pytest.approx(split["input"] / sum(split.values()))
    scalars = read(str(trained.path)).train.scalars
    for name, ms in split.items():
        curve = scalars[f"step_ms/{name}"]
        # The first 10 steps are left out.
        mean = np.average(curve.values, weights=np.diff(curve.steps, prepend=10))
        assert mean == pytest.approx(ms, rel=1e-3, abs=1e-4), name
    waiting, parts = (
        scalars["waiting"],
        sum(scalars[f"step_ms/{name}"].values for name in split),
    )
    expected = scalars["step_ms/input"].values / parts
    np.testing.assert_allclose(waiting.values, expected, rtol=1e-4, atol=1e-6)


def test_epochs_and_the_models_size_are_the_same_in_all_places(trained):
    run_ = read(str(trained.path))
    epochs = list(range(1, EPOCHS + 1))
    for events in (run_.train, run_.validation):
        assert events.scalars["epoch_loss"].steps.tolist() == epochs
    lines = re.findall(r"^epoch (\d+)/8 done", trained.stdout, re.M)
    assert [int(each) for each in lines] == epochs
    assert run_.summary["epochs"] == EPOCHS
    count = keras.models.load_model(trained.path / "model.keras").count_params()
    assert run_.summary["parameters"] == run_.train.scalars["parameters"].last == count
    assert f"{count:,} parameters" in trained.stdout
    assert f"{count:,} parameters" in run_.train.texts["model"]


def test_the_default_job_learns_the_digits(trained):
    summary = json.loads((trained.path / "summary.json").read_text())
    assert summary["val_accuracy"] >= 0.98
    assert len(summary["towers"]) == 2


def test_progress_bar_on_a_terminal_and_ctrl_c(data_dir, tmp_path):
    terminal, child = pty.openpty()
    process = start(
        *(f"--data_dir={data_dir}", f"--model_dir={tmp_path}", "--model=mlp"),
        "--train_epochs=1000",
        stdout=child,
    )
    os.close(child)
    shown = ""
    while "Epoch 2/1000" not in shown:
        shown += os.read(terminal, 65536).decode(errors="replace")
    process.send_signal(signal.SIGINT)
    shown += read_all(terminal)
    done = finish(process)
    assert done.returncode == 130
    (said,) = ours(done)
    assert said.startswith("Stopped by Ctrl-C: the last checkpoint is ")
    assert list(tmp_path.glob("checkpoints/ckpt-*/variables.index"))
    assert "Traceback" not in done.stderr
    assert "23/23" in shown
    assert "examples_per_sec" in shown
    assert "epoch 1/1000 done" not in shown


# Flags.


def test_help_is_short_and_helpfull_complete():
    short, full = run("--help").stdout, run("--helpfull").stdout
    needed = "model dataset num_gpus batch_size image_size num_classes recipe "
    needed += "lr_schedule eval_dataset"
    for flag in needed.split():
        assert re.search(rf"^  --{flag} ", short, re.M)
    for line in ("Default: cnn.", "Exit codes", "\nData:\n", "\nDevices:\n"):
        assert line in short
    assert len(short.splitlines()) <= 100
    assert "--steps_per_loop" not in short
    for flag in ("model", "steps_per_loop", "gpu_memory_limit_mb", "[no]allow_growth"):
        assert f"  --{flag}" in full
    assert full.count("\n  --") == sum(map(len, train_flags.groups().values()))
    for text in (short, full):
        assert max(map(len, text.splitlines())) <= 88
    # TensorFlow's and absl's own.
    assert not re.search("test_srcdir|xml_output|log_dir|pdb", full)


def test_each_setting_is_a_flag():
    helps = [name for texts in train_flags.HELPS.values() for name in texts]
    # In this order, flags.txt has them.
    assert helps == [*settings.NAMES]
    with flagsaver.flagsaver():
        train_flags.FLAGS(["test"])
        assert train_flags.settings() == Settings()


def test_nothing_but_the_flags_touches_flags():
    for folder in ("train", "parity", "find_batch_size"):
        for path in (ROOT / "towers" / folder).rglob("*.py"):
            touches = re.search(r"\bFLAGS\b", path.read_text())
            assert not touches or path.name in ("flags.py", "search_flags.py")


def test_names_that_flags_know_are_those_of_the_tables():
    """They are checked before what they name is imported."""
    assert sorted(settings.BUILDERS) == sorted(STRATEGIES)
    assert sorted(settings.ALL_REDUCE_ALGS) == sorted(reduce.ALGORITHMS)
    assert checks.MOST_PROFILED_STEPS == profile.MOST_STEPS
    optimizers = {
        name
        for name, value in vars(keras.optimizers).items()
        if inspect.isclass(value)
        and issubclass(value, keras.optimizers.Optimizer)
        # Not those that wrap other optimizers.
        and "learning_rate" in inspect.signature(value).parameters
        and name != "Optimizer"
    }
    assert set(settings.OPTIMIZERS) == optimizers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (
            [
                *("--model=mlp", "--optimizer=sgd", "--lr_schedule=cosine"),
                *("--steps_per_loop=5", "--log_steps=10", "--dtype=bf16"),
                *("--mixup_alpha=0.2", "--cutmix_alpha=1", "--recipe=imagenet"),
                *("--cache=none", "--shuffle_mb=1"),
            ],
            STEPS,
        ),
        (
            [
                *("--dataset=synthetic:8x8x3:5:128", "--model=mlp"),
                *("--optimizer=adamw", "--weight_decay=0.01"),
                *("--local_parameter_device=gpu", "--enable_xla=true"),
            ],
            2,
        ),
        (
            [
                *("--dataset=synthetic:8x8x1:10:640", "--eval_dataset=digits"),
                *("--model=mlp", "--max_train_steps=7", "--num_gpus=3"),
                *("--recipe=cifar", "--randaugment=1,5", "--prefetch=2"),
            ],
            7,
        ),
        (
            [
                *("--model=mlp", "--image_size=12x10", "--dtype=fp16"),
                *("--train_split=train[:128]", "--eval_split=train[-9:]"),
                # The last batch is of two images.
                *("--batch_size=63", "--num_gpus=4"),
            ],
            3,
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_flags_at_work(data_dir, tmp_path, flags, steps):
    done = run(
        f"--data_dir={data_dir}", f"--model_dir={tmp_path}", "--train_epochs=1", *flags
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == steps
    assert np.isfinite(summary["val_loss"])
    assert ours(done) == []
    stopped = f"epoch 1/1 stopped, step {steps}" in done.stdout
    assert stopped == any("max_train_steps" in flag for flag in flags)
    if "--log_steps=10" in flags:  # no rate yet: these steps were the warm-up
        assert re.search(r"^epoch 1/1, step 10:(?!.*examples/sec)", done.stdout, re.M)


def test_split_ratios_and_loss_placement(one_epoch, shared):
    even, uneven = (
        json.loads((path / "summary.json").read_text()) for path in (one_epoch, shared)
    )
    for name in ("val_loss", "val_accuracy"):
        assert uneven[name] == pytest.approx(even[name], rel=1e-4)


def test_images_in_folders(tmp_path):
    write_folder(tmp_path / "images", ant=12, bee=11)
    run_here(
        *(f"--dataset=folder:{tmp_path / 'images'}", "--image_size=8", "--model=mlp"),
        *(f"--model_dir={tmp_path / 'run'}", "--train_epochs=1", "--batch_size=8"),
    )
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == 3  # of 21 images, as two are held out
    assert "val_accuracy" in summary


def test_rows_of_numbers(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for split, count in (("train", 90), ("test", 30)):
        rows = rng.normal(size=[count, 3])
        labels = (rows[:, 0] > rows[:, 1]).astype(int)
        lines = [
            f"{a},{b},{c},{y}\n" for (a, b, c), y in zip(rows, labels, strict=True)
        ]
        (tmp_path / f"{split}.csv").write_text("a,b,c,label\n" + "".join(lines))
    run_here(
        *(f"--dataset=csv:{tmp_path}/*.csv", "--model=mlp", "--batch_size=16"),
        *(f"--model_dir={tmp_path / 'run'}", "--train_epochs=4"),
        "--learning_rate=0.02",
    )
    out = capsys.readouterr().out
    assert "90 rows of 3 numbers to train on, 2 classes" in out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["val_accuracy"] > 0.9


def test_where_examples_are_kept_changes_no_result(one_epoch, data_dir, tmp_path):
    # By --deterministic, in the order of those in memory; so does a disk's.
    done = run(
        *(*ONE_EPOCH, f"--data_dir={data_dir}", f"--model_dir={tmp_path / 'run'}"),
        *("--cache=disk", f"--cache_dir={tmp_path}/cache"),
    )
    assert f"112.3 KB of pixels kept in {tmp_path}/cache." in done.stdout
    assert loss(tmp_path / "run") == loss(one_epoch)


@pytest.mark.slow
def test_workers_of_a_service_change_no_result(data_dir, tmp_path):
    from tensorflow.data.experimental import service

    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
    address = dispatcher.target
    # Before it ends, a worker waits for its next heartbeat: by default, for 30 s.
    worker = service.WorkerServer(
        service.WorkerConfig(address.partition("://")[2], heartbeat_interval_ms=500)
    )
    flags = (f"--data_dir={data_dir}", "--model=mlp", "--train_epochs=2")
    losses = []
    for name, more in (
        ("here", "--cache=none"),
        ("there", f"--data_service={address}"),
    ):
        path = tmp_path / name
        run(*flags, f"--model_dir={path}", "--deterministic", "--recipe=cifar", more)
        losses.append(loss(path))
    assert losses[0] == losses[1]
    del worker, dispatcher


class TestInProcess:
    """What needs no run."""

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_after_the_end_is_no_failure(self, monkeypatch, number):
        data = types.SimpleNamespace(source=None, evaluated=[None])
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

    def test_another_seed_gives_other_weights(self, monkeypatch):
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
    def test_learning_rate(self, schedule, expected):
        asked = Settings(lr_schedule=schedule, learning_rate=1.0, train_epochs=4)
        # 95 images are 10 steps an epoch.
        rate = learning_rate(asked.but(batch_size=10), 95, 1)
        found = [float(rate(step)) for step in (0, 10, 20, 40)]
        np.testing.assert_allclose(found, expected, atol=1e-6)

    def test_learning_rate_of_unknown_length(self):
        asked = Settings(lr_schedule="cosine")
        with pytest.raises(ValueError, match="--max_train_steps"):
            learning_rate(asked, None, 1)
        assert float(learning_rate(asked.but(max_train_steps=8), None, 1)(8)) == 0.0

    def test_optimizer(self):
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
    def test_loss_fits_the_models_end(self, end, from_logits):
        model = keras.Sequential([keras.Input((4,)), *end])
        model_parts.compile_model(Settings(), model, (4,), 95)
        assert model.loss.from_logits is from_logits
        assert model.optimizer.built

    def test_nothing_left_names_the_flag_that_ended_it(self, tmp_path, capsys):
        asked = Settings(model_dir=str(tmp_path), max_train_steps=7)
        job = mock.Mock(settings=asked, model_dir=str(tmp_path), epoch=0, step=7)
        job.data.bad_records = None
        assert train_run.train(job) is None
        assert "has 7 steps already. Give more --max_train_steps" in (
            capsys.readouterr().out
        )

    @pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}'])
    def test_what_was_measured_before_may_be_unknown(self, tmp_path, text):
        (tmp_path / "summary.json").write_text(text)
        assert set(last_lines.measured_before(str(tmp_path)).values()) == {None}

    def test_a_report_that_looks_at_the_lock_keeps_no_run_away(
        self, tmp_path, monkeypatch
    ):
        with open(tmp_path / "lock", "w") as ours, open(tmp_path / "lock") as theirs:
            fcntl.flock(theirs, fcntl.LOCK_SH)
            waits = []
            monkeypatch.setattr(
                *(files.time, "sleep"),
                lambda s: (waits.append(s), fcntl.flock(theirs, fcntl.LOCK_UN)),
            )
            files.take(ours)
        assert len(waits) == 1

    def test_clean_removes_only_what_a_run_wrote(self, tmp_path):
        mine = ["notes.txt", "other.keras", "train/cat/1.png", "checkpoints/mine.h5"]
        written = ["model.keras", "summary.json", "flags.txt", "unfinished.keras"]
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

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ({"learning_rate": float("nan")}, "--learning_rate=nan; expected at least"),
            ({"parity_steps": 0}, "--parity_steps=0; expected at least 1"),
            ({"profile_steps": ("5",)}, "--profile_steps=5; expected the first and"),
            ({"profile_steps": ("5", "5")}, "--profile_steps=5,5; expected the first"),
            ({"profile_steps": ("0", "5")}, "--profile_steps=0,5; expected the first"),
            ({"profile_steps": ("a", "5")}, "--profile_steps=a,5; expected the first"),
            ({"randaugment": ("2",)}, "--randaugment=2; expected layers"),
            ({"randaugment": ("2", "11")}, "--randaugment=2,11; expected layers"),
            ({"randaugment": ("999", "9")}, "--randaugment=999,9; expected layers"),
            ({"data_service": ""}, "--data_service=; expected the address"),
            ({"data_service": "grpc://localhost:1"}, "where no dispatcher answers"),
            ({"mixup_alpha": -1.0}, "--mixup_alpha=-1.0; expected at least 0"),
            ({"shuffle_mb": -1}, "--shuffle_mb=-1; expected at least 0"),
            ({"prefetch": -1}, "--prefetch=-1; expected at least 0"),
            ({"cache": "disk"}, "--cache=disk without --cache_dir"),
            ({"data_service": "localhost"}, "--data_service=localhost; expected the"),
            (
                {"data_service": "grpc://a:1", "cache": "memory"},
                "--cache=memory with --data_service",
            ),
            (
                {"cutmix_alpha": 1.0, "loss_placement": "gathered"},
                "--loss_placement=gathered with --mixup_alpha",
            ),
            (
                {"cache": "memory", "cache_dir": "a"},
                "--cache_dir=a with --cache=memory, which keeps no files",
            ),
            ({"image_key": "a"}, "--image_key=a for digits; expected it only for tf"),
            (
                {"dataset": "csv:a", "train_split": "b"},
                "--train_split=b for csv:a; expected it only for digits, tfds:, so",
            ),
            (
                {"eval_dataset": "folder:a", "eval_split": "b"},
                "--eval_split=b for folder:a; expected it only for digits, tfds:, so",
            ),
            (
                {"feature_columns": ("b", "c")},
                "--feature_columns=b,c for digits; expected it only for parquet:, csv:",
            ),
            (
                {"dataset": "csv:a", "eval_fraction": 0.2, "eval_dataset": "digits"},
                "--eval_fraction=0.2 and --eval_dataset=digits, which is evaluated",
            ),
            ({"steps_per_loop": 0}, "--steps_per_loop=0; expected at least 1"),
            ({"image_size": "8x"}, "--image_size=8x; expected pixels"),
            ({"seed": 2**32}, "--seed=4294967296; expected 0 to 4294967295"),
            ({"momentum": 2.0}, "--momentum=2.0; expected 0 to 1"),
            ({"optimizer": "multioptimizer"}, "expected an optimizer of"),
            ({"gpu_indices": ("a",)}, "--gpu_indices=a; expected numbers"),
            ({"eval_only": True, "clean": True}, "--clean and --eval_only; expected"),
            ({"split_ratios": ("2", "x")}, "--split_ratios=2,x; expected a positive"),
            ({"split_ratios": ("2", "0")}, "--split_ratios=2,0; expected a positive"),
            ({"split_ratios": ("-1",)}, "--split_ratios=-1; expected a positive"),
            ({"split_ratios": ("1.5",)}, "--split_ratios=1.5; expected a positive"),
        ],
    )
    def test_bad_flags(self, flags, message):
        with pytest.raises(ValueError, match=message):
            checks.check(Settings(**flags))

    def test_flags_repeat_a_run_from_any_folder(self, tmp_path, monkeypatch):
        here = tmp_path / "a project"
        here.mkdir()
        monkeypatch.chdir(here)
        monkeypatch.setenv("HOME", "/home/me")
        (here / "my model.py").write_text("def build(s, n): ...")
        given = {
            "model": "my model.py:build",
            "dataset": "folder:my pictures",
            "eval_dataset": "digits",
            "data_dir": "~/data",
            "cache_dir": "gs://bucket/cache",
            "split_ratios": ("2", "3"),
            "feature_columns": ("a,b", "c"),
            "strict": False,
        }
        before = Settings(model_dir="/runs/mine", **given)
        text = before.as_text()
        lines = text.splitlines()
        for line in (
            f"--model={here}/my model.py:build",
            f"--dataset=folder:{here}/my pictures",
            "--eval_dataset=digits",
            "--data_dir=/home/me/data",
            "--cache_dir=gs://bucket/cache",
            "--split_ratios=2,3",
            "--model_dir=/runs/mine",
            '--feature_columns="a,b",c',
            "--nostrict",
        ):
            assert line in lines
        (tmp_path / "flags.txt").write_text(text)
        monkeypatch.chdir("/")
        with flagsaver.flagsaver():
            train_flags.FLAGS(["test", f"--flagfile={tmp_path}/flags.txt"])
            after = train_flags.settings()
        assert after.as_text() == text
        assert after.but(model=before.model, dataset=before.dataset) == before.but(
            data_dir="/home/me/data"
        )

    def test_split_ratios(self):
        placed = devices.Devices(("/device:CPU:0", "/device:CPU:1"), "/device:CPU:0")
        assert split_ratios(Settings(), placed) == (1, 1)
        assert split_ratios(Settings(split_ratios=("3", "10")), placed) == (3, 10)
        with pytest.raises(ValueError, match=r"=3 for 2 towers; .* or --num_gpus=1\."):
            split_ratios(Settings(split_ratios=("3",)), placed)

    def test_flags_of_the_data_reach_it(self, tmp_path):
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
        assert [each.splits for each in sources] == [{"train": 20}, {"train": None}]
        (tmp_path / "b.csv").write_text("x,y,z\n1,2,owl\n")
        like = types.SimpleNamespace(class_names=("cat", "owl"))
        spec = f"csv:{tmp_path}/b.csv"
        held_out = data_parts.open_source(Settings(), spec, 2, like)
        assert (held_out.num_classes, held_out.class_names) == (2, ("cat", "owl"))
        assert held_out.splits == {"train": None}

    def test_what_was_decided_is_said(self, tmp_path):
        (tmp_path / "a.csv").write_text("x,y,z\n" + "1,2,0\n1,2,1\n" * 10)
        source = input_pipeline.open_source(f"csv:{tmp_path}/a.csv")
        data = types.SimpleNamespace(source=source, held_out=(source, "test"))
        job = types.SimpleNamespace(data=data, settings=Settings())
        said = first_lines.data_notes(job)
        assert said[0].startswith(
            "The labels are the column 'z', the last one; --label"
        )
        assert said[1].startswith("10% of the rows, 2 in all, are held out for validat")
        assert said[2:] == [f"Validation {source.name}: 2 examples."]
        data.held_out = None
        job.settings = Settings(
            dataset="csv:a", data_dir="b", cache_dir="c", max_bad_records=3
        )
        *_, nothing, data_dir, bad, cache_dir = first_lines.data_notes(job)
        assert "--data_dir" not in job.settings.as_text()
        assert nothing.startswith(
            "There is no validation data, so the training data is"
        )
        assert data_dir.startswith("Note: --data_dir=b changes nothing, as only digits")
        assert bad.startswith("Note: --max_bad_records=3 changes nothing, as no bad")
        assert cache_dir == "Note: --cache_dir=c changes nothing here."

    def test_data_sets_with_other_classes(self, tmp_path):
        write_folder(tmp_path / "train", ant=1, bee=1)
        write_folder(tmp_path / "test", ant=1, cat=1)
        ours, theirs = (
            input_pipeline.open_source(f"folder:{tmp_path / name}")
            for name in ("train", "test")
        )
        data_parts.check_same_kind(Settings(), ours, ours)
        with pytest.raises(ValueError, match=r"label 1 is 'cat' .* but 'bee'"):
            data_parts.check_same_kind(Settings(), ours, theirs)

    def test_data_sets_with_other_sizes(self):
        ours, theirs = (
            input_pipeline.open_source(f"synthetic:{size}x{size}x1:10")
            for size in (8, 9)
        )
        with pytest.raises(ValueError, match=r"\(9, 9, 1\), but .* \(8, 8, 1\)"):
            data_parts.check_same_kind(Settings(), ours, theirs)
        data_parts.check_same_kind(Settings(image_size="8"), ours, theirs)

    @pytest.mark.parametrize("head", [None, "softmax", "nested"])
    def test_logits_are_told_from_probabilities(self, head):
        dense = keras.layers.Dense(4, activation=None if head is None else "softmax")
        last = keras.Sequential([dense]) if head == "nested" else dense
        flatten = keras.layers.Flatten()
        model = keras.Sequential([keras.Input((3, 3, 1)), flatten, last])
        assert model_parts.returns_logits(model, (3, 3, 1)) == (head is None)

    def test_a_model_of_the_users_own_class(self):
        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(4, activation="softmax")

            def call(self, x):
                return self.dense(x)

        source, asked = mock.Mock(num_classes=3), Settings(mixup_alpha=1.0)
        with mock.patch.object(model_parts.models, "build", return_value=Model()):
            model = model_parts.build_model(asked, source, (2,), "/CPU:0")
        placed = devices.Devices(("/CPU:0",), "/CPU:0")
        parallel = model_parts.build_towers(asked, model, placed, (2,), 95)
        assert not parallel.loss.from_logits

    def test_a_model_that_cannot_be_saved_is_told_at_once(self):
        class Model(keras.Model):
            def __init__(self, units):
                super().__init__()

        saves = keras.Sequential([keras.layers.Dense(2)])
        model_parts.check_can_be_saved(Settings(), saves)
        with pytest.raises(ValueError, match=r"arguments Model was made; .*get_config"):
            model_parts.check_can_be_saved(Settings(), Model(object()))

    def test_a_model_whose_call_is_wrong(self):
        class Layer(keras.layers.Layer):
            def call(self, x):
                return x.absent

        source = mock.Mock(num_classes=3)
        with (
            mock.patch.object(model_parts.models, "build") as build,
            pytest.raises(ValueError, match=r"(?s)raised AttributeError .*absent"),
        ):
            build.return_value = keras.Sequential([Layer()])
            model_parts.build_model(Settings(), source, (2,), "/CPU:0")

    def test_commands_that_are_printed_quote_paths(self):
        summary = dict.fromkeys(("measured", "bad_records", "best", "model"))
        summary |= {"epochs": 1, "steps": 1, "towers": [], "model_dir": "/my runs/a"}
        said = last_lines.text({**summary, "checkpoint": None})
        assert "  tensorboard --logdir '/my runs/a'" in said

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
                r"returns 2 tensors in a structure, but x has labels from 0 to 2",
            ),
        ],
    )
    def test_a_model_of_other_inputs_and_outputs(self, inputs, outputs, said):
        tensors = [keras.Input(shape) for shape in inputs]
        first = tensors[0] if len(tensors) == 1 else tensors
        made = [keras.layers.Dense(3)(tensors[-1]) for _ in range(outputs)]
        model = keras.Model(first, made[0] if outputs == 1 else made)
        source = mock.Mock(num_classes=3)
        source.name = "x"
        with (
            mock.patch.object(model_parts.models, "build", return_value=model),
            pytest.raises(ValueError, match=said),
        ):
            model_parts.build_model(Settings(), source, (2,), "/CPU:0")

    def test_a_table_is_evaluated_by_the_columns_it_was_trained_on(self, tmp_path):
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

    def test_rows_are_not_augmented(self):
        source = mock.Mock(image_shape=(2,))
        for name, value in (("recipe", "cifar"), ("randaugment", ("2", "9"))):
            said = f"--{name}=.*, but .* has rows of numbers; expected images"
            with pytest.raises(ValueError, match=said):
                data_parts.choose_image_shape(Settings(**{name: value}), source)

    def test_no_signal_disturbs_the_end(self, monkeypatch, capsys):
        done = []
        monkeypatch.setattr(signal, "signal", lambda *args: done.append(args))
        monkeypatch.setattr(train.gc, "collect", lambda: done.append("collected"))
        monkeypatch.setattr(train, "assemble", mock.Mock(side_effect=ValueError("no")))
        assert train.main(Settings()) == 1
        ignored = [(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]
        assert done[-3:] == [*ignored, "collected"]

    def test_gpus_that_do_not_exist(self, monkeypatch, capsys, tmp_path):
        gpus = [
            tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU")
            for i in range(2)
        ]
        for name in ("list_physical_devices", "get_visible_devices"):
            monkeypatch.setattr(tf.config, name, lambda kind=None: gpus)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        model_dir = tmp_path / "run"
        asked = Settings(model_dir=str(model_dir), data_dir=str(tmp_path))
        for flags, words in (
            ({"num_gpus": 3}, ["3", "2"]),
            ({"gpu_indices": ("0", "5")}, ["5", "2"]),
        ):
            assert train.main(asked.but(**flags)) == 1
            message = capsys.readouterr().err
            assert message.startswith("towers.train: ")
            assert message.count("\n") == 1
            for word in words:
                assert word in message
        assert not model_dir.exists()


# Going on with an earlier run.


def first_done(out):
    """The number of the first epoch that a run finished."""
    return int(re.search(r"^epoch (\d+)/\d+ done", out, re.M)[1])


def continued(out, path):
    """The epoch and the batch after which a run says that it goes on."""
    found = re.search(
        rf"^Continuing from {path}/checkpoints/ckpt-(\d+)-(\d+): after epoch \1"
        r"(?: and \2 batch(?:es)?)?, step (\d+)\.$",
        out,
        re.M,
    )
    epoch, batch, step = map(int, found.groups())
    assert step == epoch * STEPS + batch
    return epoch, batch


def test_killed_and_started_again_with_the_flags_that_it_wrote(killed, whole, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(killed, path)
    (path / "not_finite.npz").touch()
    done = run(f"--flagfile={killed / 'flags.txt'}", f"--model_dir={path}")
    before, after = ((p / "flags.txt").read_text() for p in (killed, path))
    assert f"--model_dir={killed}\n" in before
    assert "--model=mlp\n" in before
    assert "--deterministic\n" in before
    assert after == before.replace(f"={killed}\n", f"={path}\n")
    # Nothing in this run is not finite.
    assert not (path / "not_finite.npz").exists()
    epoch, batch = continued(done.stdout, path)
    assert 1 <= epoch < 8 and batch in (0, 5, 10, 15, 20)
    assert first_done(done.stdout) == epoch + 1
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["epochs"], summary["steps"]) == (8, 8 * STEPS)
    model = keras.models.load_model(path / "model.keras")
    assert int(model.optimizer.iterations) == 8 * STEPS
    # As if nothing had happened.
    assert_same_bits(model.get_weights(), weights(whole))


def test_terminated_and_started_again(data_dir, tmp_path, capsys):
    flags = (f"--data_dir={data_dir}", f"--model_dir={tmp_path}", "--model=mlp")
    process = start(*flags, "--train_epochs=1000")
    wait_for(process, "epoch 1/1000 done")
    process.terminate()
    done = finish(process)
    assert done.returncode == 143
    (said,) = ours(done)
    saved = re.fullmatch(
        rf"Stopped by SIGTERM: the last checkpoint is {tmp_path}/checkpoints/"
        r"ckpt-(\d+)-(\d+); run again to continue\.",
        said,
    )
    assert "Traceback" not in done.stderr
    epoch, batch = map(int, saved.groups())
    run_here(*flags, f"--train_epochs={epoch + 1}")
    out = capsys.readouterr().out
    assert continued(out, tmp_path) == (epoch, batch)
    assert first_done(out) == epoch + 1
    assert f"Done: {epoch + 1} epochs, {(epoch + 1) * STEPS} steps" in out


@pytest.mark.oldest
def test_finished_and_started_again(trained, data_dir, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(trained.path, path)
    run_here(
        f"--data_dir={data_dir}", f"--model_dir={path}", f"--train_epochs={EPOCHS}"
    )
    out = capsys.readouterr().out
    assert f"Nothing left to train: {path} has 8 epochs already" in out
    assert "epoch 9" not in out and "epoch 1/" not in out
    assert "Give more --train_epochs, or --clean" in out
    assert "Done: 8 epochs, 184 steps" in out
    assert_same_bits(weights(path), weights(trained.path))
    # What was measured is kept, and not said again as if it were new.
    assert "examples/sec" not in out and "a step:" not in out
    before, after = (
        json.loads((folder / "summary.json").read_text())
        for folder in (trained.path, path)
    )
    for name in ("examples_per_sec", "step_ms", "waiting", "verdict", "measured"):
        assert after[name] == before[name] is not None


def test_eval_only(trained, data_dir, capsys):
    before = snapshot(trained.path)
    run_here(f"--data_dir={data_dir}", f"--model_dir={trained.path}", "--eval_only")
    out = capsys.readouterr().out
    summary = json.loads((trained.path / "summary.json").read_text())
    last = out.splitlines()[-1]
    found = re.fullmatch(
        r"validation accuracy ([\d.]+), validation loss ([\d.]+)", last
    )
    assert float(found[1]) == pytest.approx(summary["val_accuracy"], abs=1e-4)
    assert float(found[2]) == pytest.approx(summary["val_loss"], abs=1e-4)
    assert snapshot(trained.path) == before
    # Nothing is read twice, so nothing is kept.
    assert "kept" not in out and "kept" in trained.stdout


def test_clean_starts_over(trained, data_dir, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(trained.path, path)
    (path / "notes.txt").write_text("mine")
    # Another model: its checkpoint does not matter any more.
    run_here(
        *(f"--data_dir={data_dir}", f"--model_dir={path}", "--clean", "--model=mlp"),
        "--train_epochs=1",
    )
    assert first_done(capsys.readouterr().out) == 1
    assert (path / "notes.txt").read_text() == "mine"
    assert not (path / "checkpoints/ckpt-8-0").exists()
    for name in ("train", "validation"):
        assert len(list((path / name).iterdir())) == 1


# Bad input: one sentence, exit code 1, and nothing written.


MODELS = """
import keras

def build(input_shape, outputs):
    return keras.Sequential(
        [keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(outputs)]
    )

def too_few(input_shape, num_classes):
    return build(input_shape, num_classes - 1)

def another_shape(input_shape, num_classes):
    return build((5, 6, 1), num_classes)

def no_vector(input_shape, num_classes):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(num_classes)])
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of all the bad things that the flags below name."""
    path = tmp_path_factory.mktemp("made")
    (path / "models.py").write_text(MODELS)
    (path / "file").write_text("not a folder")
    write_folder(path / "images", ant=3, bee=3)
    (path / "images_with_an_empty_class").mkdir()
    write_folder(path / "images_with_an_empty_class", ant=3, bee=0)
    write_folder(path / "broken_image", ant=3, bee=3)
    broken = path / "broken_image/bee/01.png"
    broken.write_bytes(broken.read_bytes()[:40])
    write_tfrecord(path / "labels.tfrecord", [png(i) for i in range(8)], range(8))
    records = path / "corrupt.tfrecord"
    write_tfrecord(records, [png(i) for i in range(8)], [0, 1] * 4)
    content = bytearray(records.read_bytes())
    content[len(content) // 2] ^= 255
    records.write_bytes(content)
    images = [png(i) for i in range(8)]
    images[5] = images[5][:40]
    write_tfrecord(path / "image.tfrecord", images, [0, 1] * 4)
    (path / "rows.csv").write_text("a,b,label\n1,2,0\n3,4,1\n")
    return path


# What programs make a sentence of while they set up.
BAD = ValueError, OSError, tf.errors.OpError


def check_bad(done, words, model_dir):
    (said,) = ours(done)
    for word in words:
        assert word in said
    assert "Traceback" not in done.stderr
    assert not done.stdout.startswith("epoch")
    assert not os.path.exists(model_dir)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        # Found before TensorFlow is imported; as devices are set up; and in the data.
        ("--model=resnet21", ["resnet21", "resnet20"]),
        (
            "--allow_growth --gpu_memory_limit_mb=100",
            ["allow_growth", "gpu_memory_limit_mb"],
        ),
        (
            "--dataset=tfrecord:{made}/corrupt.tfrecord --image_size=8 --num_classes=2",
            ["{made}/corrupt.tfrecord", "record 4", "byte offset", "corrupted"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_ends_the_program(made, data_dir, tmp_path, flags, words):
    model_dir = tmp_path / "run"
    done = run(
        *(f"--data_dir={data_dir}", f"--model_dir={model_dir}"),
        *flags.format(made=made).split(),
        code=1,
    )
    check_bad(done, [word.format(made=made) for word in words], model_dir)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--dataset=digit", ["digit", "did you mean digits?"]),
        ("--dataset=tfds:mnits", ["mnits", "mnist"]),
        ("--optimizer=sdg", ["--optimizer=sdg", "sgd"]),
        ("--dtype=fp8", ["--dtype=fp8", "fp32, fp16, bf16"]),
        ("--batch_size=0", ["--batch_size=0", "at least 1"]),
        ("--optimizer=sgd --momentum=2", ["--momentum=2.0", "0 to 1"]),
        ("--dataset=folder:{made}/none", ["{made}/none", "not a folder"]),
        ("--dataset=tfrecord:{made}/none-*", ["no file matches", "{made}/none-*"]),
        (
            "--dataset=folder:{made}/images_with_an_empty_class --image_size=8",
            ["{made}/images_with_an_empty_class/bee", "no JPEG, PNG, GIF"],
        ),
        ("--dataset=folder:{made}/images", ["differ in size", "--image_size"]),
        (
            "--dataset=tfrecord:{made}/labels.tfrecord --num_classes=5 --image_size=8",
            ["{made}/labels.tfrecord", "record 5", "label 5", "[0, 5)"],
        ),
        ("--model={made}/models.py:too_few", ["too_few", "(None, 9)", "(None, 10)"]),
        ("--model={made}/models.py:no_vector", ["no_vector", "(None, 8, 8, 10)"]),
        (
            "--model={made}/models.py:another_shape",
            ["another_shape", "(None, 5, 6, 1)", "(8, 8, 1)", "--image_size"],
        ),
        ("--model=MobileNetV2", ["MobileNetV2", "32x32", "(8, 8, 1)"]),
        (
            "--split_ratios=2,3,3 --num_gpus=2",
            ["--split_ratios=2,3,3", "2 towers", "--num_gpus=3"],
        ),
        (
            "--batch_size=3 --num_gpus=4",
            ["--batch_size=3", "4 towers", "1 would get no", "--num_gpus"],
        ),
        ("--loss_placement=home", ["--loss_placement=home", "auto, tower, gathered"]),
        (
            "--eval_dataset=synthetic:8x8x1:12",
            ["synthetic:8x8x1:12", "12 classes", "digits has 10"],
        ),
        (
            "--dataset=synthetic:8x8x2:3:64 --randaugment=2,9",
            ["(8, 8, 2)", "set the number of channels"],
        ),
        ("--eval_only", ["no checkpoint", "{model_dir}/checkpoints", "train first"]),
        (
            "--dataset=csv:{made}/rows.csv --image_size=8",
            ["image_size=8", "rows of num"],
        ),
        ("--no_such_flag=1", ["no_such_flag", "--help"]),
        ("stray", ["'stray'", "flags only"]),
        ("--flagfile={made}/none", ["{made}/none", "--help"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(made, data_dir, tmp_path, flags, words):
    model_dir = tmp_path / "run"
    names = {"made": made, "model_dir": model_dir}
    with pytest.raises(BAD) as caught:
        assembled(
            *(f"--data_dir={data_dir}", f"--model_dir={model_dir}"),
            *flags.format(**names).split(),
        )
    for word in words:
        assert word.format(**names) in str(caught.value)
    assert not model_dir.exists()


@pytest.mark.parametrize("model_dir", ["{made}/file/run", "/proc/run"])
def test_unwritable_model_dir(made, model_dir):
    # Tests may run as root, whom no permission stops.
    model_dir = model_dir.format(made=made)
    with pytest.raises(ValueError, match="--model_dir") as caught:
        checks.check_model_dir(Settings(model_dir=model_dir))
    assert model_dir in str(caught.value)
    assert os.path.dirname(model_dir) in str(caught.value)
    assert not os.path.exists(model_dir)


def test_checkpoint_of_another(trained, data_dir):
    before = snapshot(trained.path)
    flags = f"--data_dir={data_dir}", f"--model_dir={trained.path}", "--model=mlp"
    with pytest.raises(ValueError, match="another model") as caught:
        assembled(*flags)
    for word in ("conv2d", "dense", str(trained.path), "--clean"):
        assert word in str(caught.value)
    assert snapshot(trained.path) == before


def test_truncated_checkpoint(trained, data_dir, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(trained.path, path)
    for number in range(1, 6):  # the best may be kept
        shutil.rmtree(path / f"checkpoints/ckpt-{number}-0", ignore_errors=True)
    flags = f"--data_dir={data_dir}", f"--model_dir={path}", "--eval_only"
    first = f"Cannot read the checkpoint {path}/checkpoints/ckpt-8-0: "
    # With the newest that is whole, if there is one.
    break_checkpoints(path, 8, 7)
    before = snapshot(path)
    run_here(*flags)
    out, err = capsys.readouterr()
    older = f"{path}/checkpoints/ckpt-6-0"
    assert f"towers: Warning: {first}" in err
    assert err.endswith(f"after it is lost: going back to {older}.\n")
    assert f"Evaluating {older}: after epoch 6," in out
    assert snapshot(path) == before
    break_checkpoints(path, 6)
    before = snapshot(path)
    with pytest.raises(ValueError) as caught:
        assembled(*flags)
    said = str(caught.value)
    assert said.startswith(first) and said.endswith("or remove it.")
    assert snapshot(path) == before


def break_checkpoints(path, *numbers):
    for number in numbers:
        broken = path / f"checkpoints/ckpt-{number}-0/variables.data-00000-of-00001"
        broken.write_bytes(broken.read_bytes()[:-1000])


# What is found out only while training: named all the same.


def test_a_model_that_cannot_be_a_tower(data_dir, tmp_path):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            import keras

            class Unseeded(keras.layers.Layer):
                def call(self, x):
                    return x + keras.random.normal(keras.ops.shape(x))

            def build(input_shape, num_classes):
                layers = [keras.layers.Flatten(), Unseeded()]
                dense = keras.layers.Dense(num_classes)
                return keras.Sequential([keras.Input(input_shape), *layers, dense])
            """
        )
    )
    with pytest.raises(ModelError, match="Keras's global random seed"):
        run_here(
            *(f"--data_dir={data_dir}", f"--model_dir={tmp_path / 'run'}"),
            f"--model={tmp_path / 'mine.py'}:build",
        )


def test_divergence_is_no_success(data_dir, tmp_path):
    said = "The variable dense/kernel is not finite at step 23"
    with pytest.raises(NotFinite, match=said):
        run_here(
            *(f"--data_dir={data_dir}", f"--model_dir={tmp_path}", "--model=mlp"),
            *("--learning_rate=1e30", "--optimizer=sgd", "--train_epochs=1"),
            "--check_numerics=off",
        )
    assert not list(tmp_path.glob("checkpoints/ckpt-*"))
    assert not (tmp_path / "model.keras").exists()


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("folder:{made}/broken_image", ["{made}/broken_image/bee/01.png"]),
        ("tfrecord:{made}/image.tfrecord", ["{made}/image.tfrecord", "record 5"]),
    ],
)
def test_corrupt_image(made, tmp_path, dataset, words):
    with pytest.raises(input_pipeline.BadRecordError) as caught:
        assembled(
            *(f"--dataset={dataset.format(made=made)}", "--image_size=8"),
            *("--model=mlp", f"--model_dir={tmp_path}"),
        )
    for word in words:
        assert word.format(made=made) in str(caught.value)


def test_corrupt_record(data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path / "data")
    shard = sorted((tmp_path / "data").rglob("*train.tfrecord*"))[1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 255
    shard.write_bytes(content)
    said = rf"{shard}: record \d+ \(byte offset \d+\): corrupted"
    with pytest.raises(input_pipeline.BadRecordError, match=said):
        assembled(f"--data_dir={tmp_path / 'data'}", f"--model_dir={tmp_path / 'run'}")


@pytest.mark.slow
def test_bad_records_are_passed_over(tmp_path):
    images = [png(i) for i in range(100)]
    images[80] = b"no image"
    path = tmp_path / "train.tfrecord"
    write_tfrecord(path, images, [i % 3 for i in range(100)])
    write_tfrecord(tmp_path / "test.tfrecord", images[:9], [0] * 9)
    flags = (
        *(f"--dataset=tfrecord:{tmp_path}/*.tfrecord", "--image_size=8"),
        *("--model=mlp", "--deterministic", "--train_epochs=2", "--batch_size=4"),
        # So that it is found late.
        *("--cache=none", "--shuffle_mb=0", "--save_steps=5"),
    )
    done = run(*flags, f"--model_dir={tmp_path}/late", code=1)
    (said,) = ours(done)
    assert f"{path}: record 80 (byte offset " in said
    assert "; to train without it, give --bad_records=skip" in said
    skip = (*flags, "--bad_records=skip")
    # What was trained before stands.
    late = run(*skip, f"--model_dir={tmp_path}/late")
    assert re.search(r"Continuing from .*/ckpt-0-\d+: ", late.stdout)
    first = run(*skip, f"--model_dir={tmp_path}/first")
    assert_same_bits(weights(tmp_path / "late"), weights(tmp_path / "first"))
    file = tmp_path / "first" / "bad_records.json"
    assert f"Bad records: 1 passed over, listed in {file}." in first.stdout
    assert "  bad records  1 passed over" in first.stdout
    (found,) = json.loads(file.read_text())
    assert found["bad"]["train"][0]["path"] == str(path)
    assert found["splits"] == {"train": 99, "test": 9}
    summary = json.loads((tmp_path / "first" / "summary.json").read_text())
    assert (summary["bad_records"], summary["steps"]) == (1, 2 * 25)
    (events,) = (tmp_path / "first" / "train").glob("events.out.tfevents.*")
    values = {
        value.tag: tf.make_ndarray(value.tensor)
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
    }
    assert values["bad_records"] == 1
    few = run(*skip, f"--model_dir={tmp_path}/few", "--max_bad_records=0", code=1)
    assert "more bad records than the 0" in ours(few)[0]


@pytest.fixture(scope="module")
def worse(shared, data_dir, tmp_path_factory):
    """A run that went on, and got worse; what it says."""

    def make(path):
        shutil.copytree(shared, path, dirs_exist_ok=True)
        flags = (f"--data_dir={data_dir}", f"--model_dir={path}", "--model=mlp")
        done = run(*flags, "--train_epochs=2", "--learning_rate=1", "--batch_size=32")
        done.path = path
        return done

    return once.make(tmp_path_factory, "worse", make)


@pytest.mark.slow
def test_what_has_changed_is_said(worse):
    assert "Learning rate: 1, after 0.001." in worse.stdout
    # Shares are no part of what is saved.
    assert continued(worse.stdout, worse.path) == (1, 0)
    (line,) = re.findall(r"^Changed since the last run: .*$", worse.stdout, re.M)
    for flag in (
        "no --split_ratios (before 2,3,3)",
        *("--train_epochs=2 (before 1)", "--loss_placement=auto (before gathered)"),
    ):
        assert flag in line
    assert not any(f"--{name}" in line for name in ("seed", "model_dir", "batch_size"))
    words = "goes on with other data, from their beginning: batch size 64 before, 32"
    assert [words in each for each in ours(worse)] == [True]


def test_a_worse_run_leaves_the_best_model(worse, shared):
    first = json.loads((shared / "summary.json").read_text())
    summary = json.loads((worse.path / "summary.json").read_text())
    best = worse.path / "best.keras"
    assert summary["best"] == {
        "monitor": "val_loss",
        "value": pytest.approx(first["val_loss"], rel=1e-5),
        "epoch": 1,
        "model": str(best),
        "checkpoint": f"{worse.path}/checkpoints/ckpt-1-0",
    }
    assert summary["val_loss"] > 2 * first["val_loss"]
    words = f"best model   {best}, val_loss {first['val_loss']:.4f} after epoch 1\n"
    assert words in worse.stdout
    # Of the first run, the only epoch was both.
    kept = keras.models.load_model(best).get_weights()
    assert_same_bits(kept, weights(shared))
    assert not np.array_equal(kept[0], weights(worse.path)[0])


def test_the_best_is_evaluated_and_gone_on_from(
    worse, shared, data_dir, tmp_path, capsys
):
    path = tmp_path / "run"
    shutil.copytree(worse.path, path)
    flags = (f"--data_dir={data_dir}", f"--model_dir={path}", "--model=mlp")
    first = json.loads((shared / "summary.json").read_text())
    before = snapshot(path)
    run_here(*flags, "--eval_only", "--checkpoint=best")
    out = capsys.readouterr().out
    assert f"Evaluating {path}/checkpoints/ckpt-1-0: after epoch 1" in out
    assert f"validation loss {first['val_loss']:.4f}" in out
    assert snapshot(path) == before
    run_here(*flags, "--checkpoint=best", "--train_epochs=2")
    out = capsys.readouterr().out
    assert "ckpt-1-0: after epoch 1, step 23, the best by val_loss: " in out
    assert "The training after it is given up: ckpt-2-0 will be" in out
    summary = json.loads((path / "summary.json").read_text())
    assert summary["epochs"] == summary["best"]["epoch"] == 2
    assert summary["val_loss"] < first["val_loss"]


def test_another_batch_size_in_the_middle_of_an_epoch(killed, data_dir, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(killed, path)
    for between_epochs in path.glob("checkpoints/ckpt-*-0"):
        shutil.rmtree(between_epochs)
    flags = (f"--data_dir={data_dir}", f"--model_dir={path}", *REPEATABLE)
    before = snapshot(path)
    done = run(*flags, "--batch_size=32", code=1)
    # With the flags of the run that may still go on.
    assert snapshot(path) == before
    assert "batch size" in ours(done)[0] or "batches of" in ours(done)[0]
    assert "Traceback" not in done.stderr


def test_one_run_at_a_time(data_dir, tmp_path):
    flags = (f"--data_dir={data_dir}", f"--model_dir={tmp_path}", "--model=mlp")
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SaveError, match=f"Another run writes to {tmp_path}"):
            run_here(*flags, "--train_epochs=1")
        assert not (tmp_path / "flags.txt").exists()


@pytest.mark.parametrize("name", ["flags.txt", "lock", "checkpoints"])
def test_something_in_the_way(data_dir, tmp_path, name):
    path = tmp_path / name
    path.write_text("") if name == "checkpoints" else path.mkdir()
    flags = (f"--data_dir={data_dir}", f"--model_dir={tmp_path}", "--model=mlp")
    with pytest.raises(BAD if name == "checkpoints" else SaveError) as caught:
        run_here(*flags, "--train_epochs=1")
    assert str(tmp_path) in str(caught.value)
