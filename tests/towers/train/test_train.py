"""towers.train, from its flags to what it writes and says."""

import glob
import itertools
import os
import pty
import re
import signal
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.terminal import read_all
from tests.towers.train.runs import (
    EPOCHS,
    ONE_EPOCH,
    STEPS,
    TWO_STEPS,
    Terminal,
    assembled,
    continued,
    finish,
    main_here,
    ours,
    run,
    run_here,
    start,
    summary_of,
    write_folder,
)
from towers import input_pipeline
from towers.report.read import read
from towers.train import callbacks
from towers.train.outputs import start as start_lines


def assert_no_chatter(stderr):
    # TFDS speaks at INFO, draws bars; absl's marks of the level begin the line.
    assert not re.search(r"^[IW]\d{4} [\d:.]+ \d+ \w+\.py:", stderr, re.M)
    assert "examples/s" not in stderr
    assert "Traceback" not in stderr


@pytest.mark.oldest
def test_what_a_run_writes(trained):
    files = {str(p.relative_to(trained.path)) for p in trained.path.rglob("*")}
    assert {"model.keras", "summary.json", "flags.txt"} <= files
    assert {
        f"checkpoints/ckpt-{epoch}-0/variables.index" for epoch in (2, 3, 4)
    } <= files
    for name in ("train", "validation"):
        assert glob.glob(f"{trained.path}/{name}/events.out.tfevents.*")
    assert "unfinished.keras" not in files


def test_what_a_run_says(trained):
    out, path = trained.stdout, str(trained.path)
    # Where it runs, and on what.
    assert re.search(r"^tower +device .* local batch$", out, re.M)
    for tower in (0, 1):
        assert re.search(rf"^ +{tower} +/device:CPU:{tower} .* 32$", out, re.M)
    assert "Variables live on /device:CPU:0" in out
    assert re.search(r"^Model mlp: [\d,]+ parameters \([\d.,]+ MB\)\.$", out, re.M)
    data = "Data digits: 1,437 training images of 8x8x1, 10 classes"
    assert f"{data}, 112.3 KB of pixels kept in memory.\n" in out
    # One line an interval, and one an epoch.
    lines = re.findall(r"^(?:epoch|step \d+/).*(?:\n  .*)?", out, re.M)
    assert [line.partition(":")[0] for line in lines] == [
        "epoch 1/4 done, step 23/92",
        "epoch 2/4 done, step 46/92",
        "step 50/92",
        "epoch 3/4 done, step 69/92",
        "epoch 4/4 done, step 92/92",
    ]
    rate = r"[\d,.]+ examples/sec"
    values = r"loss [\d.]+, accuracy [\d.]+"
    seconds = r"after [\d:]+(?: s)?"
    line = rf"step 50/92: {values}, {rate}, {seconds}, [\d:]+(?: s)? left"
    assert re.fullmatch(line, lines[2])
    last = rf"{values}, val_loss [\d.]+, val_accuracy [\d.]+, {rate}, {seconds}"
    assert re.fullmatch(
        rf"epoch 4/4 done, step 92/92: {last}", " ".join(lines[-1].split())
    )
    assert [
        line for line in out.splitlines() if len(line) > 100 and path not in line
    ] == []
    # How it ended.
    verdicts = re.findall(r"^(step \d+|whole run): [\w -]+-bound: towers", out, re.M)
    assert verdicts[-1] == "whole run"
    assert verdicts[:-1] in ([], ["step 50"])
    end = out[out.index("Done: ") :]
    assert end.startswith("Done: 4 epochs, 92 steps on 2 towers.\n")
    slowest = rf"{rate} or fewer in the slowest tenth of the steps"
    assert re.search(rf"^  {rate} \(median\); {slowest}$", end, re.M)
    for tower in (0, 1):
        line = rf"^    tower {tower}: {rate}, computing \d+% of the time$"
        assert re.search(line, end, re.M)
    # On a busy machine, a step may take more than 1,000 ms.
    ms = r"[\d,.]+"
    step = rf"{ms} waiting for input, .* computing \(by tower: {ms}, {ms}\)"
    unwrapped = " ".join(end.split())
    assert re.search(rf" a step: {ms} ms: {step}, [^:]* in Python ", unwrapped)
    assert re.search(r"^  this process, \d+ cores +[\d,]+ MB", end, re.M)
    assert f"model        {path}/model.keras\n" in end
    assert f"checkpoint   {path}/checkpoints/ckpt-4-0\n" in end
    assert f"tensorboard --logdir {path}\n" in end
    assert_no_chatter(trained.stderr)
    assert ours(trained) == []


@pytest.mark.oldest
def test_stderr_has_no_chatter(killed):
    """Of a process: TensorFlow's own C++ speaks before anything of ours runs."""
    assert_no_chatter(killed.stderr)


@pytest.mark.slow
def test_writing_the_digits_is_no_chatter(tmp_path):
    flags = f"--data_dir={tmp_path / 'data'}", f"--model_dir={tmp_path / 'run'}"
    done = finish(start(*flags, "--model=mlp", "--train_epochs=1"))
    assert "Done: 1 epoch" in done.stdout
    assert_no_chatter(done.stderr)


@pytest.mark.oldest
def test_summary_is_what_plain_keras_gives(trained, data_dir):
    summary = summary_of(trained.path)
    source = input_pipeline.open_source("digits", data_dir=data_dir)
    source.prepare()
    test = input_pipeline.make_dataset(
        source, "test", batch_size=50, image_shape=(8, 8, 1), training=False
    ).map(lambda images, labels: (input_pipeline.normalize(images), labels))
    model = keras.models.load_model(trained.path / "model.keras")
    plain = model.evaluate(test, verbose=0, return_dict=True)
    assert summary["val_accuracy"] == pytest.approx(plain["accuracy"], abs=1e-6)
    assert summary["val_loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert f"val_accuracy {plain['accuracy']:.4f}" in trained.stdout
    assert int(model.optimizer.iterations) == EPOCHS * STEPS

    assert summary["examples_per_sec"] > 0
    assert 0 <= summary["waiting"] < 1
    # Each piece of advice is in the output once, maybe before the end.
    said = " ".join(trained.stdout.split())
    assert all(part in said for part in summary["verdict"].split("; "))
    for line in summary["measured"].splitlines():
        assert " ".join(line.split()) in said
    for key, value in {
        "epochs": EPOCHS,
        "steps": EPOCHS * STEPS,
        "towers": ["/device:CPU:0", "/device:CPU:1"],
        "batch_size": 64,
        "class_names": [*"0123456789"],
        "model": f"{trained.path}/model.keras",
        "checkpoint": f"{trained.path}/checkpoints/ckpt-4-0",
        "model_dir": str(trained.path),
    }.items():
        assert summary[key] == value


def test_tensorboard_has_the_flags_and_both_runs(trained):
    tags = {
        name: {
            value.tag: value
            for path in (trained.path / name).glob("events.out.tfevents.*")
            for event in tf.compat.v1.train.summary_iterator(str(path))
            for value in event.summary.value
        }
        for name in ("train", "validation")
    }
    assert {"epoch_accuracy", "batch_accuracy"} <= tags["validation"].keys()
    learning = {"examples_per_sec/tower_1", "step_ms/compute", "waiting"}
    assert {*learning, "input", "confusion", "confusion_counts"} <= tags["train"].keys()
    assert {"model", "devices", "versions", "verdict"} <= tags["train"].keys()
    text = tf.make_ndarray(tags["train"]["model"].tensor).item().decode()
    assert "Total params" in text and "dense" in text
    text = tf.make_ndarray(tags["train"]["versions"].tensor).item().decode()
    assert f"    TensorFlow: {tf.__version__}\n" in text
    text = tf.make_ndarray(tags["train"]["flags"].tensor).item().decode()
    # Indented, which Markdown shows as it is.
    flags = (trained.path / "flags.txt").read_text()
    assert text == textwrap.indent(flags, "    ")


def test_a_step_takes_as_long_in_all_places(trained):
    """In the last lines, in summary.json, and, step by step, in TensorBoard."""
    summary = summary_of(trained.path)
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
    lines = re.findall(r"^epoch (\d+)/4 done", trained.stdout, re.M)
    assert [int(each) for each in lines] == epochs
    assert run_.summary["epochs"] == EPOCHS
    count = keras.models.load_model(trained.path / "model.keras").count_params()
    assert run_.summary["parameters"] == run_.train.scalars["parameters"].last == count
    assert f"{count:,} parameters" in trained.stdout
    assert f"{count:,} parameters" in run_.train.texts["model"]


@pytest.mark.slow
def test_the_default_job_learns_the_digits(data_dir, tmp_path):
    done = run(
        *(f"--data_dir={data_dir}", f"--model_dir={tmp_path}", "--train_epochs=8")
    )
    assert ours(done) == []
    summary = summary_of(tmp_path)
    assert summary["val_accuracy"] >= 0.98
    assert len(summary["towers"]) == 2


def test_progress_bar(resumed):
    assert "Epoch 8/8" in resumed.stdout and "23/23" in resumed.stdout
    assert " examples/sec" in resumed.stdout
    assert "examples_per_sec" not in resumed.stdout
    assert "epoch 8/8 done" not in resumed.stdout


@pytest.mark.slow
def test_progress_bar_and_ctrl_c(tmp_path, monkeypatch):
    """As on a terminal, and by a signal, of which the program makes its exit code."""
    flags = *TWO_STEPS, "--batch_size=2", f"--model_dir={tmp_path}", "--train_epochs=3"
    stop = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: epoch and signal.raise_signal(signal.SIGINT)
    )
    make = callbacks.make
    monkeypatch.setattr(
        *(callbacks, "make"), lambda *args, **lines: [*make(*args, **lines), stop]
    )
    done = main_here(*flags, stdout=Terminal())
    assert done.returncode == 130
    saved = rf"is {tmp_path}/checkpoints/ckpt-(\d+)-(\d+); run again to continue\."
    (said,) = ours(done)
    epoch, batch = re.fullmatch(rf"Stopped by Ctrl-C: .* {saved}", said).groups()
    assert "Epoch 2/3" in done.stdout and "16/16" in done.stdout
    assert "examples_per_sec" not in done.stdout
    assert "epoch 1/3 done" not in done.stdout
    out = start_lines.text(assembled(*flags))
    assert continued(f"{out}\n", tmp_path, steps=16) == (int(epoch), int(batch))


@pytest.mark.slow
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
    assert "examples/sec" in shown and "examples_per_sec" not in shown
    assert "epoch 1/1000 done" not in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (
            [
                *("--model=mlp", "--optimizer=sgd", "--lr_schedule=cosine"),
                *("--steps_per_loop=5", "--log_steps=10", "--dtype=bf16"),
                *("--mix=mixup:0.2,cutmix:1", "--recipe=imagenet"),
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
                "--splits=train[:128],train[-9:]",
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
    summary = summary_of(tmp_path)
    assert summary["steps"] == steps
    assert np.isfinite(summary["val_loss"])
    assert ours(done) == []
    stopped = f"epoch 1/1 stopped, step {steps}/{steps}:" in done.stdout
    assert stopped == any("max_train_steps" in flag for flag in flags)
    if "--log_steps=10" in flags:  # no rate yet: these steps were the warm-up
        assert re.search(r"^step 10/\d+:(?!.*examples/sec)", done.stdout, re.M)


def test_split_ratios_and_loss_placement(tmp_path):
    ratios = "--split_ratios=2,3,3", "--loss_placement=gathered"
    job = assembled(*TWO_STEPS, f"--model_dir={tmp_path}", *ratios)
    said = start_lines.text(job)
    for tower, size in enumerate((4, 6, 6)):
        assert re.search(rf"^ +{tower} +/device:CPU:{tower} .* {size}$", said, re.M)
    assert job.parallel.builder.plan.split_ratios == (2, 3, 3)
    assert job.parallel.builder.context.loss_placement == "auto"


@pytest.mark.slow
def test_split_ratios_and_loss_placement_change_no_result(
    one_epoch, data_dir, tmp_path
):
    done = run(
        *(*ONE_EPOCH, f"--data_dir={data_dir}", f"--model_dir={tmp_path}"),
        *("--split_ratios=2,3,3", "--loss_placement=gathered"),
    )
    for tower, size in enumerate((16, 24, 24)):
        line = rf"^ +{tower} +/device:CPU:{tower} .* {size}$"
        assert re.search(line, done.stdout, re.M)
    even, uneven = summary_of(one_epoch), summary_of(tmp_path)
    for name in ("val_loss", "val_accuracy"):
        assert uneven[name] == pytest.approx(even[name], rel=1e-4)


def folder_flags(tmp_path):
    write_folder(tmp_path / "images", ant=12, bee=11)
    return (
        *(f"--dataset=folder:{tmp_path / 'images'}", "--image_size=8", "--model=mlp"),
        *(f"--model_dir={tmp_path / 'run'}", "--train_epochs=1", "--batch_size=8"),
    )


@pytest.mark.slow
def test_images_in_folders(tmp_path):
    data = assembled(*folder_flags(tmp_path)).data
    assert data.examples == 21  # two are held out
    # Without --deterministic, batches come in any order.
    in_order = data.open_training(deterministic=True)
    for batches, sizes in ((in_order, [8, 8, 5]), (data.evaluation, [2])):
        read = [images.shape[0] for images, _ in itertools.islice(batches, len(sizes))]
        assert read == sizes


@pytest.mark.slow
def test_a_run_of_images_in_folders(tmp_path):
    run_here(*folder_flags(tmp_path))
    summary = summary_of(tmp_path / "run")
    assert summary["steps"] == 3
    assert "val_accuracy" in summary


def table_flags(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 90), ("test", 30)):
        rows = rng.normal(size=[count, 3])
        labels = (rows[:, 0] > rows[:, 1]).astype(int)
        lines = [
            f"{a},{b},{c},{y}\n" for (a, b, c), y in zip(rows, labels, strict=True)
        ]
        (tmp_path / f"{split}.csv").write_text("a,b,c,label\n" + "".join(lines))
    return (
        *(f"--dataset=csv:{tmp_path}/*.csv", "--model=mlp", "--batch_size=16"),
        *(f"--model_dir={tmp_path / 'run'}", "--train_epochs=8"),
        "--learning_rate=0.02",
    )


@pytest.mark.slow
def test_rows_of_numbers(tmp_path):
    job = assembled(*table_flags(tmp_path))
    said = "90 rows of 3 numbers to train on, 2 classes"
    assert said in start_lines.text(job)
    assert job.model.input_shape == (None, 3)


@pytest.mark.slow
def test_a_run_on_rows_of_numbers(tmp_path):
    run_here(*table_flags(tmp_path))
    assert summary_of(tmp_path / "run")["val_accuracy"] > 0.9


@pytest.mark.slow
def test_where_examples_are_kept_changes_no_result(one_epoch, data_dir, tmp_path):
    # The first epoch, which comes into memory, has the order of the files.
    flags = *ONE_EPOCH, f"--data_dir={data_dir}"
    run(*flags, f"--model_dir={tmp_path / 'none'}", "--cache=none")
    ours, theirs = summary_of(tmp_path / "none"), summary_of(one_epoch)
    assert ours["val_loss"] == theirs["val_loss"]
    # What is on a disk is read in a full shuffle.
    disk = (f"--cache=disk:{tmp_path}/cache",)
    done = run(*flags, f"--model_dir={tmp_path / 'disk'}", *disk)
    assert f"112.3 KB of pixels kept in {tmp_path}/cache." in done.stdout
    assert summary_of(tmp_path / "disk")["val_accuracy"] > 0.5


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
        losses.append(summary_of(path)["val_loss"])
    assert losses[0] == losses[1]
    del worker, dispatcher
