"""A process that joins others: in this process, with a thread for the other host."""

import json

import pytest

from tests.towers.cluster.in_threads import in_threads, memberships
from towers.cluster import process_group
from towers.cluster.communicator import Communicator
from towers.cluster.heartbeat import Heartbeat
from towers.cluster.links import Links
from towers.collectives.joined_hosts import this_host
from towers.collectives.world import ALONE
from towers.hosts import group
from towers.keras_adapter import runtime


@pytest.fixture
def join(monkeypatch):
    """Has this process join another host; returns what that host was told."""
    monkeypatch.setattr(group, "current", None)
    # This process ends without the other host.
    monkeypatch.setattr(process_group, "_tell_of_the_end", lambda: None)
    opened = []

    def other(membership):
        communicator = Communicator(Links(membership))
        told = json.loads(bytes(communicator.all_gather(b"", "addresses")[0]))
        heartbeat = Heartbeat(1, membership.names, communicator.links.abort)
        heartbeat.connect(told[0])
        opened.extend((communicator, heartbeat))
        return told

    def join():
        first, second = memberships(2)
        calls = [lambda: process_group.join(first), lambda: other(second)]
        nothing, told = in_threads(calls)
        assert nothing is None
        opened.extend((group.current.communicator, group.current.heartbeat))
        return told

    yield join
    for each in opened:
        each.close()


def test_all_draw_alike(join, monkeypatch):
    monkeypatch.setattr(runtime, "random_seed", lambda: None)
    seeds = []
    monkeypatch.setattr("keras.utils.set_random_seed", seeds.append)
    _, seed = join()
    assert seeds == [seed]


def test_this_host_is_one_of_those_that_it_has_joined(join):
    assert this_host() is ALONE
    join()
    host = this_host()
    assert host is this_host()
    assert (host.count, host.index, host.names) == (2, 0, ("host 0", "host 1"))
    assert host.communicator is group.communicator()
