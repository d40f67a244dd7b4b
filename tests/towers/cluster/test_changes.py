"""Processes that leave others and join the next ones: whoever is killed, or arrives."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.limits import HANG_S
from tests.towers.cluster.in_threads import in_threads, memberships
from towers.cluster import environment, process_group
from towers.cluster.communicator import Communicator
from towers.cluster.elastic import Coordinator, Member
from towers.cluster.heartbeat import Heartbeat
from towers.cluster.links import LinkError, Links
from towers.collectives.joined_hosts import this_host
from towers.collectives.world import ALONE
from towers.hosts import group
from towers.hosts.group import ElasticPlace, HostFailedError
from towers.keras_adapter import runtime

ROOT = Path(__file__).parents[3]


class Process:
    """A process that sums with others."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.towers.cluster.summing"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, order):
        print(json.dumps(order), file=self.process.stdin, flush=True)

    def hear(self):
        return json.loads(self.process.stdout.readline())

    def end(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def hosts():
    every = [Process() for _ in range(3)]
    yield every
    for each in every:
        each.end()


def meet(hosts, generation):
    """Has processes join one another, and sum; returns what the first has open."""
    options = {"generation": generation, "token": "secret", "elastic": True}
    for host, each in zip(hosts, memberships(len(hosts), **options), strict=True):
        host.tell(dataclasses.asdict(each))
    told = in_threads([host.hear for host in hosts])
    for each in told:
        assert (each["summed"], each["count"]) == (generation, len(hosts))
    return told[0]["open"]


def test_processes_go_on_without_one_that_is_killed_and_with_one_that_arrives(hosts):
    opened = []
    for change in range(20):
        # Each of them is the first host now and then, for whom other hearts beat.
        first = change // 2 % 3
        meet([*hosts[first:], *hosts[:first]], change)
        if len(hosts) == 3:
            hosts.pop(1).end()
        else:
            hosts[0].tell("leave")
            hosts.insert(1, Process())
        told = [each.hear() for each in (hosts[0], hosts[-1])]
        assert [each["left"] for each in told] == [change] * 2
        assert [each["why"] is None for each in told] == [change % 2 == 1] * 2
        opened.append(told[0]["open"])
    assert opened == opened[:1] * 20


# In this process, with a thread for the other host.


@pytest.fixture
def joined(monkeypatch):
    """Has this process join another host; returns that one's collectives."""
    monkeypatch.setattr(process_group, "_ended", None)
    others = []

    def other(membership):
        communicator = Communicator(Links(membership))
        told = communicator.all_gather(b"", "addresses")[0]
        heartbeat = Heartbeat(1, membership.names, communicator.links.abort)
        heartbeat.connect(json.loads(bytes(told))[0])
        others.append((communicator, heartbeat))

    def join(**options):
        first, second = memberships(2, **options)
        calls = [lambda: process_group.join(first), lambda: other(second)]
        assert in_threads(calls) == [None, None]
        return others[-1][0]

    yield join
    process_group.leave(0)
    for communicator, heartbeat in others:
        communicator.close()
        heartbeat.close()


def test_what_waits_in_another_thread_ends_where_its_host_leaves(joined):
    other = joined()
    own = group.communicator()
    calls = [
        lambda: own.all_reduce(np.ones(3), "sum"),
        lambda: [until(lambda: own.links.doing), process_group.leave(0)],
    ]
    waited, _ = in_threads(calls)
    assert isinstance(waited, LinkError), waited
    assert str(waited) == "This host has left the others."
    with pytest.raises(LinkError):
        # The first of it may have come before.
        for _ in range(2):
            other.all_reduce(np.ones(3), "sum")
    with pytest.raises(LinkError, match="has left"):
        own.all_reduce(np.ones(3), "sum")
    # Who has left may say so again, and who has joined nobody has nobody to ask.
    process_group.leave()
    assert group.joined() is group.failure() is None
    assert group.ask_all(1) == {}


def until(holds):
    while not holds():
        time.sleep(0.001)


def test_all_draw_alike_as_they_join_first(joined, monkeypatch):
    monkeypatch.setattr(process_group, "_seed", None)
    monkeypatch.setattr(runtime, "random_seed", lambda: None)
    seeds = []
    monkeypatch.setattr("keras.utils.set_random_seed", seeds.append)
    for generation in range(2):
        joined(generation=generation)
        process_group.leave(0)
    # Who comes later is told the same.
    assert seeds == [process_group._seed]


def test_a_call_in_which_hosts_meet_goes_on_with_others(joined):
    with group.together():
        joined(elastic=True)
        with pytest.raises(HostFailedError) as caught, group.together():
            group.current[1]._note(1, "has ended")
            group.check()
        assert (
            str(caught.value) == "host 1 has ended, so this host parts from the others."
        )
        process_group.leave()
        joined(generation=1)
        assert group.failure() is None
        heartbeat = group.current[1]
        assert heartbeat._inside
    assert not heartbeat._inside


def test_a_generation_that_has_ended_is_not_joined(monkeypatch):
    monkeypatch.setattr(process_group, "_ended", None)
    process_group.abort(7, "Host 1 has ended.")
    first, _ = memberships(2, generation=7)
    for _ in range(2):
        with pytest.raises(LinkError, match=r"Host 1 has ended\."):
            process_group.join(first)
    assert group.joined() is None


@pytest.mark.parametrize("rank", [0, 1])
def test_who_connects_to_a_host_that_has_gone_hears_of_it(monkeypatch, rank):
    """Whether it waits for the other one to connect, or connects itself."""
    monkeypatch.setattr(process_group, "_ended", None)
    mine = memberships(2, generation=3)[rank]
    before = len(os.listdir("/proc/self/fd"))

    def gone():
        until(lambda: process_group._joining)
        process_group.abort(2, "An earlier one.")
        process_group.abort(3, "Host 1 has ended.")

    error, _ = in_threads([lambda: process_group.join(mine), gone])
    assert isinstance(error, LinkError) and str(error) == "Host 1 has ended."
    assert group.joined() is None
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("steps", [0, 1])
def test_a_host_that_leaves_before_it_connects_is_not_waited_for(monkeypatch, steps):
    """Neither by the first host, which listens, nor by the second, which dials."""
    monkeypatch.setattr(group, "_member", None)
    monkeypatch.setattr(process_group, "_ended", None)
    token, long_s = "a secret of all hosts", 10 * HANG_S
    with Coordinator(2, 2, token, fail_seconds=long_s) as coordinator:
        place = ElasticPlace(coordinator.address, token, 0)
        environ = environment.elastic_variables(place)
        other = Member(coordinator.address, token, slot=1)
        member = group.member(environ)
        calls = [lambda: member.next(0), lambda: other.next(steps)]
        membership, _ = in_threads(calls)
        assert membership.rank == steps
        other.leave("SIGTERM")
        other.close()
        with pytest.raises(LinkError, match=r"Host [01] \(.*\) leaves: SIGTERM\."):
            process_group.join(membership)
        assert group.joined() is None
        member.close()


def test_this_host_follows(joined):
    assert this_host() is ALONE
    for generation in range(2):
        communicator = joined(generation=generation)
        host = this_host()
        assert host is this_host()
        assert (host.count, host.index) == (2, 0)
        assert host.communicator is group.communicator() is not communicator
        process_group.leave(0)
    assert this_host() is ALONE


def test_a_process_is_started_as_one_that_joins_whoever_comes(monkeypatch):
    """The other one of the first generation is lost before it has connected."""
    monkeypatch.setattr(group, "_member", None)
    monkeypatch.setattr(process_group, "_ended", None)
    with Coordinator(1, 2, "a secret of all hosts") as coordinator:
        place = ElasticPlace(coordinator.address, "a secret of all hosts", 0)
        environ = environment.elastic_variables(place)
        other = Member(coordinator.address, "a secret of all hosts", slot=1)

        def goes():
            assert other.next(0).count == 2
            other.close()

        def joins():
            # It joins nobody before it trains.
            assert group.join_as_started("auto", environ) is None
            return process_group.join_next(0)

        joined, _ = in_threads([joins, goes])
        assert (joined.generation, joined.count) == (1, 1)
        assert group.joined() is joined
        # It computes as one that is alone.
        assert this_host() is ALONE
        assert group.join_as_started("auto", environ) is joined
        member = group.member()
        assert member is group.member(environ)
        # One arrives, and thinks better of it.
        other = Member(coordinator.address, "a secret of all hosts", slot=1)
        comes = threading.Thread(target=in_threads, args=[[lambda: other.next(0)]])
        comes.start()
        until(lambda: member.change)
        other.close()
        comes.join()
        found = process_group.join_next(5)
        assert (found.generation, found.count) == (2, 1)
        process_group.leave()
        member.close()
