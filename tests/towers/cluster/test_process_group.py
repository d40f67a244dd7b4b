"""How a process joins other hosts."""

import types

import pytest

from towers.cluster import process_group, tensorflow_engine
from towers.collectives.joined_hosts import this_host
from towers.collectives.world import ALONE
from towers.hosts import group
from towers.hosts.group import Membership
from towers.keras_adapter import runtime

MEMBERSHIP = Membership(0, ("127.0.0.1:1", "127.0.0.1:2"), ("host 0", "host 1"))


@pytest.fixture
def connected(monkeypatch):
    """Has this process join hosts without an engine; returns how often it connects."""
    times = []

    def connect():
        times.append(len(times))
        return types.SimpleNamespace(count=2, broadcast_value=lambda value: 17)

    joined = group.Joined(MEMBERSHIP, None, None, connect)
    monkeypatch.setattr(group, "current", None)
    monkeypatch.setattr(process_group, "_tell_of_the_end", lambda: None)
    monkeypatch.setattr(tensorflow_engine, "join", lambda membership: joined)
    monkeypatch.setattr("keras.utils.set_random_seed", lambda seed: None)
    return times


def test_all_draw_what_the_first_host_draws(connected, monkeypatch):
    monkeypatch.setattr(runtime, "random_seed", lambda: None)
    seeds = []
    monkeypatch.setattr("keras.utils.set_random_seed", seeds.append)
    process_group.join(MEMBERSHIP)
    assert seeds == [17]


def test_the_users_seed_stays(connected, monkeypatch):
    monkeypatch.setattr(runtime, "random_seed", lambda: 3)
    seeds = []
    monkeypatch.setattr("keras.utils.set_random_seed", seeds.append)
    process_group.join(MEMBERSHIP)
    assert seeds == []


def test_hosts_connect_once(connected):
    assert this_host() is ALONE
    process_group.join(MEMBERSHIP)
    assert this_host() is this_host() and this_host().count == 2
    assert connected == [0]


def test_a_process_joins_once(connected):
    process_group.join(MEMBERSHIP)
    with pytest.raises(RuntimeError, match="has joined other hosts already"):
        process_group.join(MEMBERSHIP)


def test_hosts_come_before_tensorflow():
    runtime.device_memory_limits()  # which initialises TensorFlow
    with pytest.raises(RuntimeError, match="TensorFlow is initialised already, so"):
        tensorflow_engine.join(MEMBERSHIP)
