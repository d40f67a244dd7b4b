"""Ray Tune, really: a cluster on this machine, where Ray is installed."""

import contextlib
import signal
import subprocess
import sys

import pytest

from tests.limits import HANG_S
from tests.towers.launch.ray_cluster import Cluster
from tests.towers.queue.test_running import (
    BAD_MODEL,
    REPEATABLE,
    TWO_STEPS,
    left,
    wait_for,
)

pytestmark = pytest.mark.slow
pytest.importorskip("ray")


@pytest.fixture(scope="module")
def environ():
    """Starts a cluster; returns the environment of who uses it."""
    with contextlib.closing(Cluster(cpus=2)) as one:
        yield one.environ


def start(environ, *flags):
    return subprocess.Popen(
        [sys.executable, "-m", "towers.queue", "--ray_tune", *map(str, flags)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_runs_end_and_fail_on_ray(environ, tmp_path):
    (tmp_path / "mine.py").write_text(BAD_MODEL)
    command = (
        *(*TWO_STEPS, f"--sweep=model=mlp,{tmp_path}/mine.py"),
        *("--train_epochs=2", f"--queue_dir={tmp_path}/q"),
    )
    process = start(environ, *command)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert "model=mlp: running on node 127.0.0." in err
    assert "Traceback" not in err
    assert "1 of 2 runs failed: model=" in err
    good, bad = out.splitlines()[-3:-1]
    assert good.split()[1] == "finished"
    assert "RuntimeError: my own mistake (see" in bad
    again = start(environ, *command).communicate(timeout=HANG_S)[1]
    assert "1 run on Ray, 2 devices at once; 1 run finished before." in again


def test_a_signal_has_the_runs_on_ray_save(environ, tmp_path):
    folder = tmp_path / "q"
    command = (
        *(*REPEATABLE, "--sweep=seed=1,2,3", f"--queue_dir={folder}"),
        "--train_epochs=9999",
    )
    process = start(environ, *command)
    wait_for(lambda: len([*folder.glob("*/checkpoints/ckpt-*-*")]) >= 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err
    assert "3 runs: 2 stopped, 1 waiting. Start the same command again" in err
    assert not left(folder)


def test_the_runs_of_a_killed_queue_end_on_ray(environ, tmp_path):
    folder = tmp_path / "q"
    process = start(
        environ,
        *(*REPEATABLE, "--sweep=seed=1,2", f"--queue_dir={folder}"),
        "--train_epochs=9999",
    )
    wait_for(lambda: len([*folder.glob("*/checkpoints/ckpt-*-*")]) >= 2)
    process.kill()
    process.communicate()
    wait_for(lambda: not left(folder))
