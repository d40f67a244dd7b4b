"""Runs of towers.train, for its tests."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from PIL import Image

from tests import warm
from tests.limits import HANG_S
from towers.input_pipeline.sources.targets import Target
from towers.train import __main__ as train
from towers.train import checks
from towers.train import flags as train_flags
from towers.train import run as train_run
from towers.train.job import assemble
from towers.train.parts import setup as setup_parts
from towers.train.parts.facts import DataFacts
from towers.train.settings import Settings

ROOT = Path(__file__).parents[3]
# Of an epoch of the digits, or of as many batches: 1,437 images at 64 a batch.
STEPS = 23
# Of the run that most tests look at.
EPOCHS = 4
# Trying others takes seconds, in each run.
QUICKLY = ("--variable_update=parameter_server",)
# The seed is also that of the data.
SYNTHETIC = ("--dataset=synthetic:4x4x1:3:1472", "--model=mlp", "--seed=3")
# Small, deterministic, and never done before it is killed.
REPEATABLE = (
    *(*SYNTHETIC, "--deterministic", "--train_epochs=8"),
    *("--save_every=5", "--log_steps=10"),
)
# Of two batches, for where the data are not the point.
TWO_STEPS = ("--dataset=synthetic:4x4x1:3:32", "--batch_size=16", "--model=mlp")
# With --cache=memory, which is what --cache=auto comes to.
ONE_EPOCH = ("--model=mlp", "--deterministic", "--train_epochs=1", "--cache=memory")
# What programs make a sentence of while they set up.
BAD = ValueError, OSError, tf.errors.OpError


def start(*flags, program=("-m", "towers.train"), gpus="", **options):
    """Starts a run that sees these GPUs, whose output can be read line by line."""
    return subprocess.Popen(
        [sys.executable, *program, *map(str, (*QUICKLY, *flags))],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        text=True,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "PYTHONUNBUFFERED": "1"},
    )


def finish(process):
    """Waits for a run; its exit code, output and errors."""
    out, err = process.communicate(timeout=HANG_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(*flags, code=0):
    """Runs to the end, which has to be with this exit code."""
    done = warm.run("towers.train", *QUICKLY, *flags)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def read_settings(*flags):
    """The settings of a command line, checked as a program checks them."""
    argv = ["towers.train", *map(str, (*QUICKLY, *flags))]
    return checks.check_model_dir(train_flags.read(argv, "What it is for."))


def assembled(*flags):
    """The job of a command line, in this process."""
    # Operations would be deterministic for good; here, only the data are.
    with mock.patch.object(tf.config.experimental, "enable_op_determinism"):
        return assemble(read_settings(*flags))


def run_here(*flags):
    """Runs to the end in this process: what needs no signal and no exit code."""
    job = assembled(*flags)
    with job.data.blaming():
        train_run.run(job)


def setup(settings=None, shape=(4,), size=3, kind="class", target_shape=()):
    """What a run is about, of data of some shape."""
    settings = settings or Settings(dataset="digits")
    facts = DataFacts(
        *("x", "image" if len(shape) == 3 else "row"),
        keras.KerasTensor((None, *shape)),
        Target(kind, size),
        target_shape,
    )
    return setup_parts.of(settings, facts, None)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def heard(function, *args, stdout=None):
    """Calls a function; what it returned, as an exit code, and what it said."""
    out, err = stdout or io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = function(*args)
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def main_here(*flags, **options):
    """Runs as the program does, in this process, whose signals stay as they were."""
    signals = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(each) for each in signals]
    try:
        with mock.patch.object(tf.config.experimental, "enable_op_determinism"):
            return heard(train.main, read_settings(*flags), **options)
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


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


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def first_done(out):
    """The number of the first epoch that a run finished."""
    return int(re.search(r"^epoch (\d+)/\d+ done", out, re.M)[1])


def continued(out, path, steps=STEPS):
    """The epoch and the batch after which a run says that it goes on."""
    found = re.search(
        rf"^Continuing from {path}/checkpoints/ckpt-(\d+)-(\d+): after epoch \1"
        r"(?: and \2 batch(?:es)?)?, step (\d+)\.$",
        out,
        re.M,
    )
    epoch, batch, step = map(int, found.groups())
    assert step == epoch * steps + batch
    return epoch, batch


def break_checkpoints(path, *numbers):
    for number in numbers:
        broken = path / f"checkpoints/ckpt-{number}-0/variables.data-00000-of-00001"
        broken.write_bytes(broken.read_bytes()[:-1000])
