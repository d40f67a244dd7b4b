"""Optimizer state in shards on several hosts: once in all, saved, and continued."""

import json
import shutil

import keras
import numpy as np
import pytest

from tests import hosts, oracle
from tests.towers.builders import on_hosts
from towers import Replicated, multi_gpu_model
from towers.callbacks import Checkpoint

pytestmark = pytest.mark.quick_one_in(2)


def _run(layout, name, folder):
    arguments = name, folder
    module = "tests.towers.builders.on_hosts"
    hosts.run(module, layout, *arguments)
    ranks = range(len(layout))
    return [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in ranks]


def _loaded(path):
    with np.load(path) as file:
        return [file[name] for name in file.files]


@pytest.fixture(scope="module")
def plain():
    """What plain Keras comes to."""
    model = on_hosts.model()
    on_hosts.fit(model)
    return on_hosts.state(model)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1), (1, 2), (1, 1, 2)])
def test_state_lies_once_in_the_cluster_and_each_host_may_save_it(
    layout, plain, tmp_path
):
    found, towers = _run(layout, "trains", tmp_path), sum(layout)
    assert sum(each["own"] for each in found) == found[0]["whole"]
    for each, count in zip(found, layout, strict=True):
        # A tower has a row more than another one of two kernels, and a number of each
        # of three biases, in each of three slots.
        most = 3 * 4 * count * (64 + 32 + 3)
        assert abs(each["own"] - each["whole"] * count / towers) <= most
    every = [_loaded(tmp_path / f"state{k}.npz") for k in range(len(layout))]
    for state in every:
        np.testing.assert_equal(state, every[0])
    assert oracle.largest_difference(every[0], plain) < 1e-5
    saved = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_equal(on_hosts.state(saved), every[0])


def _replicated(model):
    return multi_gpu_model(
        model, 3, variable_update=Replicated(shard_optimizer_state=True)
    )


def _home(model):
    return multi_gpu_model(model, 2)


@pytest.mark.slow
def test_hosts_that_come_back_go_on_to_the_same_bits(plain, tmp_path):
    _run((1, 2), "trains", tmp_path)
    expected = _loaded(tmp_path / "state0.npz")
    first, second = _run((1, 2), "dies", tmp_path)
    # In the middle of the epoch, one batch after the first host has wished it.
    assert first["saved"].endswith("ckpt-1-2")
    assert "This host dies" in second["said"] and "host 1" in first["said"]
    for name in ("other hosts", "one host", "home"):
        shutil.copytree(tmp_path / "ckpt", tmp_path / name / "ckpt")
    _run((1, 2), "continues", tmp_path)
    for rank in range(2):
        np.testing.assert_equal(_loaded(tmp_path / f"again{rank}.npz"), expected)
    _run((2, 1), "continues", tmp_path / "other hosts")
    other = _loaded(tmp_path / "other hosts" / "again0.npz")
    assert oracle.largest_difference(other, plain) < 1e-5
    for name, wrap in (("one host", _replicated), ("home", _home)):
        model = on_hosts.model()
        on_hosts.fit(wrap(model), Checkpoint(str(tmp_path / name / "ckpt")))
        assert oracle.largest_difference(on_hosts.state(model), plain) < 1e-5


def test_a_step_that_is_not_finite_changes_nothing_on_any_host(tmp_path):
    for each in _run((1, 2), "not_finite", tmp_path):
        assert "on tower 2" in each["said"]
