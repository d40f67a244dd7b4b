"""Split ratios that a run finds by the time of its towers."""

import json
import os
import subprocess
import sys
import types

import pytest

from tests.limits import HANG_S
from towers.elastic.balance import Balance, recall, remember
from towers.loop.timers import Totals
from towers.machine import limits
from towers.plan import Tower

CPUS = "/device:CPU:0", "/device:CPU:1"


class Run:
    """A run whose towers need so many seconds for a batch, and some more each."""

    on_gpus = True

    def __init__(self, *batch_s, more_s=0.0, devices=CPUS):
        self.batch_s, self.more_s = batch_s, more_s
        self.resize((1,) * len(batch_s), devices)

    def resize(self, ratios, devices):
        self.totals = Totals(0, 0.0, 0.0, 0.0, 0.0, (0.0,) * len(ratios))
        towers_ = [
            Tower(k, (device,), ratio)
            for k, (device, ratio) in enumerate(zip(devices, ratios, strict=True))
        ]
        self.builder = types.SimpleNamespace(
            plan=types.SimpleNamespace(replicas=towers_, on_gpus=self.on_gpus),
            timers=types.SimpleNamespace(totals=lambda: self.totals),
        )

    @property
    def ratios(self):
        return tuple(each.ratio for each in self.builder.plan.replicas)

    def step(self):
        each_s = [
            a + seconds * ratio / sum(self.ratios) + self.more_s
            for a, seconds, ratio in zip(
                self.totals.towers_s, self.batch_s, self.ratios, strict=True
            )
        ]
        self.totals = self.totals._replace(
            steps=self.totals.steps + 1, towers_s=tuple(each_s)
        )


def train(run, balance, steps=200):
    """Takes steps; returns the ratios that were wished for."""
    wished = []
    for _ in range(steps):
        if (wish := balance.look()) is not None:
            wished.append(wish.split_ratios)
            run.resize(wish.split_ratios, wish.gpus)
        run.step()
    return wished


def test_a_slow_tower_gets_less(tmp_path, capsys):
    run, file = Run(2.0, 1.0), tmp_path / "new" / "split_ratios.json"
    assert train(run, Balance(run, file)) == [(1, 2)]
    said = capsys.readouterr().err
    assert "Split ratios are 1:2: towers take 666.7, 666.7 ms of a step" in said
    assert str(file) in said
    assert recall(file, CPUS) == (1, 2)
    # Once it is found, nothing is measured.
    again = Run(2.0, 1.0)
    assert train(again, Balance(again, file), steps=5) == [(1, 2)]
    assert not capsys.readouterr().err


def test_it_measures_again_with_other_ratios(tmp_path):
    """What each tower takes besides is no part of what grows with its rows."""
    run = Run(4.0, 1.0, 1.0, more_s=0.5, devices=(*CPUS, "/device:CPU:2"))
    wished = train(run, Balance(run, tmp_path / "f"), steps=400)
    assert 1 < len(wished) < 5
    assert len({*wished}) == len(wished)
    times = [b * n / sum(run.ratios) for b, n in zip(run.batch_s, run.ratios, strict=1)]
    assert max(times) < 1.1 * (1 / (1 / 4 + 1 + 1))


def test_towers_that_are_alike_stay(tmp_path, capsys):
    run, file = Run(1.0, 1.04), tmp_path / "split_ratios.json"
    assert train(run, Balance(run, file)) == []
    assert "Split ratios stay 1:1" in capsys.readouterr().err
    assert recall(file, CPUS) == (1, 1)


def test_what_promised_more_than_it_gave_is_undone(tmp_path, capsys):
    run = Run(2.0, 1.0)
    balance, wished = Balance(run, tmp_path / "f"), []
    for _ in range(200):
        if (wish := balance.look()) is not None:
            wished.append(wish.split_ratios)
            run.resize(wish.split_ratios, wish.gpus)
            # Now the other one is slow, by more.
            run.batch_s = (2.0, 1.0) if run.ratios == (1, 1) else (5.0, 5.0)
        run.step()
    assert wished[-1] == (1, 1) == recall(tmp_path / "f", CPUS)
    assert "Split ratios stay 1:1: towers take 1000.0, 500.0 ms" in (
        capsys.readouterr().err
    )


def test_memory_keeps_a_tower_from_more(tmp_path, capsys):
    run, file = Run(3.0, 1.0), tmp_path / "f"

    def headroom(tower):
        return (1.0, 0.6)[tower.index] * sum(run.ratios) / tower.ratio

    assert train(run, Balance(run, file, headroom=headroom)) == [(2, 3)]
    said = capsys.readouterr().err
    assert "are 2:3: towers take 1200.0, 600.0 ms" in said
    assert "; a GPU lacks memory for more. They are kept" in said


def test_a_refusal_ends_it(tmp_path, capsys):
    run = Run(2.0, 1.0)
    balance, wishes = Balance(run, tmp_path / "f"), 0
    for _ in range(200):
        if (wish := balance.look()) is not None:
            wishes += 1
            wish.refused("the batch is too small.")
        run.step()
    assert wishes == 1
    assert "Split ratios stay 1:1: the batch is too small." in capsys.readouterr().err
    assert recall(tmp_path / "f", CPUS) is None


def test_each_set_of_devices_has_ratios_of_its_own(tmp_path):
    run, file = Run(2.0, 1.0), tmp_path / "f"
    balance = Balance(run, file)
    assert train(run, balance) == [(1, 2)]
    run.batch_s, others = (1.0, 3.0), ("/device:CPU:2", "/device:CPU:3")
    run.resize((1, 1), others)
    assert train(run, balance) == [(3, 1)]
    assert (recall(file, CPUS), recall(file, others)) == ((1, 2), (3, 1))
    # Somebody asks for those before: what is known is not measured again.
    run.batch_s = (2.0, 1.0)
    run.resize((1, 1), CPUS)
    assert train(run, balance, steps=5) == [(1, 2)]
    # And nobody argues with ratios that somebody asks for.
    run.resize((1, 1), CPUS)
    assert train(run, balance) == []


def test_more_towers_than_cores(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Run, "on_gpus", False)
    for cores, wished in ((2, [(1, 2)]), (1, [])):
        monkeypatch.setattr(limits, "cpu_count", lambda cores=cores: cores)
        run = Run(2.0, 1.0)
        assert train(run, Balance(run, tmp_path / str(cores))) == wished
    assert "there are more logical CPUs than cores" in capsys.readouterr().err


def test_one_tower_has_no_ratio(tmp_path):
    run = Run(1.0, devices=CPUS[:1])
    assert train(run, Balance(run, tmp_path / "f")) == []
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 9000, '{"a": 1}', '{"a": [1, "2"]}', '{"a": [0, 1]}']
)
def test_a_file_that_nobody_of_ours_has_written(tmp_path, text):
    (tmp_path / "f").write_text(text)
    assert recall(tmp_path / "f", ["a"]) is None
    remember(str(tmp_path / "f"), ["a"], (1,))
    assert recall(tmp_path / "f", ["a"]) == (1,)


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    run = Run(2.0, 1.0)
    (tmp_path / "f").write_text("")
    assert train(run, Balance(run, tmp_path / "f" / "below")) == [(1, 2)]
    assert "They cannot be kept: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_slow_tower_of_a_run(tmp_path):
    """It gets less, and the numbers are those of one device."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.towers.elastic.slow_run", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ratios"] == [1, 2]
    assert recall(tmp_path / "split_ratios.json", CPUS) == (1, 2)
    assert found["losses"] == pytest.approx(found["losses_of_one"], rel=1e-5)
    assert found["difference"] < 2e-5
