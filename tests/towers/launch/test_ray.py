"""Ray, really: a cluster on this machine, where Ray is installed."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest

from scripts.bench_faults import digest
from tests.limits import HANG_S
from tests.towers.launch.ray_cluster import Cluster
from tests.variants import slow

RANK = "import os; rank = int(os.environ['TOWERS_HOST_RANK']); "

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    """Starts a cluster; returns the environment of who uses it."""
    with contextlib.closing(Cluster(cpus=4)) as one:
        one.start(2)
        yield one.environ


@pytest.fixture
def launched(cluster, tmp_path):
    """Launches hosts on Ray; returns the exit code and what was said."""

    def launch(*words, told=None, environ=cluster, **options):
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "towers.launch", "--launcher=ray"),
                *("--hosts=2", *words),
            ],
            env=environ,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        limit = threading.Timer(HANG_S, process.kill)
        limit.start()
        lines = []
        with process:
            for line in process.stdout:
                lines.append(line)
                if told and told[0] in line:
                    process.send_signal(told[1])
        limit.cancel()
        return process.returncode, "".join(lines)

    return launch


def python(code):
    return "--", sys.executable, "-S", "-c", code


PLACE = (
    RANK
    + """
names = "TOWERS_HOST_COUNT", "TOWERS_COORDINATOR", "TOWERS_GENERATION"
print("found", rank, *map(os.environ.get, names), os.getcwd(), flush=True)
"""
)
FAILS = (
    PLACE
    + """
import time
if os.environ["TOWERS_GENERATION"] == "0":
    if rank: os.kill({process}, 9)
    raise SystemExit(75)
"""
)


def found(out):
    """What each host has printed, in order of generation and rank.

    Nodes on one machine show each line that they find in their common folder.
    """
    lines = re.findall(r"found (.*)", re.sub(r"\x1b\[[\d;]*m", "", out))
    return sorted((line.split() for line in {*lines}), key=lambda e: (e[3], e[0]))


def test_hosts_have_their_places(launched, tmp_path):
    code, out = launched(*python(PLACE))
    assert code == 0, out
    first, second = found(out)
    assert first[:2] == ["0", "2"] and second[:2] == ["1", "2"]
    assert first[2:] == second[2:]
    assert first[2].startswith("127.0.0.1:")
    assert first[3:] == ["0", str(tmp_path)]


MEET = """
from towers.cluster import environment
from towers.cluster.rendezvous import meet
print("found", *meet(environment.find()).addresses, flush=True)
"""


def test_hosts_on_two_nodes(launched):
    command = "--placement_strategy=STRICT_SPREAD", "--", sys.executable, "-c", MEET
    code, out = launched(*command)
    assert code == 0, out
    (line,) = {*re.findall("found (.*)", out)}  # both know the same
    first, _ = line.split()
    assert first.startswith(("127.0.0.2:", "127.0.0.3:"))  # that of its node


def test_a_cluster_of_its_own(launched, cluster):
    environ = cluster | {"RAY_ADDRESS": "local"}
    code, out = launched(*python(PLACE), environ=environ)
    assert code == 0, out
    assert len(found(out)) == 2 and "Started a local Ray instance" in out


@pytest.mark.parametrize(
    ("process", "how"),
    [
        ("os.getpid()", r"SIGKILL\."),
        ("os.getppid()", r"Ray lost its worker \(.+\)\."),  # that is the worker
    ],
)
def test_another_generation_starts(launched, process, how):
    code, out = launched("--max_restarts=1", *python(FAILS.format(process=process)))
    assert code == 0, out
    assert re.search(rf"towers.launch: Host 1 \(pid \d+\) failed first: {how}", out)
    assert [each[3] for each in found(out)] == ["0", "0", "1", "1"]


def test_of_a_range_as_many_start_as_there_are_places_for(launched):
    code, out = launched("--hosts=1:9", *python(PLACE))
    assert code == 0, out
    assert [each[:2] for each in found(out)] == [[str(k), "6"] for k in range(6)]
    assert "towers.launch: Ray has started 6 hosts." in out


def test_a_range_starts_again_by_default(launched):
    code, out = launched("--hosts=1:2", *python(FAILS.format(process="os.getppid()")))
    assert code == 0, out
    assert [each[3] for each in found(out)] == ["0", "0", "1", "1"]


def test_one_host_is_told_how_often_it_has_started(launched):
    fails = PLACE + 'raise SystemExit(os.environ["TOWERS_GENERATION"] == "0")'
    code, out = launched("--hosts=1", "--max_restarts=1", *python(fails))
    assert code == 0, out
    assert [each[3] for each in found(out)] == ["0", "1"]


def test_the_exit_code_is_that_of_the_host_that_failed_first(launched):
    code, out = launched(*python(RANK + "raise SystemExit(3 if rank else 75)"))
    assert code == 3, out
    assert re.search(r"Host 1 \(pid \d+\) failed first: exit code 3\.", out)


def test_no_place(launched):
    code, out = launched("--num_cpus=99", "--join_seconds=3", *python("0"))
    assert code == 1
    assert (
        "towers.launch: Ray found no place for 2 hosts with 99 CPU each within 3 s; "
        "its cluster has 6 CPU: expected fewer hosts"
    ) in out


WAITS = (
    PLACE
    + """
import signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
print("ready", os.getpid(), flush=True)
signal.pause()
"""
)


def test_a_signal_reaches_all(launched):
    code, out = launched(
        "--max_restarts=3", *python(WAITS), told=("ready", signal.SIGTERM)
    )
    assert code == 143, out
    assert "start again" not in out and "failed" not in out


def test_a_launcher_that_is_killed_takes_its_hosts_with_it(launched):
    code, out = launched(*python(WAITS), told=("ready", signal.SIGKILL))
    assert code == -signal.SIGKILL
    for number in re.findall(r"ready (\d+)", out):
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(number)).wait(HANG_S)


MODEL = """
import os
import keras
import numpy as np

generation, rank = os.environ["TOWERS_GENERATION"], os.environ["TOWERS_HOST_RANK"]


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 5 and rank == "{rank}" and generation == "0":
            if os.path.exists("{folder}/fault"):
                {fault}
        random = np.random.default_rng(index)
        return random.normal(size=(64, 20)), random.integers(10, size=64)


def train_data():
    return Data()


def build(input_shape):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(10)])


loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
"""
TRAIN = (
    *("--deterministic", "--seed=1", "--train_epochs=2", "--save_every=3"),
    *("--num_gpus=2", "--log_steps=1"),
)


@pytest.mark.parametrize(
    ("rank", "fault", "said"),
    [
        (1, "os.kill(os.getpid(), 9)", "failed first: SIGKILL"),
        slow(0, "os.kill(os.getppid(), 9)", "Ray lost its worker"),
        slow(1, "raise OSError('a bad record')", "failed first: exit code 1"),
    ],
)
def test_a_run_that_fails_ends_with_the_bits_of_one_that_nobody_disturbed(
    launched, tmp_path, rank, fault, said
):
    mine = tmp_path / "mine.py"
    mine.write_text(MODEL.format(folder=tmp_path, rank=rank, fault=fault))
    digests = []
    for name in ("left_alone", "failed"):
        model_dir = tmp_path / name
        flags = f"--model={mine}", f"--model_dir={model_dir}", *TRAIN
        code, out = launched("--max_restarts=1", "--", *flags)
        assert code == 0, out
        assert (said in out) == (name == "failed"), out
        digests.append(digest(model_dir))
        (tmp_path / "fault").touch()
    assert digests[0] == digests[1] is not None
    # What Ray was told of the last epoch it heard of.
    noted = json.loads((model_dir / "checkpoint_manager_snapshot.json").read_text())
    last = noted["latest_checkpoint_result"]
    assert last["checkpoint_dir_name"].startswith("checkpoints/ckpt-")
    assert last["metrics"]["epoch"] == 2 and "loss" in last["metrics"]


OWN = """
import ray, ray.train
from ray.train.tensorflow import TensorflowTrainer

def train():
    import keras, numpy as np, towers
    towers.configure(hosts="auto")
    model = towers.multi_gpu_model(keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")]
    ))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.arange(28, dtype="float32").reshape(7, 4) / 28
    def report(epoch, logs):
        ray.train.report({"weights": model.get_weights()[0].ravel().tolist()})
        print("weights", model.get_weights()[0].ravel().tolist(), flush=True)
    model.fit(x, x.sum(1) + 1, batch_size=7, epochs=2, shuffle=False, verbose=0,
              callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=report)])

ray.init(log_to_driver=True)
TensorflowTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=2)).fit()
"""


def test_a_function_of_ones_own_finds_its_place(cluster, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", OWN],
        env=cluster | {"HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"weights (\[.*\])", done.stdout + done.stderr)
    print(lines)
    rows = np.arange(28, dtype="float32").reshape(7, 4) / 28
    weights, bias = np.ones(4), 0.0
    for _ in range(2):
        errors = rows @ weights + bias - rows.sum(1) - 1
        weights = weights - 0.1 * 2 * errors @ rows / 7
        bias -= 0.1 * 2 * errors.mean()
    np.testing.assert_allclose(json.loads(lines[-1]), weights, atol=1e-6)
