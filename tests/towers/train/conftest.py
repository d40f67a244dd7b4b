"""Runs that tests of towers.train share."""

import shutil
import signal

import pytest

from tests import once
from tests.towers.train.runs import (
    EPOCHS,
    ONE_EPOCH,
    REPEATABLE,
    SYNTHETIC,
    Terminal,
    finish,
    heard,
    main_here,
    png,
    run,
    run_here,
    start,
    wait_for,
    write_folder,
    write_tfrecord,
)
from towers import input_pipeline

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


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """The digits, written once; tests must not change them."""

    def make(path):
        input_pipeline.open_source("digits", data_dir=path).prepare()
        return path

    return once.make(tmp_path_factory, "data", make)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A finished run of the digits; not to be changed."""

    def make(folder):
        path = folder / "run"
        # A data_dir of its own, so that this run has to write the digits, too.
        flags = f"--data_dir={folder / 'data'}", f"--model_dir={path}", "--log_steps=50"
        done = main_here(*flags, "--model=mlp", f"--train_epochs={EPOCHS}")
        assert done.returncode == 0, done.stderr
        done.path = path
        return done

    return once.make(tmp_path_factory, "trained", make)


@pytest.fixture(scope="session")
def killed(tmp_path_factory):
    """A deterministic run, in a process that was killed; not to be changed."""

    def make(folder):
        path = folder / "run"
        process = start(*REPEATABLE, f"--model_dir={path}")
        wait_for(process, "step 30/184")
        process.kill()
        done = finish(process)
        assert done.returncode == -signal.SIGKILL
        assert not (path / "model.keras").exists()
        done.path = path
        return done

    return once.make(tmp_path_factory, "killed", make)


@pytest.fixture(scope="session")
def resumed(killed, tmp_path_factory):
    """That run to its end, with its flags, on a terminal; not to be changed."""

    def make(path):
        shutil.copytree(killed.path, path, dirs_exist_ok=True)
        (path / "not_finite.npz").touch()
        flags = f"--flagfile={killed.path / 'flags.txt'}", f"--model_dir={path}"
        done = heard(run_here, *flags, stdout=Terminal())
        done.path = path
        return done

    return once.make(tmp_path_factory, "resumed", make)


@pytest.fixture(scope="session")
def worse(resumed, tmp_path_factory):
    """A run that went on after that, and got worse; not to be changed."""

    def make(path):
        shutil.copytree(resumed.path, path, dirs_exist_ok=True)
        done = heard(
            *(run_here, f"--model_dir={path}", *SYNTHETIC),
            *("--train_epochs=9", "--learning_rate=1", "--batch_size=32"),
            *("--split_ratios=2,3,3", "--loss_placement=gathered"),
        )
        done.path = path
        return done

    return once.make(tmp_path_factory, "worse", make)


@pytest.fixture(scope="session")
def one_epoch(data_dir, tmp_path_factory):
    """The model_dir of a deterministic run of one epoch; not to be changed."""

    def make(path):
        done = run(*ONE_EPOCH, f"--data_dir={data_dir}", f"--model_dir={path}")
        assert "112.3 KB of pixels kept in memory." in done.stdout
        return path

    return once.make(tmp_path_factory, "one_epoch", make)


@pytest.fixture(scope="session")
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
