"""Connections through memory; both ends are in this process."""

import select
import socket

import numpy as np
import pytest

from tests.towers.cluster.in_threads import communicators, in_threads, on_each
from towers.cluster.links import shared_memory
from towers.cluster.links.shared_memory import SharedMemoryConnection, share


@pytest.fixture
def ends():
    first, second = socket.socketpair()
    shared = in_threads([lambda: share(first), lambda: share(second)])
    for each in (first, second):
        each.setblocking(False)
    yield shared
    for each in (first, second):
        each.close()


def _send(connection, data):
    data = memoryview(data)
    while data:
        try:
            data = data[connection.send(data) :]
        except BlockingIOError:
            select.select([connection], [], [], 30)


def _receive(connection, sizes):
    for size in sizes:
        data = memoryview(bytearray(size))
        place = 0
        while place < size:
            try:
                count = connection.recv_into(data[place:])
            except BlockingIOError:
                select.select([connection], [], [], 30)
            else:
                assert count
                place += count
        yield bytes(data)


def test_bytes_arrive_in_order(ends):
    """Both ways at once, more than fits, in messages of many sizes."""
    first, second = ends
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 300_000, 100).tolist()
    assert sum(sizes) > 3 * shared_memory._RING_BYTES
    data = [rng.bytes(size) for size in sizes]

    def send(connection):
        for each in data:
            _send(connection, each)

    def receive(connection):
        return [*_receive(connection, sizes)]

    # Two threads an end: one only sends, and one only receives.
    done = in_threads([lambda: send(first), lambda: receive(second)])
    assert done == [None, data]
    done = in_threads([lambda: send(second), lambda: receive(first)])
    assert done == [None, data]


def test_who_has_to_wait_is_told(ends):
    first, second = ends
    with pytest.raises(BlockingIOError):
        second.recv_into(memoryview(bytearray(1)))
    sent = 0
    with pytest.raises(BlockingIOError):
        while True:
            sent += first.send(memoryview(bytes(1000_000)))
    assert sent == shared_memory._RING_BYTES
    # Once enough was received, the end that waits is woken.
    assert not select.select([first], [], [], 0)[0]
    [*_receive(second, [shared_memory._PART_BYTES])]
    assert select.select([first], [], [], 30)[0]
    assert first.send(memoryview(b"more")) == 4


def test_what_was_sent_before_the_end_arrives(ends):
    first, second = ends
    first.send(memoryview(b"last"))
    first.close()
    assert [*_receive(second, [4])] == [b"last"]
    # The socket still has the byte that woke this end, and then its end.
    with pytest.raises(BlockingIOError):
        second.recv_into(memoryview(bytearray(1)))
    assert select.select([second], [], [], 30)[0]
    assert second.recv_into(memoryview(bytearray(1))) == 0
    with pytest.raises(OSError, match="closed"):
        while True:
            second.send(memoryview(bytes(1000_000)))


def test_hosts_at_one_address_share_memory():
    with communicators(3) as hosts:
        for comm in hosts:
            every = comm.links._to.values()
            assert {type(each) for each in every} == {SharedMemoryConnection}
        # It has no name in any file system, where a process that is killed would leave
        # it.
        assert "/memfd:towers (deleted)" in mapped()
    assert "/memfd:towers (deleted)" not in mapped()


def mapped():
    with open("/proc/self/maps") as file:
        return [line.split(maxsplit=5)[5].strip() for line in file if "towers" in line]


@pytest.mark.parametrize(
    "broken", ["none made", "none in reach", "another's", "other processor"]
)
def test_hosts_that_cannot_share_use_the_socket(monkeypatch, broken):
    """Where one of the two cannot, neither does."""
    made, other, calls = shared_memory._made, shared_memory._other, []

    def makes(opened):
        calls.append(None)
        return (None, 0, b"") if len(calls) == 1 else made(opened)

    def opens(process, file, proof):
        calls.append(None)
        if len(calls) > 1:
            return other(process, file, proof)
        return other(process, file, bytes(16)) if broken == "another's" else None

    if broken == "other processor":
        monkeypatch.setattr("platform.machine", lambda: "aarch64")
    else:
        name, does = ("_made", makes) if broken == "none made" else ("_other", opens)
        monkeypatch.setattr(shared_memory, name, does)
    with communicators(2) as hosts:
        for comm in hosts:
            assert {type(each) for each in comm.links._to.values()} == {socket.socket}
        arrays = [np.arange(100_000.0), np.ones(5)]
        for found in on_each(hosts, lambda _, c: c.grouped_all_reduce(arrays, "sum")):
            for total, array in zip(found, arrays, strict=True):
                np.testing.assert_array_equal(total, 2 * array)
