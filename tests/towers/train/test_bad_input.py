"""Bad input ends towers.train: one sentence, exit code 1, and nothing written."""

import json
import os
import re
import shutil
import signal
import textwrap

import pytest
import tensorflow as tf

from tests.towers.train.runs import (
    BAD,
    TWO_STEPS,
    assembled,
    assert_same_bits,
    finish,
    main_here,
    ours,
    png,
    run,
    run_here,
    start,
    weights,
    write_tfrecord,
)
from tests.variants import slow
from towers import input_pipeline
from towers.numerics.errors import NotFinite
from towers.train import __main__ as train
from towers.train.settings import Settings


def fork(*flags):
    return run(*flags, code=1)


def check_bad(done, words, model_dir):
    (said,) = ours(done)
    for word in words:
        assert word in said
    assert "Traceback" not in done.stderr
    assert not done.stdout.startswith("epoch")
    assert not os.path.exists(model_dir)


def test_bad_input_ends_the_program(tmp_path):
    """Before TensorFlow is imported, which takes long."""
    model_dir = tmp_path / "run"
    done = finish(start(f"--model_dir={model_dir}", "--model=resnet21"))
    assert done.returncode == 1
    check_bad(done, ["resnet21", "resnet20"], model_dir)


@pytest.mark.parametrize("starts", [main_here, slow(fork)])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        # Found in the data.
        (
            "--dataset=tfrecord:{made}/corrupt.tfrecord --image_size=8 --num_classes=2",
            ["{made}/corrupt.tfrecord", "record 4", "byte offset", "corrupted"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_found_later_ends_the_program(made, tmp_path, starts, flags, words):
    model_dir = tmp_path / "run"
    done = starts(f"--model_dir={model_dir}", *flags.format(made=made).split())
    assert done.returncode == 1
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
        (
            "--dataset=folder:{made}/images",
            ["nothing says that all are", "--image_size=8x8"],
        ),
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
            "--stages=2 --num_gpus=3",
            ["--stages=2", "3 devices", "divides"],
        ),
        (
            "--stages=2 --placement=dense=1",
            ["names no stage for conv2d", "add them"],
        ),
        (
            "--batch_size=3 --num_gpus=4",
            ["--batch_size=3", "4 towers", "1 would get no", "--num_gpus"],
        ),
        (
            "--batch_size=3 --num_gpus=2 --micro_batches=2",
            ["--batch_size=3 for 4 micro-batches of all towers, of which 1 would get"],
        ),
        (
            "--all_reduce_alg=nccl --variable_update=replicated --num_gpus=2",
            ["all_reduce_alg='nccl'", "GPU"],
        ),
        (
            "--dataset=folder:{made}/images --group_by_length --image_size=8",
            ["--group_by_length, but folder:{made}/images has no rows of tokens"],
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


def test_gpus_that_do_not_exist(monkeypatch, capsys, tmp_path):
    gpus = [
        tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)
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


@pytest.mark.slow
def test_a_seed_that_the_model_does_not_hold_is_named(tmp_path, capsys):
    """It trains: Keras's global seed is read and changed as on one device."""
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
    run_here(
        *(*TWO_STEPS, "--train_epochs=1", f"--model_dir={tmp_path / 'run'}"),
        f"--model={tmp_path / 'mine.py'}:build",
    )
    said = capsys.readouterr().err
    assert (
        said.count("so that checkpoints do not contain it; make it an attribute") == 1
    )


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("folder:{made}/broken_image", ["{made}/broken_image/bee/01.png"]),
        ("tfrecord:{made}/image.tfrecord", ["{made}/image.tfrecord", "record 5"]),
    ],
)
def test_corrupt_image(made, tmp_path, dataset, words):
    with pytest.raises(input_pipeline.BadRecordError) as caught:
        run_here(
            *(f"--dataset={dataset.format(made=made)}", "--image_size=8"),
            *("--model=mlp", f"--model_dir={tmp_path}", "--max_train_steps=8"),
        )
    for word in words:
        assert word.format(made=made) in str(caught.value)


@pytest.mark.slow
def test_corrupt_record(data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path / "data")
    shard = sorted((tmp_path / "data").rglob("*train.tfrecord*"))[1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 255
    shard.write_bytes(content)
    said = rf"{shard}: record \d+ \(byte offset \d+\): corrupted"
    with pytest.raises(input_pipeline.BadRecordError, match=said):
        run_here(
            *(f"--data_dir={tmp_path / 'data'}", f"--model_dir={tmp_path / 'run'}"),
            *("--model=mlp", "--train_epochs=1"),
        )


def test_bad_rows_are_passed_over(tmp_path, capsys):
    rows = [f"{k % 7},{k % 3},{'ab'[k % 2]}\n" for k in range(24)]
    # One is too short, and in another a number is missing.
    (tmp_path / "a.csv").write_text("".join(["x,y,z\n", *rows, "1\n", ",1,a\n"]))
    (tmp_path / "b.csv").write_text("".join(["x,y,z\n", *rows, "1,a\n"]))
    flags = (
        *(f"--dataset=csv:{tmp_path}/a.csv", f"--eval_dataset=csv:{tmp_path}/b.csv"),
        *(f"--model_dir={tmp_path}/run", "--bad_records=skip", "--model=mlp"),
        *("--batch_size=5", "--eval_steps=2", "--train_epochs=4", "--learning_rate=0"),
        *("--early_stopping=1", "--clean", "--log_csv"),
    )
    earlier = tmp_path / "run/train/events.out.tfevents.1"
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    run_here(*flags)
    # Long lines are wrapped.
    said = " ".join(capsys.readouterr().out.split())
    file = tmp_path / "run/bad_records.json"
    assert f"Bad records: 2 passed over, listed in {file}." in said
    assert "Where a number is missing ('x'), the mean of its column stands, and" in said
    assert "b.csv: 24 examples, of which the first 10 at most are evaluated." in said
    assert "Data csv:" in said and "25 rows of 3 numbers to train on, 2 classes" in said
    # Nothing is learnt.
    assert "Stopped early: val_loss has not been better for 1 epoch." in said
    assert (tmp_path / "run/log.csv").read_text().count("\n") == 3
    assert not earlier.exists()
    ours, theirs = (each["bad"] for each in json.loads(file.read_text()))
    assert [ours["train"][0]["place"], theirs["train"][0]["place"]] == ["line 26"] * 2
    loss = json.loads((tmp_path / "run/summary.json").read_text())["val_loss"]
    run_here(*flags[:-2], "--eval_only")
    assert f"validation loss {loss:.4f}" in capsys.readouterr().out.splitlines()[-1]


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
        *("--cache=none", "--shuffle_mb=0", "--save_every=5"),
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
    (events,) = (tmp_path / "first" / "train").glob("events.out.tfevents.*.v2")
    values = {
        value.tag: tf.make_ndarray(value.tensor)
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
    }
    assert values["bad_records"] == 1
    few = run(*skip, f"--model_dir={tmp_path}/few", "--bad_records=skip:0", code=1)
    assert "more bad records than the 0" in ours(few)[0]
