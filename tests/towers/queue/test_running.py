"""Queues of real runs: that they fail, are killed, and go on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from tests import warm
from tests.limits import HANG_S
from tests.towers.monitoring.test_tensorboard import Board
from towers.processes.strays import Strays
from towers.queue import record

ROOT = Path(__file__).parents[3]
QUEUE = sys.executable, "-m", "towers.queue"
QUICKLY = "--variable_update=parameter_server", "--model=mlp"
TWO_STEPS = (*QUICKLY, "--dataset=synthetic:4x4x1:3:32", "--batch_size=16")
# 23 steps an epoch, and a checkpoint every few of them.
REPEATABLE = (
    *(*QUICKLY, "--dataset=synthetic:4x4x1:3:1472", "--deterministic"),
    *("--train_epochs=20", "--save_every=5", "--log_steps=10", "--num_gpus=1"),
)
# What the queue gives each run of a machine with at least two cores.
CORES = len(os.sched_getaffinity(0))
THREADS = {
    "TF_NUM_INTRAOP_THREADS": str(max(1, CORES // 2)),
    "TF_NUM_INTEROP_THREADS": str(max(1, CORES // 2)),
}
BAD_MODEL = """
import keras

class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise RuntimeError("my own mistake")

def build(input_shape, num_classes):
    return keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(num_classes)])

def callbacks():
    return [Fails()]
"""


def queue(*flags, code=0):
    """Runs a queue to its end, which has to be with this exit code."""
    done = warm.run("towers.queue", "--noray_tune", "--devices=2", *flags)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def start(*flags, **options):
    """Starts a queue as users do."""
    return subprocess.Popen(
        [*QUEUE, "--noray_tune", "--devices=2", *map(str, flags)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
    )


def wait_for(condition, process=None):
    """Waits for a condition, which `process` is to bring about while it runs."""
    limit = time.monotonic() + HANG_S
    while not (found := condition()):
        ended = process is not None and process.poll() is not None
        assert not ended, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.02)
    return found


def left(queue_dir):
    """The processes that a queue has started and that still run."""
    mark = json.loads((queue_dir / "queue.json").read_text())["mark"]
    return Strays(mark, record.MARK).processes()


def weights(model_dir):
    model = keras.models.load_model(model_dir / "model.keras")
    return [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]


@pytest.mark.slow
def test_a_sweep_and_what_tensorboard_shows_of_it(tmp_path):
    sweep = (
        *("--sweep=clip_norm=1,2", f"--queue_dir={tmp_path}/q"),
        *(*TWO_STEPS, "--train_epochs=2", "--log_steps=1"),
    )
    done = queue(*sweep)
    assert "2 runs on CPU 0, CPU 1." in done.stderr
    assert "clip_norm=1: finished, val_accuracy" in done.stderr
    assert done.stdout.count("finished") == 2
    assert f"tensorboard --logdir {tmp_path}/q" in done.stdout
    board = Board(tmp_path / "q")
    # The flags by which they differ are among the first ones, which are shown.
    assert "clip_norm" in [each.name for each in board.experiment().hparam_infos[:5]]
    sessions = board.sessions()
    assert {hparams["clip_norm"] for hparams, _ in sessions.values()} == {1.0, 2.0}
    for name, (_, metrics) in sessions.items():
        folder = tmp_path / "q" / name.partition(" in ")[0]
        summary = json.loads((folder / "summary.json").read_text())
        for metric in ("loss", "accuracy"):
            found = metrics[f"validation {metric}"]
            assert found == pytest.approx(summary[f"val_{metric}"], abs=1e-4)
    # Nothing is left to do.
    logs = [*(tmp_path / "q").glob("*/output.log")]
    before = [path.read_text() for path in logs]
    again = queue(*sweep)
    assert "0 runs on CPU 0, CPU 1; 2 runs finished before." in again.stderr
    assert again.stdout == done.stdout
    assert [path.read_text() for path in logs] == before


@pytest.fixture
def eight(tmp_path):
    """Files of flags: two of the runs fail while they train."""
    rows = [f"{k},{k % 7},{'ab'[k % 2]}" for k in range(400)]
    rows[300] = "what,3,a"
    (tmp_path / "bad.csv").write_text("\n".join(["x,y,label", *rows]) + "\n")
    (tmp_path / "mine.py").write_text(BAD_MODEL)
    flags = {
        "1_good": ["--seed=1"],
        "2_bad_data": [f"--dataset=csv:{tmp_path}/bad.csv"],
        "3_good": ["--seed=3"],
        "4_bad_model": [f"--model={tmp_path}/mine.py"],
        "5_good": ["--seed=5", "--optimizer=sgd"],
        **{f"{k}_good": [f"--seed={k}"] for k in (6, 7, 8)},
    }
    for name, own in flags.items():
        path = tmp_path / f"{name}.flags"
        path.write_text("\n".join([*REPEATABLE, *own]) + "\n")
    return sorted(tmp_path.glob("*.flags"))


@pytest.mark.slow
def test_a_killed_queue_goes_on_with_the_same_bits(tmp_path, eight, monkeypatch):
    folder = tmp_path / "q"
    command = (*eight, f"--queue_dir={folder}")

    def finished():
        return {path.parent.name for path in folder.glob("*/summary.json")}

    def interrupted():
        """Good runs that have saved, and are not finished."""
        saved = {path.parts[-3] for path in folder.glob("*/checkpoints/ckpt-*-*")}
        return {name for name in saved if "good" in name} - finished()

    killed = start(*command)
    wait_for(lambda: len(finished()) >= 2 and interrupted(), killed)
    assert left(folder)
    killed.kill()
    killed.communicate()
    # Nobody trains on without a queue.
    wait_for(lambda: not left(folder))
    before, go_on = finished(), interrupted()
    assert go_on and len(before) >= 2
    logs = {name: (folder / name / "output.log").read_text() for name in before}

    done = queue(*command, code=1)
    good = {path.stem for path in eight if "good" in path.stem}
    assert finished() == good
    assert "2 of 8 runs failed: 2_bad_data, 4_bad_model; start the" in done.stderr
    (data,) = [line for line in done.stdout.splitlines() if "2_bad_data" in line]
    assert "bad.csv" in data and "what" in data
    (model,) = [line for line in done.stdout.splitlines() if "4_bad_model" in line]
    assert "RuntimeError: my own mistake (see" in model
    for name, text in logs.items():
        assert (folder / name / "output.log").read_text() == text
    for name in go_on:
        log = (folder / name / "output.log").read_text()
        assert log.index("Stopped by SIGTERM") < log.index("Continuing from")

    for name, value in THREADS.items():
        monkeypatch.setenv(name, value)
    for name in sorted(good):
        alone = tmp_path / "alone" / name
        own = f"--flagfile={tmp_path}/{name}.flags"
        train = warm.run(*("towers.train", own, f"--model_dir={alone}"))
        assert train.returncode == 0, train.stderr
        for a, b in zip(weights(alone), weights(folder / name), strict=True):
            np.testing.assert_array_equal(a, b)


def test_ctrl_c_has_all_save(tmp_path):
    folder = tmp_path / "q"
    command = (
        *(*REPEATABLE, "--sweep=seed=1,2,3", f"--queue_dir={folder}"),
        "--train_epochs=9999",
    )
    process = start(*command)
    wait_for(lambda: len([*folder.glob("*/checkpoints/ckpt-*-*")]) >= 2, process)
    second = start(*command)
    assert "Another queue runs in" in second.communicate(timeout=HANG_S)[1]
    assert second.returncode == 1
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert "Stopping: the runs save." in err
    assert err.splitlines()[-1] == (
        "towers.queue: Stopped by Ctrl-C: 3 runs: 2 stopped, 1 waiting. Start the same "
        "command again to continue."
    )
    assert [line.split()[1] for line in out.splitlines()[1:4]] == [
        *("stopped", "stopped", "waiting")
    ]
    assert not left(folder)
    for log in folder.glob("*/output.log"):
        assert "Stopped by SIGTERM" in log.read_text()


@pytest.mark.slow
def test_a_run_whose_folder_is_gone_ends_no_other(tmp_path):
    folder = tmp_path / "q"
    process = start(*REPEATABLE, "--sweep=seed=1,2", f"--queue_dir={folder}")
    # It saves 91 times more, so that it does not end before it finds nothing there.
    wait_for(lambda: [*folder.glob("seed=1/checkpoints/ckpt-*-*")], process)
    # At once. To remove it file by file fails where the run adds one meanwhile.
    (folder / "seed=1").rename(tmp_path / "gone")
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1, err
    assert "1 of 2 runs failed: seed=1; start the same command" in err
    assert [line.split()[1] for line in out.splitlines()[1:3]] == ["failed", "finished"]
