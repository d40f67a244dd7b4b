"""What hosts tell one another of their ends: who, why, in time, and of nobody else."""

import json
import os
import queue
import socket
import subprocess
import sys
import threading

import pytest

from tests.limits import HANG_S
from towers.cluster import heartbeat
from towers.cluster.heartbeat import Heartbeat
from towers.cluster.links import LinkError
from towers.program.ending import ANOTHER_FAILED


@pytest.fixture(autouse=True)
def times(monkeypatch):
    """Beats that come often; nothing ends this process."""
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    # A stand-in sends no beats, for as long as a test takes on a busy machine.
    monkeypatch.setattr(heartbeat, "SILENT_S", 3600.0)
    monkeypatch.setattr(heartbeat, "LEFT_S", 0.1)
    monkeypatch.setattr(heartbeat, "END_S", 3600.0)


def end(connection):
    """Closes what was sent last; to close with beats unread would throw it away."""
    connection.shutdown(socket.SHUT_WR)
    with connection:
        while connection.recv(1000):
            pass


class Hosts:
    """Heartbeats of this process, and sockets in the place of others.

    Attributes:
        first: That of the first host.
        told: What another host needs to connect.
        failures: What each of them says has failed.
    """

    def __init__(self, count):
        self.names = [f"host {k}" for k in range(count)]
        self.failures = [queue.Queue() for _ in self.names]
        self.first = self.beat(0)
        self.told = self.first.listen("127.0.0.1")

    def beat(self, rank):
        return Heartbeat(rank, self.names, self.failures[rank].put)

    def join(self, rank):
        one = self.beat(rank)
        one.connect(self.told)
        self.heard(rank)
        return one

    def heard(self, rank):
        """Waits until the first host has heard of another one."""
        self.until(lambda ranks: rank in ranks)

    def until(self, holds):
        """Waits for what holds of the ranks of those that are connected."""
        for _ in range(HANG_S * 100):
            if holds([key.data.rank for key in self.first._connections.keys()]):
                return
            threading.Event().wait(0.01)
        raise AssertionError("it never holds")

    def connect(self, *lines):
        """A socket that has said some lines."""
        address, port, _ = json.loads(self.told)
        connection = socket.create_connection((address, port), timeout=HANG_S)
        for line in lines:
            connection.sendall(line + b"\n")
        return connection

    def stand_in(self, rank):
        """A socket that says nothing more than who it is."""
        secret = json.loads(self.told)[2]
        said = json.dumps({"rank": rank, "secret": secret}).encode()
        connection = self.connect(said)
        self.heard(rank)
        return connection

    def failure(self, rank):
        return self.failures[rank].get(timeout=HANG_S)


def line(**message):
    return json.dumps(message).encode() + b"\n"


def test_all_others_hear_of_an_end_and_of_the_first_alone():
    hosts = Hosts(4)
    hosts.join(1)
    second, third = hosts.stand_in(2), hosts.stand_in(3)
    second.close()
    assert hosts.failure(0) == hosts.failure(1) == "host 2 has ended"
    third.close()
    hosts.until(lambda ranks: 3 not in ranks)
    assert hosts.failures[0].empty()


def test_hosts_say_what_they_do():
    hosts = Hosts(4)
    others = [hosts.join(rank) for rank in (1, 2)]
    hosts.stand_in(3)
    for rank, each in enumerate([hosts.first, *others]):
        each.describe = lambda rank=rank: ["gradients", f"does {rank}"]
    # The last one is silent.
    expected = {rank: ["gradients", f"does {rank}"] for rank in range(3)}
    assert others[0].ask(0.2) == hosts.first.ask(0.2) == expected


def test_an_end_of_the_first_host():
    hosts = Hosts(2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        hosts.told = json.dumps([*server.getsockname(), "secret"])
        hosts.beat(1).connect(hosts.told)
        connection, _ = server.accept()
        connection.sendall(line(host=0, left=1, why="OSError: no space left"))
        end(connection)
    assert hosts.failure(1) == "host 0 has ended: OSError: no space left"


def test_silence_accuses_nobody_alone(monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENT_S", 1.0)
    hosts = Hosts(3)
    hosts.join(1)
    silent = hosts.stand_in(2)
    said = (
        "host 2 has not been heard by host 0 for 1 s: it is stopped, or cut off from it"
    )
    assert hosts.failure(0) == hosts.failure(1) == said
    silent.close()


def test_the_reason_of_an_error_is_told():
    hosts = Hosts(3)
    hosts.join(1)
    connection = hosts.stand_in(2)
    # What does not come whole is put together.
    told = line(host=2, left=1, why="ValueError: bad record 7")
    connection.sendall(told[:9])
    connection.sendall(told[9:])
    end(connection)
    assert hosts.failure(0) == "host 2 has ended: ValueError: bad record 7"
    assert hosts.failure(1) == "host 2 has ended: ValueError: bad record 7"


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r",
        b"[" * 60_000,
        b"\xff\xfe\x00",
        b'{"rank": 1, "secret": "wrong"}',
        b'{"rank": 1, "secret": "w\xc3\xb6rong"}',
        b'{"failed": 1, "why": "is accused"}',
        b"5",
        b"x" * 200_000,
    ],
)
def test_strangers_harm_nobody(said):
    hosts = Hosts(2)
    with hosts.connect(*[said] if said else []) as stranger:
        # It is not told anything, and what it said is forgotten.
        if said:
            stranger.settimeout(HANG_S)
            try:
                assert stranger.recv(100) == b""
            except ConnectionResetError:
                pass
        connection = hosts.stand_in(1)
        assert connection.recv(4) == b'{"be'
    connection.close()
    assert hosts.failure(0) == "host 1 has ended"


@pytest.mark.parametrize("rank", [2, -1, -3, "1", None])
def test_a_host_that_is_none(rank):
    hosts = Hosts(2)
    secret = json.loads(hosts.told)[2]
    with hosts.connect(line(rank=rank, secret=secret)[:-1]) as connection:
        assert connection.recv(100) == b""
    hosts.stand_in(1).close()
    assert hosts.failure(0) == "host 1 has ended"


@pytest.mark.parametrize(
    "message",
    [
        {"left": 1, "host": 7, "why": "x"},
        {"left": 1, "host": [], "why": "x"},
        {"left": None, "host": 1, "why": "x"},
        {"does": {"a": 1}, "said": 1},
        {"done": "1"},
        {"done": 3},
        {"failed": 9, "why": "x"},
    ],
)
def test_a_message_about_no_host_ends_its_own_connection_only(message):
    hosts = Hosts(3)
    with hosts.stand_in(1) as connection:
        connection.sendall(line(**message))
        while connection.recv(4096):
            pass
    hosts.stand_in(2).close()
    assert hosts.failure(0) == "host 2 has ended"


def test_many_strangers(monkeypatch):
    """The oldest has to go, so they keep no host out; all hosts may come at once."""
    monkeypatch.setattr(heartbeat, "_MOST_STRANGERS", 3)
    hosts = Hosts(2)
    strangers = [hosts.connect() for _ in range(3 + 2)]
    hosts.until(lambda ranks: len(ranks) == 5)
    strangers.append(hosts.connect())
    assert strangers[0].recv(1) == b""
    hosts.stand_in(1).close()
    assert hosts.failure(0) == "host 1 has ended"
    for each in strangers:
        each.close()


def test_once_all_are_there_nobody_listens():
    hosts = Hosts(3)
    hosts.connect().close()
    connections = [hosts.stand_in(1), hosts.stand_in(2)]
    # It stops in the thread that has heard of the last one.
    assert connections[1].recv(4) == b'{"be'
    with pytest.raises(ConnectionRefusedError):
        hosts.connect()
    connections[1].close()
    assert hosts.failure(0) == "host 2 has ended"
    connections[0].close()


def test_a_first_host_that_cannot_be_reached():
    with socket.socket() as holds:
        holds.bind(("127.0.0.1", 0))
        port = holds.getsockname()[1]
        told = json.dumps(["127.0.0.1", port, "secret"])
        with pytest.raises(LinkError, match=rf"host 0 at 127.0.0.1:{port}: .*refused"):
            Heartbeat(1, ["host 0", "host 1"], print).connect(told)


def test_who_waits_where_another_has_left_ends():
    hosts = Hosts(3)
    one = hosts.join(1)
    for each in hosts.first, one:
        each.enter()
    connection = hosts.stand_in(2)
    connection.sendall(line(host=2, left=1, why="KeyError: 'x'"))
    said = "host 2 has left what the others are in: KeyError: 'x'"
    assert hosts.failure(0) == hosts.failure(1) == said
    for each in hosts.first, one:
        each.leave(None)


def test_all_may_leave_by_an_error_and_go_on():
    hosts = Hosts(3)
    one = hosts.join(1)
    for each in hosts.first, one:
        each.enter()
    for each in hosts.first, one:
        each.leave(ValueError("the same on all"))
    for each in hosts.first, one:
        each.enter()
    # What is told then is told after all that could have been told before.
    connection = hosts.stand_in(2)
    connection.sendall(line(host=1, left=2, why="OSError: new"))
    assert hosts.failure(0) == "host 1 has left what the others are in: OSError: new"
    for each in hosts.first, one:
        each.leave(None)


def test_programs_that_end_together_are_no_failure():
    hosts = Hosts(3)
    others = [hosts.join(1), hosts.join(2)]
    ended = []
    threads = [
        threading.Thread(target=lambda each=each: ended.append(each.finish(HANG_S)))
        for each in [hosts.first, *others]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [True] * 3
    assert all(each.empty() for each in hosts.failures)


def test_a_program_that_ends_while_others_train():
    hosts = Hosts(2)
    one = hosts.join(1)
    hosts.first.enter()
    assert not one.finish(HANG_S)
    said = "host 1 has left what the others are in: its program has ended"
    assert hosts.failure(0) == hosts.failure(1) == said
    hosts.first.leave(None)


def test_who_is_done_may_go_while_others_work_alone():
    hosts = Hosts(3)
    one = hosts.join(1)
    connection = hosts.stand_in(2)
    connection.sendall(line(done=2))
    end(connection)
    hosts.until(lambda ranks: 2 not in ranks)
    assert hosts.failures[0].empty()
    # But nobody can train with it.
    one.enter()
    hosts.first.enter()
    said = "host 2 has left what the others are in: its program has ended"
    assert hosts.failure(0) == hosts.failure(1) == said
    for each in hosts.first, one:
        each.leave(None)


def test_who_takes_nothing_blocks_nobody_and_gets_whole_lines():
    hosts = Hosts(4)
    hosts.join(1)
    slow = hosts.stand_in(2)
    # More than the buffers of both ends hold.
    why, count = "x" * 50_000, 240
    hosts.first._connections.tell({"beat": 1})
    for _ in range(count):
        hosts.first._connections.tell({"host": 0, "left": 0, "why": why})
    # The others are as quick as before.
    hosts.stand_in(3).close()
    assert hosts.failure(0) == "host 3 has ended"
    # All lines come, and each is whole.
    with slow.makefile() as lines:
        heard = [json.loads(next(lines)) for _ in range(2)]
        while sum("left" in each for each in heard) < count:
            heard.append(json.loads(next(lines)))
    slow.close()
    assert {each.get("why") for each in heard if "left" in each} == {why}


def test_what_this_process_sleeps_through_is_no_silence(monkeypatch):
    """As SIGSTOP does, and SIGCONT, or a function in C that keeps Python's lock."""
    hosts = Hosts(3)
    hosts.join(1)
    clock, slept = heartbeat.time.monotonic, [0.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock() + slept[0])
    slept[0] = 3600.0
    connection = hosts.stand_in(2)
    with connection.makefile() as lines:
        assert [json.loads(next(lines)) for _ in range(2)] == [{"beat": 1}] * 2
    connection.close()
    assert hosts.failure(0) == hosts.failure(1) == "host 2 has ended"


STUCK = """
import signal, sys
from towers.cluster import heartbeat
heartbeat.BEAT_S, heartbeat.END_S = 0.02, 0.1
one = heartbeat.Heartbeat(1, ["host 0", "host 1"], print)
one.connect(sys.argv[1])
one.enter()
while True:
    signal.pause()
"""


def test_who_does_not_end_is_ended():
    with socket.create_server(("127.0.0.1", 0)) as server:
        told = json.dumps([*server.getsockname(), "secret"])
        stuck = subprocess.Popen(
            [sys.executable, "-c", STUCK, told],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = server.accept()
        connection.recv(10)
        connection.close()
        _, said = stuck.communicate(timeout=HANG_S)
    assert stuck.returncode == ANOTHER_FAILED
    assert said == "\ntowers: host 0 has ended; this host ends.\n"
