"""Ray Tune, really: a cluster on this machine, where Ray is installed."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from tests.limits import HANG_S
from tests.towers.launch.ray_cluster import Cluster
from tests.towers.queue.test_running import (
    BAD_MODEL,
    QUEUE,
    REPEATABLE,
    TWO_STEPS,
    left,
    wait_for,
)
from towers.processes.strays import Strays

pytestmark = pytest.mark.slow
pytest.importorskip("ray")


@pytest.fixture(scope="module")
def environ():
    """Starts a cluster; returns the environment of who uses it."""
    with contextlib.closing(Cluster(cpus=2)) as one:
        yield one.environ


@pytest.fixture
def alone():
    """The environment of a queue that starts a cluster of its own, and its mark."""
    strays = Strays(name="TEST_OF_A_QUEUE")
    environ = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    hidden = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": "-1"}
    yield {**environ, **hidden, "RAY_ADDRESS": "local", **strays.mark}, strays
    strays.end(0)


def start(environ, *flags):
    return subprocess.Popen(
        [*QUEUE, "--ray_tune", *map(str, flags)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def saved(folder):
    """The runs that have a checkpoint."""
    return {path.parts[-3] for path in folder.glob("*/checkpoints/ckpt-*-*")}


def test_a_scheduler_prunes_a_run(alone, tmp_path):
    environ, _ = alone
    # The worse of two, one after the other.
    command = (
        *(*TWO_STEPS, "--sweep=learning_rate=1e-3,9", f"--queue_dir={tmp_path}/q"),
        *("--train_epochs=6", "--devices=1", "--scheduler=asha:val_loss"),
    )
    process = start(environ, *command)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    assert "learning_rate=9: pruned, val_accuracy" in err
    *_, good, pruned, _ = out.splitlines()
    assert good.split()[1:3] == ["finished", "12"]
    assert pruned.split()[1:3] == ["pruned", "2"]
    log = (tmp_path / "q" / "learning_rate=9" / "output.log").read_text()
    assert "Stopped by SIGTERM: the last checkpoint is" in log
    # A run without the metric is told before all have trained for nothing.
    other = [*command[:-1], "--scheduler=asha:min:val_f1"]
    process = start(environ, *other)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert "=asha:min:val_f1, but the runs report accuracy, loss, val_acc" in err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_to_a_group_ends_rays_processes(alone, tmp_path, number, code):
    environ, strays = alone
    folder = tmp_path / "q"
    process = start(
        environ,
        *(*REPEATABLE, "--sweep=seed=1,2,3", f"--queue_dir={folder}", "--devices=2"),
        "--train_epochs=9999",
    )
    wait_for(lambda: len(saved(folder)) == 2, process)
    # A terminal sends Ctrl-C to a group, and systemd SIGTERM, which ends Ray at once.
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == code, err
    assert ": 3 runs: 2 stopped, 1 waiting." in err.splitlines()[-1]
    assert [line.split()[1] for line in out.splitlines()[1:4]] == [
        *("stopped", "stopped", "waiting")
    ]
    wait_for(lambda: not strays.processes())
    if number == signal.SIGINT:
        for log in folder.glob("*/output.log"):
            assert "Stopped by SIGTERM: the last checkpoint is" in log.read_text()


def test_a_killed_queue_leaves_no_process(alone, tmp_path):
    environ, strays = alone
    folder = tmp_path / "q"
    process = start(
        environ,
        *(*REPEATABLE, "--sweep=seed=1,2", f"--queue_dir={folder}", "--devices=2"),
        "--train_epochs=9999",
    )
    wait_for(lambda: len(saved(folder)) == 2, process)
    assert left(folder)
    process.kill()
    process.communicate()
    wait_for(lambda: not strays.processes())


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
    wait_for(lambda: len(saved(folder)) == 2)
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
    wait_for(lambda: len(saved(folder)) == 2)
    process.kill()
    process.communicate()
    wait_for(lambda: not left(folder))
