"""Runs that share devices: what each trains on as others come and go."""

import re
import signal
import threading

import keras
import numpy as np
import pytest

import towers
from tests import oracle
from tests.limits import HANG_S
from tests.towers.train.runs import finish, read_settings, start
from towers.devices.configuration import Devices
from towers.devices.sharing import RegistryError
from towers.elastic import shares
from towers.elastic.shares import Shares
from towers.hosts import group
from towers.hosts.group import Membership
from towers.machine import nvml
from towers.machine.nvml import Gpu
from towers.train.parts.devices import share_devices

DEVICES = {f"cpu:{k}": f"/device:CPU:{k}" for k in range(4)}
PLACES = (*DEVICES,)


class Registry:
    """Stands in for a registry: it is told what each look finds."""

    def __init__(self, *found):
        self.found, self.held, self.left = [*found], [], False

    def join(self, seconds, say):
        return self.found.pop(0)

    def look(self):
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]

    def hold(self, places):
        self.held.append(places)

    def leave(self):
        self.left = True


class Clock(keras.callbacks.Callback):
    """Two seconds a batch."""

    def __init__(self):
        super().__init__()
        self.now_s, self.towers = 0.0, []

    def __call__(self):
        return self.now_s

    def on_train_batch_end(self, batch, logs=None):
        self.now_s += 2
        self.towers.append(len(self.model.builder.plan.devices))


def model():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input([4]), *layers])


def fit(trained, *callbacks):
    trained.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(60, 4))
    trained.fit(x, x[:, :2], 6, shuffle=False, verbose=0, callbacks=[*callbacks])
    return trained


@pytest.mark.slow
def test_a_run_gets_what_others_leave(tmp_path):
    found = PLACES, PLACES, PLACES[:2], PLACES[:2], PLACES[1:2], PLACES
    registry, clock = Registry(*found), Clock()
    mine = Shares(registry, DEVICES, 0, clock)
    assert mine.first == [*DEVICES.values()]
    parallel = towers.multi_gpu_model(model(), gpus=mine.first)
    resize = towers.callbacks.Resize(tmp_path / "run", shares=mine, clock=clock)
    fit(parallel, resize, clock)
    assert clock.towers == [4, 4, 2, 2, 1, 4, 4, 4, 4, 4]
    # Others have what is left before the first step without it.
    assert registry.held == [PLACES[:2], PLACES[1:2], PLACES]
    whys = [each.why for each in resize.generations.every]
    assert whys == ["start", *["--share_gpus"] * 3]
    weights = parallel.get_weights()
    expected = fit(model()).get_weights()
    assert oracle.largest_difference(weights, expected) < 1e-6
    mine.leave()
    assert registry.left


def test_what_cannot_be_is_said_and_kept(tmp_path, capsys):
    def check(count, ratios):
        raise ValueError(f"{count} is too few.")

    registry, clock = Registry(PLACES, PLACES[:1]), Clock()
    mine = Shares(registry, DEVICES, 0, clock)
    parallel = towers.multi_gpu_model(model(), gpus=mine.first)
    fit(
        parallel,
        towers.callbacks.Resize(tmp_path, shares=mine, check=check, clock=clock),
        clock,
    )
    assert {*clock.towers} == {4}
    assert {*registry.held} == {PLACES}
    said = capsys.readouterr().err
    assert said.count("The towers stay as they are: 1 is too few.") == 1


def test_a_registry_that_cannot_be_used_changes_nothing(tmp_path, capsys):
    class Full(Registry):
        def look(self):
            raise RegistryError("No space left on device.")

        hold = look

    clock = Clock()
    mine = Shares(Full(PLACES), DEVICES, 0, clock)
    parallel = towers.multi_gpu_model(model(), gpus=mine.first)
    fit(parallel, towers.callbacks.Resize(tmp_path, shares=mine, clock=clock), clock)
    assert {*clock.towers} == {4}
    assert capsys.readouterr().err.count("No space left on device.") == 1


def test_nobody_can_ask_a_run_that_shares(tmp_path):
    source = shares_asked(tmp_path)
    (tmp_path / "resize.json").write_text(
        '{"key": "a", "num_gpus": 1, "gpu_indices": [], "split_ratios": []}'
    )
    assert source.look() is None
    answer = (tmp_path / "resize_answer.json").read_text()
    assert "which gets what other runs leave" in answer


def shares_asked(folder):
    from towers.elastic.resize import Asked

    return Asked(str(folder), Devices((), ""), shared=True)


@pytest.mark.parametrize(
    ("fractions", "count", "expected"),
    [
        ((0.25, 0.75), 4, (1, 3)),
        ((1 / 3, 2 / 3), 3, (1, 2)),
        ((0.1, 0.2), 2, (1, 1)),
        ((0.3, 1.0), 4, (2, 4)),
    ],
)
def test_fractions_of_memory_are_places(monkeypatch, fractions, count, expected):
    made = {}

    def registry(places, least, most, name):
        made.update(places=places, bounds=(least, most), name=name)
        return Registry(tuple(places))

    monkeypatch.setattr(shares, "Registry", registry)
    devices = Devices(tuple(f"/device:CPU:{k}" for k in range(count)), "")
    shares.share(devices, *fractions, "runs/a", 0)
    assert made["bounds"] == expected
    assert made["places"] == [f"cpu:{k}" for k in range(count)]


def test_places_are_parts_of_gpus(monkeypatch):
    known = {0: Gpu(3, "GPU-a", 9), 1: None}
    monkeypatch.setattr(nvml, "gpu", known.get)
    devices = Devices(tuple("abcd"), "", (0, 0, 1, 1))
    assert shares._places(devices) == {
        "GPU-a/0 of 2": "a",
        "GPU-a/1 of 2": "b",
        "gpu:1/0 of 2": "c",
        "gpu:1/1 of 2": "d",
    }


@pytest.mark.parametrize("value", ["", "a", "0", "0.5:0.2", "0.5:2", "1:1:1:1", "nan"])
def test_the_flag_is_checked(value):
    with pytest.raises(ValueError, match="expected parts of the GPUs' memory"):
        read_settings(f"--share_gpus={value}")


@pytest.mark.parametrize("flag", ["--num_gpus=2", "--split_ratios=1,2", "--stages=2"])
def test_towers_that_come_one_by_one(flag):
    with pytest.raises(ValueError, match="by which towers come and go one by one"):
        read_settings("--share_gpus=0.5", flag)


def test_several_hosts_do_not_share(monkeypatch):
    member = Membership(0, ("a:1", "b:1"), ("host 0", "host 1"))
    monkeypatch.setattr(group, "joined", lambda: member)
    settings = read_settings("--share_gpus=0.5")
    with pytest.raises(ValueError, match=r"share_gpus=0\.5 on several hosts; expected"):
        share_devices(settings, Devices((), ""))


class Run:
    """A run of towers.train, and what it has said of its towers."""

    def __init__(self, folder, share, *devices, gpus=""):
        self.process = start(
            *("--dataset=synthetic:4x4x1:3:1472", "--model=mlp", *devices),
            *("--train_epochs=100000", "--log_steps=1000000", "--on_stall=never"),
            *(f"--model_dir={folder}", f"--share_gpus={share}"),
            gpus=gpus,
        )
        self.changes, self.heard = [], threading.Condition()
        for lines in (self.process.stdout, self.process.stderr):
            threading.Thread(target=self._hear, args=[lines], daemon=True).start()

    def _hear(self, lines):
        for line in lines:
            with self.heard:
                if found := re.match(r" +\d+ +/device:[CG]PU:\d ", line):
                    first = self.changes.pop() if self.changes else 0
                    self.changes.append(first + 1)
                if found := re.match(r"towers: Step .*?: \d -> (\d) tower", line):
                    self.changes.append(int(found[1]))
                self.heard.notify_all()

    def wait_for(self, *changes):
        with self.heard:
            assert self.heard.wait_for(lambda: self.changes == [*changes], HANG_S), (
                self.changes
            )


@pytest.mark.slow
def test_a_third_run_arrives_and_leaves(tmp_path, monkeypatch):
    monkeypatch.setenv("TOWERS_REGISTRY", str(tmp_path / "registry"))
    three_runs_share(tmp_path, "--max_gpus=4")


def three_runs_share(folder, *devices, gpus=""):
    """Three runs share four places; they come one after the other, and go."""

    def run(name, share):
        return Run(folder / name, share, *devices, gpus=gpus)

    first = run("first", "0.25:1")
    first.wait_for(4)
    second = run("second", "0.25:0.75")
    first.wait_for(4, 2)
    second.wait_for(2)
    third = run("third", "0.5")
    third.wait_for(2)
    first.wait_for(4, 2, 1)
    second.wait_for(2, 1)
    refused = finish(
        start(
            *("--dataset=synthetic:4x4x1:3:64", "--model=mlp", *devices),
            *("--share_gpus=0.5", f"--model_dir={folder / 'fourth'}"),
            gpus=gpus,
        )
    )
    assert refused.returncode == 1, refused.stdout
    assert "expected all together to fit into 4 places" in refused.stderr
    third.process.send_signal(signal.SIGKILL)
    third.process.wait(HANG_S)
    first.wait_for(4, 2, 1, 2)
    second.wait_for(2, 1, 2)
    second.process.send_signal(signal.SIGTERM)
    second.process.wait(HANG_S)
    first.wait_for(4, 2, 1, 2, 4)
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(HANG_S) == 143
