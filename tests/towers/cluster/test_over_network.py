"""Hosts meet over a network, whose cables can be cut."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import network

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
PORT = 8476
MEET = """
import socket, sys
from towers.hosts.group import ProcessPlace
from towers.cluster import rendezvous
from towers.cluster.rendezvous import meeting
rank, count, coordinator, seconds = sys.argv[1:]
rank, count, seconds = int(rank), int(count), float(seconds)
place = ProcessPlace(rank, count, coordinator, "secret", seconds, "eth0")
welcome = meeting.Meeting._welcome

async def tell(self, *about):
    come = await welcome(self, *about)
    print("come", flush=True)
    # What listens is at this address alone.
    for local in ("127.0.0.1", "::1"):
        try:
            socket.create_connection((local, place.coordinator.split(":")[1])).close()
            print(local, "listens")
        except OSError:
            pass
    return come

meeting.Meeting._welcome = tell
try:
    print(*rendezvous.meet(place).addresses)
except rendezvous.HostsMissingError as error:
    print(error)
"""


@pytest.fixture
def joined():
    if reason := network.why_not():
        pytest.skip(reason)
    with network.Network(3, mbit=100, delay_ms=50) as hosts:
        yield hosts


@pytest.fixture
def start(joined):
    def start(rank, count, seconds):
        coordinator = f"{joined.addresses[0]}:{PORT}"
        place = map(str, (rank, count, coordinator, seconds))
        return joined.start(
            rank,
            [sys.executable, "-c", MEET, *place],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(ROOT)},
        )

    return start


def test_each_is_where_the_others_reach_it(joined, start):
    told = [each.communicate()[0] for each in [start(k, 3, 300) for k in (2, 1, 0)]]
    found = told[0].split()
    assert [each.rpartition(":")[0] for each in found] == joined.addresses
    assert told[1] == told[0]
    assert told[2] == f"come\ncome\n{told[0]}"


def test_a_cable_that_is_cut_ends_the_waiting_on_both_sides(joined, start):
    first, second = start(0, 3, 1), start(1, 3, 5)
    assert first.stdout.readline() == "come\n"
    joined.cut(1)
    assert "host 2 of 3 did not come" in first.communicate()[0]
    said, _ = second.communicate()
    assert said.startswith("Within 5 s, host 1 of 3 (")
    assert "could not meet the first host at 10.77.0.1:8476 (" in said
