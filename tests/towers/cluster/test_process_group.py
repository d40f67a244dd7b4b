"""How a process joins other hosts."""

import socket
import subprocess
import sys
import types

import psutil
import pytest

from tests.limits import HANG_S
from towers.cluster import addresses, process_group, tensorflow_engine
from towers.collectives.joined_hosts import this_host
from towers.collectives.world import ALONE
from towers.hosts import group
from towers.hosts.group import Membership
from towers.keras_adapter import runtime
from towers.program.ending import ANOTHER_FAILED

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
    monkeypatch.setattr(process_group, "_end_by_own_code", lambda: None)
    monkeypatch.setattr(tensorflow_engine, "join", lambda membership, seconds: joined)
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
        tensorflow_engine.join(MEMBERSHIP, 1.0)


@pytest.mark.parametrize(
    ("kind", "code"), [("HostFailedError", ANOTHER_FAILED), ("HostsDifferError", 1)]
)
def test_a_launcher_can_tell_who_has_failed_first(kind, code):
    """By the exit code of a program that does not catch the error."""
    program = (
        "from towers.cluster import process_group\n"
        "from towers.hosts.group import HostFailedError, HostsDifferError\n"
        f"process_group._end_by_own_code()\nraise {kind}('host 1 has ended')\n"
    )
    command = sys.executable, "-c", program
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=HANG_S)
    assert done.returncode == code
    assert done.stderr.endswith(f"{kind}: host 1 has ended\n")


def test_a_port_that_another_process_has(monkeypatch):
    monkeypatch.setattr(tensorflow_engine.cluster, "is_initialized", lambda: False)
    with socket.create_server(("", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        membership = Membership(0, (address, "127.0.0.1:2"), ("host 0", "host 1"))
        with pytest.raises(OSError, match=f"host 0 cannot listen at {address} "):
            tensorflow_engine.join(membership, 1.0)


def test_an_interface_has_an_address_that_others_reach(monkeypatch):
    local, wide = (
        types.SimpleNamespace(family=socket.AF_INET6, address=address)
        for address in ("fe80::1%eth0", "fd00::1")
    )
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [local, wide]})
    assert addresses.of_interface("eth0") == "fd00::1"
