"""Hosts that come and go on Ray, really: nodes that die, and new ones."""

import contextlib
import json
import re
import signal
import sys
import threading

import numpy as np
import psutil
import pytest

from tests.limits import HANG_S
from tests.towers.elastic import fits, test_hosts
from tests.towers.elastic.test_hosts import ALL, MIDDLE, SMOOTH, kill, until, write
from tests.towers.launch.launching import ROOT, launch
from tests.towers.launch.ray_cluster import Cluster
from tests.towers.train import runs
from towers.program.ending import ANOTHER_FAILED

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    """A cluster with a node that has no place for hosts, so that others may die."""
    with contextlib.closing(Cluster(cpus=0)) as one:
        yield one


@pytest.fixture
def nodes(cluster):
    """Starts nodes, which end with the test."""
    yield cluster.start
    cluster.end_others()


class Run(test_hosts.Run):
    """Launchers one after another, whose hosts Ray places."""

    def __init__(self, folder, environ, **options):
        super().__init__(folder, **options)
        self.environ = {**environ}

    def start(self, hosts, *words, steps=ALL):
        self.allow(steps)
        self._launched += 1
        self._seen = -1
        script = "tests.towers.elastic.fits"
        script = "-m", script, str(self.folder), json.dumps(self.options)
        # Hosts have their environment from Ray.
        of_test = f"TOWERS_TEST_LAUNCHER={self._launched}", "TF_CPP_MIN_LOG_LEVEL=3"
        script = "env", *of_test, sys.executable, *script
        self.launch(f"--hosts={hosts}", *words, "--", *script)

    def launch(self, *words):
        process = launch("--launcher=ray", *words, environ=self.environ, cwd=ROOT)
        self.process = self._opened.enter_context(process)
        for stream in (self.process.stdout, self.process.stderr):
            reader = threading.Thread(target=self.said.extend, args=[stream])
            reader.start()
            self._opened.callback(reader.join)
        # Only where a test has failed does it run still.
        self._opened.callback(self.process.kill)


@pytest.fixture
def run(cluster, tmp_path):
    one = Run(tmp_path, cluster.environ)
    yield one
    one.close()


def with_actors(pids):
    """The processes of hosts, and of the actors that have started them."""
    hosts = [psutil.Process(pid) for pid in pids]
    return [*hosts, *(each.parent() for each in hosts)]


def have_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=HANG_S)
    return not alive


# One is lost.


@pytest.mark.parametrize("victim", [0, 1])
def test_one_is_killed_and_another_one_takes_its_place(run, nodes, victim):
    nodes(2)
    run.start("1:2", steps=5)
    before = run.begin(0, 1)
    # Just now, they train.
    run.allow(MIDDLE)
    kill(before[victim])
    run.says(
        rf"Host {victim} \(pid {before[victim]}\) failed: SIGKILL; it starts again in 1"
    )
    assert run.begin(1 - victim).items() < before.items()
    after = run.begin(0, 1)
    assert after[1 - victim] == before[1 - victim]
    assert after[victim] != before[victim]
    run.finish()


def test_the_actor_of_one_is_killed(run, nodes):
    """Its host ends with it, and what that has started; Ray is not to blame."""
    nodes(2)
    run.start("1:2", steps=10)
    before = run.begin(0, 1)
    victim, actor = with_actors([before[1]])
    actor.kill()
    assert have_gone([victim])
    run.says(r"Host 1 \(pid \d+\) failed: Ray has lost it \(.+\); it starts again in 1")
    run.begin(0)
    assert run.begin(0, 1)[0] == before[0]
    run.finish()


def test_a_node_dies_and_a_new_one_comes(run, nodes):
    both = nodes(1, 1)
    run.start("1:2", "--placement_strategy=SPREAD", steps=10)
    before = run.begin(0, 1)
    run.step(10)
    gone = both[0]
    (victim,) = (slot for slot, pid in before.items() if gone.has(pid))
    processes = with_actors([before[victim]])
    gone.kill()
    assert have_gone(processes)
    assert run.begin(1 - victim).items() < before.items()
    run.step(20)
    run.says(rf"Host {victim} \(pid \d+\) failed: Ray has lost its node; it starts")
    nodes(1)
    after = run.begin(0, 1)
    assert after[1 - victim] == before[1 - victim]
    run.finish()


def test_one_that_keeps_failing_is_left_out(run, nodes):
    (run.folder / "fails-1").write_text("9")
    nodes(3)
    run.start("1:3", steps=10)
    run.says(
        r"Host 1 \(pid \d+\) failed: exit code 9, 3 times running; it is left out, "
        "and 2 hosts may go on"
    )
    run.begin(0, 2)
    run.finish()
    assert {each["slot"] for each in run.lines()} == {0, 2}


def test_the_program(run, nodes, tmp_path):
    nodes(2)
    (tmp_path / "smooth.py").write_text(SMOOTH)
    flags = "--dataset=synthetic:4x4x1:3:1472", "--deterministic"
    flags += (f"--model={tmp_path}/smooth.py",)
    flags += "--variable_update=parameter_server", "--num_gpus=1", "--train_epochs=60"
    alone, folder = tmp_path / "alone", tmp_path / "run"
    runs.run(*flags, f"--model_dir={alone}")
    run.launch("--hosts=1:2", "--", *flags, f"--model_dir={folder}")
    run.says("epoch 2/")
    kill(_hosts_of(folder)[1])
    run.end()
    found, expected = (runs.summary_of(each) for each in (folder, alone))
    for name in ("val_loss", "val_accuracy"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)
    for ours, theirs in zip(*map(runs.weights, (folder, alone)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    generations = found["generations"]
    assert [len(each["towers"]) for each in generations][:2] == [2, 1], generations
    assert all(each["steps_lost"] == 0 for each in generations), generations


def _hosts_of(folder):
    """The processes of the program that train in a folder, by their slots."""
    found = {}
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if f"--model_dir={folder}" in each.cmdline():
                if slot := each.environ().get("TOWERS_SLOT"):
                    found[int(slot)] = each.pid
    return found


# Places.


def test_those_that_are_placed_begin(run, nodes):
    """One that still waits for a place when the others are done does not hold them."""
    nodes(2)
    run.start("1:3", "--fail_seconds=5")
    run.end()
    assert {each["hosts"] for each in run.lines()} == {2}
    run.check()


def test_a_file_says_how_many_are_wanted(run, nodes):
    nodes(2)
    file = run.folder / "hosts"
    file.write_text("1")
    run.start("1:2", f"--host_file={file}", steps=10)
    first = run.begin(0)
    run.step(10)
    write(file, "2")
    more = run.begin(0, 1)
    assert first.items() < more.items()
    run.step(20)
    actors = with_actors([more[1]])
    write(file, "1")
    assert run.begin(0) == first
    run.says(rf"Host 1 \(pid {more[1]}\) has left\.")
    assert have_gone(actors)
    run.finish()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--num_cpus=9", "--join_seconds=3"), "0 hosts are ready after 3 s"),
        (("--join_seconds=40",), r"1 host is ready \(.*\) after 40 s"),
    ],
)
def test_there_are_places_for_too_few(run, nodes, words, said):
    nodes(1)
    run.start("2:2", *words, "--fail_seconds=1")
    run.end(ANOTHER_FAILED)
    run.says(rf"{said}; expected 2 at least\.")
    assert not run.lines()


# The end.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_all_are_asked_to_end(run, nodes, number):
    """One of them waits for a place."""
    nodes(2)
    run.start("1:3", steps=12)
    processes = with_actors(run.begin(0, 1).values())
    run.step(12)
    run.process.send_signal(number)
    run.end(143)
    epoch, batch = divmod(max(run.steps()), fits.STEPS_PER_EPOCH)
    assert (run.folder / f"run/ckpt-{epoch}-{batch}").exists(), run.tell()
    assert "failed" not in "".join(run.said), run.tell()
    assert have_gone(processes)


def test_the_launcher_is_killed(run, nodes):
    nodes(2)
    run.start("1:2", steps=12)
    processes = with_actors(run.begin(0, 1).values())
    run.process.kill()
    assert have_gone(processes)


CHILD = """
import os, signal, subprocess, sys
child = [sys.executable, "-SE", "-c", "import signal; signal.pause()"]
child = subprocess.Popen(child, start_new_session=True)
open({file!r}, "w").write(f"{{child.pid}} ")
"""


@pytest.mark.parametrize("kills", ["launcher", "actor"])
def test_what_a_host_has_started_ends_with_it(run, nodes, kills, tmp_path):
    """Ray kills the children of its workers, and not theirs."""
    nodes(1)
    file = tmp_path / "child"
    run.launch("--hosts=1:1", *python(CHILD.format(file=str(file)) + "signal.pause()"))
    until(lambda: file.exists() and file.read_text().endswith(" "), run.tell)
    child = psutil.Process(int(file.read_text()))
    host, actor = with_actors([child.ppid()])
    (run.process if kills == "launcher" else actor).kill()
    assert have_gone([child, host, actor])
    run.process.kill()


def python(code):
    return "--", sys.executable, "-S", "-c", code


def test_wrong_usage_is_final(run, nodes):
    nodes(2)
    run.launch("--hosts=1:2", *python("raise SystemExit(2)"))
    run.end(2)
    said = "".join(run.said)
    assert said.count("failed: exit code 2") == 2 and "starts again" not in said


def test_a_command_that_cannot_be_started(run, nodes):
    nodes(1)
    run.launch("--hosts=1:1", "--", "/no/such")
    run.end(2)
    run.says(
        r"failed: Cannot start /no/such \(No such file .*; it does not start again"
    )
    assert "starts again" not in "".join(run.said)


PLACE = """
import os
names = "TOWERS_SLOT", "TOWERS_COORDINATOR", "TOWERS_INTERFACE"
print("found", *map(os.environ.get, names), os.getcwd(), flush=True)
"""


@pytest.mark.parametrize(
    ("words", "environ", "coordinator", "interface"),
    [
        ([], {}, "127.0.0.2", "None"),
        (["--interface=127.0.0.1"], {}, "127.0.0.1", "127.0.0.1"),
        # A cluster of its own is on this machine.
        ([], {"RAY_ADDRESS": "local"}, "127.0.0.1", "None"),
    ],
)
def test_each_host_has_its_place(run, nodes, words, environ, coordinator, interface):
    nodes(1)
    run.environ |= environ
    run.launch("--hosts=1:1", *words, *python(PLACE))
    run.end()
    said = rf"found 0 {coordinator}:\d+ {interface} {re.escape(str(ROOT))}\b"
    assert re.search(said, "".join(run.said)), run.said


def test_a_working_folder_that_ray_copies(run, nodes, tmp_path):
    """As with `ray job submit`."""
    nodes(1)
    (tmp_path / "my.py").write_text(PLACE)
    run.environ |= job(working_dir=str(tmp_path))
    run.launch("--hosts=1:1", "--", "my.py")
    run.end()
    assert re.search(r"found 0 .*/_ray_pkg_\w+\b", "".join(run.said)), run.said


def test_ray_cannot_start_it(run, nodes):
    nodes(1)
    run.environ |= job(conda="no-such-environment")
    run.launch("--hosts=1:1", *python("0"))
    run.end(1)
    run.says(
        r"failed: Ray cannot start it \(.*environment\), 3 times running; it does not "
        "start again"
    )


def job(**runtime_env):
    """The environment of a job with its own."""
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": runtime_env})}
