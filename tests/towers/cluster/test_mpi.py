"""Hosts that MPI has started, really: by mpirun, on this machine."""

import json
import os
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests import mpi
from tests.limits import HANG_S
from tests.mpi import ROOT, end, run, start
from tests.oracle import largest_difference
from tests.variants import slow
from towers.program.ending import ANOTHER_FAILED

pytestmark = mpi.NEEDED


def records(out):
    """What hosts have said, by rank and name."""
    of_hosts = {}, {}
    for line in out.splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            of_hosts[record.pop("rank")][record.pop("name")] = record
    return of_hosts


# What they compute.


@pytest.mark.parametrize("count", [2, slow(3)])
def test_the_contract_of_a_world(count, tmp_path):
    run(count, "-m", "tests.towers.collectives.worlds", "mpi", tmp_path)


TRAINS = """
import sys
import keras, numpy as np
import towers

folder, towers_here = sys.argv[1], int(sys.argv[2])
devices = towers.configure(num_gpus=towers_here, hosts="auto")
data = np.load(f"{folder}/data.npz")
plain = keras.saving.load_model(f"{folder}/model.keras")
model = towers.multi_gpu_model(plain, gpus=towers_here)
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
logs = model.fit(
    data["x"], data["y"], batch_size=16, epochs=3, shuffle=False, verbose=0
)
from towers.hosts import group
rank = joined.rank if (joined := group.joined()) else "alone"
weights = {str(k): each for k, each in enumerate(model.get_weights())}
np.savez(f"{folder}/{rank}.npz", loss=logs.history["loss"], **weights)
"""


def test_hosts_train_as_one_device_does(tmp_path):
    """Two hosts of one tower to the bit as one host of two; an uneven last batch."""
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(53, 5)).astype("float32")
    y = rng.normal(size=(53, 1)).astype("float32")
    plain = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(7, "relu"), keras.layers.Dense(1)]
    )
    plain.save(tmp_path / "model.keras")
    np.savez(tmp_path / "data.npz", x=x, y=y)
    run(2, "-c", TRAINS, tmp_path, 1)
    run(1, "-c", TRAINS, tmp_path, 2)
    files = [np.load(tmp_path / f"{name}.npz") for name in ("0", "1", "alone")]
    hosts, others, alone = ([file[key] for key in file.files] for file in files)
    for one, other, towers_of_one in zip(hosts, others, alone, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, towers_of_one)
    plain.compile(keras.optimizers.Adam(0.01), "mse")
    logs = plain.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    wanted = [logs.history["loss"], *plain.get_weights()]
    assert largest_difference(hosts, wanted) < 1e-5


@pytest.mark.slow
def test_towers_train(tmp_path):
    """Both hosts train one model, and the first one writes; as one process does."""
    flags = (
        *("-m", "towers.train", "--dataset=synthetic:4x4x1:3:160", "--model=mlp"),
        *("--train_epochs=2", "--batch_size=32", "--deterministic", "--seed=3"),
        *("--variable_update=parameter_server", "--learning_rate=0.1"),
    )
    out = run(2, *flags, "--num_gpus=1", f"--model_dir={tmp_path / 'two'}")
    assert "host 1 (" in out
    run(1, *flags, "--num_gpus=2", f"--model_dir={tmp_path / 'one'}")
    two, one = (
        keras.saving.load_model(tmp_path / name / "model.keras").get_weights()
        for name in ("two", "one")
    )
    for mine, wanted in zip(two, one, strict=True):
        np.testing.assert_array_equal(mine, wanted)


# How they end.


def on_hosts(*names):
    return start(2, "-m", "tests.towers.cluster.on_hosts", "mpi", "mpi", *names)


@pytest.mark.slow
def test_hosts_stop_and_differ_alike():
    names = (
        *("stops", "stops, eager", "trains twice", "evaluates", "of batches"),
        *("other epochs", "other batches", "other examples", "other way"),
        "fewer generated batches",
    )
    _, out, err = end(on_hosts(*names, "evaluates or predicts"))
    first, second = records(out)
    assert [*first] == [*names, "evaluates or predicts"], err[-2000:]
    # They are in different collectives, and both say in which.
    for kinds in (
        first.pop("evaluates or predicts"),
        second.pop("evaluates or predicts"),
    ):
        assert kinds["error"] == "HostsDifferError", kinds
    assert first == second
    kinds = {name: each.get("error") for name, each in first.items()}
    assert kinds == dict.fromkeys(names[:5]) | dict.fromkeys(
        names[5:], "HostsDifferError"
    )


@pytest.mark.slow
def test_an_error_of_one_host_ends_all():
    code, out, err = end(on_hosts("raises in callback"))
    first, second = (each["raises in callback"] for each in records(out))
    assert (second["error"], code) == ("RuntimeError", code) and code > 0, err
    assert first["error"] == "HostFailedError"
    assert "host 1 (" in first["said"] and "an error in callback" in first["said"]


FAILS = """
import signal, sys
from towers.cluster import process_group
from towers.hosts import group

process_group.join_as_started()
comm, rank = group.current.communicator, group.joined().rank

def meet(purpose):
    with comm.collective(purpose, 24):
        pass

with group.together():
    meet("first")
    if rank == 1:
        def fail(*_):
            raise LookupError("nothing there")

        if sys.argv[1] == "is waited for":
            signal.signal(signal.SIGALRM, fail)
            signal.alarm(1)
            meet("second")
        fail()
    if sys.argv[1] == "meets":
        meet("second")
    import time
    time.sleep(600)
"""


@pytest.mark.parametrize("other", ["meets", slow("sleeps"), slow("is waited for")])
def test_a_program_that_fails_ends_all(other):
    """Those that meet it say so; one that does not is ended by MPI."""
    code, _, err = end(start(2, "-c", FAILS, other))
    assert code == 1
    assert "has failed: LookupError: nothing there; all hosts end." in err
    assert "towers: host 1 (" in err
    told = "HostFailedError: host 1 (" in err
    assert told == (other == "meets"), err


CATCHES = """
import signal, sys
from towers.cluster import process_group
from towers.hosts import group

process_group.join_as_started()
comm, rank = group.current.communicator, group.joined().rank

def meet(purpose):
    with comm.collective(purpose, 24):
        pass

_, then, fifo = sys.argv

def fail(*_):
    raise LookupError

if rank == 0:
    open(fifo).close()  # It waits for the other host to open it, too.
    meet("first")
signal.signal(signal.SIGALRM, fail)
signal.alarm(1)
try:
    meet("first")
except LookupError:
    open(fifo, "w").close()
if then == "goes on":
    meet("second")
"""


@pytest.mark.parametrize("then", ["goes on", slow("ends")])
def test_a_host_that_an_error_takes_out_of_a_sum_ends_all(then, tmp_path):
    """MPI would take its next sum for the rest of that one, or wait for ever."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code, _, err = end(start(2, "-c", CATCHES, then, fifo))
    assert code == 1
    if then == "ends":
        assert "ends in the middle of 'first'; all hosts end." in err
    else:
        assert "An error has taken this host out of 'first', so it cannot meet" in err


FINALIZES = """
from mpi4py import MPI
from towers.cluster import process_group
from towers.hosts import group

process_group.join_as_started()
with group.current.communicator.collective("sum", 24):
    pass
MPI.Finalize()
"""


@pytest.mark.slow
def test_a_program_may_end_mpi_itself():
    run(2, "-c", FINALIZES)


def test_mpi_that_is_not_initialised_is_an_error_in_a_sentence():
    code = "import mpi4py; mpi4py.rc.initialize = False\n" + FINALIZES
    code, _, err = end(start(2, "-c", code))
    assert code == 1
    assert "but MPI is not initialised or already finalised in this process" in err


@pytest.mark.slow
def test_a_host_that_is_killed_ends_all():
    code, out, err = end(on_hosts("SIGKILL 1 training"))
    assert code not in (0, ANOTHER_FAILED)
    assert "signal 9" in out + err


STOPS = """
import os, signal, sys
from towers.cluster import mpi_watch, process_group
from towers.hosts import group

mpi_watch.SILENT_S = 2.0
process_group.join_as_started()
if group.joined().rank == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGSTOP)
with group.current.communicator.collective("first", 0):
    pass
"""


@pytest.mark.parametrize("victim", [1, slow(0)])
def test_a_host_that_is_stopped_ends_all(victim):
    code, _, err = end(start(2, "-c", STOPS, victim))
    assert code == ANOTHER_FAILED
    assert f"towers: host {victim} (" in err
    assert ") has not been heard for 2 s: it is stopped, or is cut off" in err


NEVER_COMES = """
import os, signal
from towers.cluster import process_group

if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
process_group.join_as_started()
"""


def test_a_host_that_is_stopped_before_mpi_starts_ends_all():
    code, _, err = end(start(2, "-c", NEVER_COMES, TOWERS_JOIN_SECONDS="2"))
    assert code != 0
    assert "towers: Not all hosts have connected within 2 s, so this host ends" in err


@pytest.mark.slow
def test_a_signal_stops_all_at_the_same_batch(tmp_path):
    """SIGTERM reaches one process only, as a scheduler may send it; all save."""
    process = start(
        *(2, "-m", "towers.train", "--dataset=synthetic:4x4x1:3:64", "--model=mlp"),
        *("--train_epochs=100000", "--log_steps=1", "--num_gpus=1"),
        *("--variable_update=parameter_server", f"--model_dir={tmp_path}"),
        PYTHONUNBUFFERED="1",
    )
    pids, lines = [], []
    for line in process.stdout:
        lines.append(line)
        if "pid " in line and not pids:
            pids = [part.split(")")[0] for part in line.split("pid ")[1:]]
        if "Epoch 2/" in line and pids:  # both train
            break
    assert pids, lines
    os.kill(int(pids[-1]), signal.SIGTERM)
    code, out, err = end(process)
    assert code == 128 + signal.SIGTERM, (out, err)
    assert "SIGTERM" in out + err


def test_without_mpi4py_one_sentence_says_what_to_do():
    code = "import sys; sys.modules['mpi4py'] = None\n" + FAILS
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    last = done.stderr.splitlines()[-1]
    assert "Received OMPI_COMM_WORLD_RANK=0 of 2 processes of MPI, but mpi4py" in last
    assert "run: pip install" in last
