"""Collectives between hosts, which are threads here."""

import contextlib
import socket
import threading

import ml_dtypes
import numpy as np
import pytest

from tests.limits import HANG_S
from tests.towers.cluster.in_threads import (
    communicators,
    in_threads,
    memberships,
    on_each,
)
from tests.variants import slow
from towers.cluster import communicator as module
from towers.cluster.communicator import Communicator
from towers.cluster.links import LinkError, Links
from towers.hosts.group import HostsDifferError

COUNTS = (1, 2, 3, 4, 5, slow(7))


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("count", COUNTS)
def test_sums_of_any_size(count):
    """Those by doubling and those around the ring, of one block and of several."""
    block = module._BLOCK_BYTES // 4
    sizes = [0, 1, count, 8192, 8193, count * block - 1, count * block + 1]

    def add(rank, comm):
        found = []
        for size in sizes:
            mine = np.arange(size, dtype=np.float32) % 1000 + rank
            found.append(comm.all_reduce(mine.reshape(1, -1), "test"))
            np.testing.assert_array_equal(
                mine, np.arange(size, dtype=np.float32) % 1000 + rank
            )
        return found

    with communicators(count) as hosts:
        every = on_each(hosts, add)
    for found in every:
        for size, total in zip(sizes, found, strict=True):
            once = np.arange(size, dtype=np.float32) % 1000
            want = once * count + sum(range(count))
            np.testing.assert_array_equal(total, want[np.newaxis])


@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize("count", COUNTS)
def test_sums_of_many_arrays(count, wire):
    """As of one array, with as many messages; some have nothing."""
    wire = wire and np.dtype(wire)
    for sizes in ([3, 0, 5], [0], [70_000, 3, 0, 300_001, 1]):
        arrays = [np.arange(size, dtype=np.float32) % 100 for size in sizes]

        def add(rank, comm, arrays=arrays):
            found = comm.grouped_all_reduce(arrays, "test", wire)
            moved = comm.links.moved_bytes
            comm.all_reduce(np.concatenate(arrays), "test", wire)
            assert comm.links.moved_bytes == 2 * moved
            return found

        with communicators(count) as hosts:
            for found in on_each(hosts, add):
                for total, array in zip(found, arrays, strict=True):
                    np.testing.assert_array_equal(total, count * array)


@pytest.mark.parametrize("least", [5, 20_000])
@pytest.mark.parametrize("count", COUNTS)
def test_sums_are_scattered_and_gathered(count, least):
    """Hosts have parts of different sizes, and one has none."""
    sizes = [[least + k, 0, 3 * k + 1] if k != 1 else [] for k in range(count)]

    def numbers(add=0.0):
        return [
            [np.arange(n, dtype=np.float32) + 100 * k + add for n in of_host]
            for k, of_host in enumerate(sizes)
        ]

    def scatter(rank, comm):
        return comm.reduce_scatter(numbers(rank), "test")

    def gather(rank, comm):
        parts = [[np.zeros_like(part) for part in of_host] for of_host in numbers()]
        parts[rank] = numbers(-0.0)[rank]
        comm.gather_parts(parts, "test")
        return parts

    with communicators(count) as hosts:
        scattered, gathered = on_each(hosts, scatter), on_each(hosts, gather)
    ranks = sum(range(count))
    for rank, found in enumerate(scattered):
        for total, part in zip(found, numbers()[rank], strict=True):
            np.testing.assert_array_equal(total, count * part + ranks)
    for found in gathered:
        for parts, expected in zip(found, numbers(), strict=True):
            for part, value in zip(parts, expected, strict=True):
                np.testing.assert_array_equal(part, value)


@pytest.mark.parametrize("count", COUNTS)
def test_each_host_sends_each_other_its_own(count):
    """Parts of any sizes, some empty, some larger than a buffer between hosts."""
    sizes = [0, 1, 7, module._BLOCK_BYTES + 3]

    def part(source, to, dtype, k):
        size = sizes[(source + 2 * to + k) % len(sizes)]
        return (np.arange(size) + 10 * source + to).astype(dtype)

    def of_pair(source, to):
        return [part(source, to, np.float32, 0), part(source, to, np.int16, 1)]

    def send(rank, comm):
        first = comm.links.moved_bytes
        found = comm.all_to_all([of_pair(rank, to) for to in range(count)], "test")
        moved = comm.links.moved_bytes - first
        sizes = [[each.size for each in of_pair(k, rank)] for k in range(count)]
        sent = [of_pair(rank, to) for to in range(count)]
        again = comm.all_to_all(sent, "test", sizes)
        for one, other in zip(found, again, strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_array_equal(a, b)
        nothing = comm.all_to_all([[np.zeros(0)]] * count, "nothing")
        assert [each.size for (each,) in nothing] == [0] * count
        return found, moved

    with communicators(count) as hosts:
        every = on_each(hosts, send)
    for rank, (found, moved) in enumerate(every):
        for source, arrays in enumerate(found):
            for one, expected in zip(arrays, of_pair(source, rank), strict=True):
                np.testing.assert_array_equal(one, expected)
                assert one.dtype == expected.dtype
        others = [of_pair(rank, to) for to in range(count) if to != rank]
        sent = sum(each.nbytes for arrays in others for each in arrays)
        # And how large all are, once to as many as the number of hosts has bits.
        assert sent <= moved <= sent + 4 * count.bit_length() * 8 * 2 * count**2


@pytest.mark.parametrize("size", [100, 100_003])
@pytest.mark.parametrize("count", [3, 5])
def test_all_hosts_get_the_same_bits_each_time(count, size):
    draws = np.random.default_rng(0).standard_normal((count, size))
    values = (draws * 10.0 ** np.arange(-3, count - 3)[:, None]).astype(np.float32)
    with communicators(count) as hosts:
        every = [
            on_each(
                hosts,
                lambda rank, comm: comm.all_reduce(values[rank], "test"),
            )
            for _ in range(2)
        ]
    for found in [*every[0], *every[1]]:
        assert found.tobytes() == every[0][0].tobytes()


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_what_travels_rounded(count, wire):
    """All hosts get the same bits, within the rounding of each time it is sent on."""
    wire = np.dtype({"bfloat16": ml_dtypes.bfloat16}.get(wire, wire))
    draws = np.random.default_rng(0).standard_normal((count, 300_001))
    values = draws.astype(np.float32)
    with communicators(count) as hosts:
        found = on_each(
            hosts,
            lambda rank, comm: comm.all_reduce(values[rank], "test", wire),
        )
        moved = hosts[0].links.moved_bytes
    bound = count * np.abs(values).sum(axis=0).max() * ml_dtypes.finfo(wire).eps / 2
    for each in found:
        assert each.dtype == np.float32 and each.tobytes() == found[0].tobytes()
        assert 0 < np.abs(each - values.sum(axis=0)).max() < bound
    # Of numbers of 16 bits.
    assert moved == pytest.approx(2 * 2 * 300_001 * (count - 1) / count, rel=1e-4)


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint8"])
def test_sums_of_other_types(dtype):
    value = np.array([1, 2, 3], dtype)
    with communicators(2) as hosts:
        for found in on_each(hosts, lambda _, comm: comm.all_reduce(value, "test")):
            assert found.dtype == dtype and found.tolist() == [2, 4, 6]


@pytest.mark.parametrize("count", COUNTS)
def test_bytes_of_all_hosts(count):
    """Also where some have none."""
    data = [bytes([k]) * (0 if k == 1 else 300_000 * k + 1) for k in range(count)]
    with communicators(count) as hosts:
        every = on_each(
            hosts,
            lambda rank, comm: comm.all_gather(data[rank], "test"),
        )
    for found in every:
        assert [bytes(each) for each in found] == data


@pytest.mark.parametrize("count", COUNTS)
def test_the_first_hosts_bytes(count):
    sent = np.arange(1_000_001, dtype=np.uint8)

    def receive(rank, comm):
        buffer = sent.copy() if rank == 0 else np.zeros_like(sent)
        comm.broadcast(memoryview(buffer), "test")
        return buffer

    with communicators(count) as hosts:
        for found in on_each(hosts, receive):
            np.testing.assert_array_equal(found, sent)


def test_a_host_connects_to_few_of_many():
    """Of 1,000 each has connections for the ring and for its bits."""
    peers = {}
    for rank in range(1000):
        comm = module.Communicator.__new__(module.Communicator)
        comm._rank, comm._count, comm._power = rank, 1000, 512
        comm._next, comm._previous = (
            (rank + 1) % 1000,
            (rank - 1) % 1000,
        )
        peers[rank] = comm._peers()
        assert len(peers[rank]) <= 12
    for rank, its in peers.items():
        assert rank not in its and all(rank in peers[peer] for peer in its)


def test_what_is_not_the_same_is_said():
    def add(rank, comm):
        return comm.all_reduce(np.ones(3 + rank, np.float32), ["sum", "state"][rank])

    with communicators(2) as hosts:
        first, second = on_each(hosts, add)
    assert isinstance(first, HostsDifferError) and isinstance(second, HostsDifferError)
    assert str(first).startswith(
        "host 0 exchanges sum (12 bytes) where host 1 exchanges state (16 bytes);"
    )


def test_hosts_that_round_differently_are_told():
    """They would take the bytes of one type for as many of the other."""
    wires = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
    ones = np.ones(100_000, np.float32)
    with communicators(2) as hosts:
        found = on_each(hosts, lambda k, comm: comm.all_reduce(ones, "sum", wires[k]))
    assert [type(each) for each in found] == [HostsDifferError] * 2
    assert "exchanges float16 of sum (100,000 bytes) where" in str(found[0])


def test_a_host_that_ends_ends_the_others():
    with communicators(3) as hosts:

        def add(rank, comm):
            if rank == 1:
                return comm.links.close()
            return comm.all_reduce(np.ones(100_000, np.float32), "sum")

        first, _, third = on_each(hosts, add)
        assert isinstance(first, LinkError) and isinstance(third, LinkError)
        # Nothing goes on over what has failed.
        with pytest.raises(LinkError):
            hosts[0].all_reduce(np.ones(1), "next")


def test_whoever_waits_is_freed():
    with communicators(2) as (first, _):
        failed = []

        def wait():
            try:
                first.all_reduce(np.ones(1), "sum")
            except LinkError as error:
                failed.append(str(error))

        waits = threading.Thread(target=wait)
        waits.start()
        while first.links.doing is None:
            pass
        assert first.links.doing[0] == "sum"
        first.links.abort("host 1 has ended")
        waits.join(HANG_S)
    assert failed == ["host 1 has ended"]


def test_what_waiting_takes_is_counted():
    with communicators(2) as hosts:
        on_each(
            hosts,
            lambda _, comm: comm.all_reduce(np.ones(10**6, np.float32), "sum"),
        )
        # As much as the array, around a ring of two.
        assert [comm.links.moved_bytes for comm in hosts] == [4 * 10**6] * 2


def test_strangers_are_turned_away(monkeypatch):
    """Those that say nothing of ours, and hosts with another token."""
    monkeypatch.setattr("towers.cluster.links.greeting._CONNECT_S", 0.5)
    first, second = (Links(each) for each in memberships(2, token="secret"))
    other = Links(memberships(2, token="other")[1])
    other._membership = other._membership.__class__(
        1, first._membership.addresses, first._membership.names, token="other"
    )
    address = first._membership.addresses[0].split(":")

    def disturb():
        while True:
            try:
                with socket.create_connection((address[0], int(address[1]))) as odd:
                    odd.sendall(b"GET / HTTP/1.1\r\nHost: towers\r\n\r\n")
                    return odd.recv(100)
            except ConnectionRefusedError:
                pass
            except ConnectionResetError:
                return b""

    calls = [lambda: Communicator(first), disturb, lambda: Communicator(other)]
    ring_of_first, answer, ring_of_other = in_threads(calls)
    assert isinstance(ring_of_first, LinkError), ring_of_first
    assert "host 1 did not connect within 0.5 s" in str(ring_of_first)
    assert isinstance(ring_of_other, LinkError)
    assert not answer
    second.close()


@pytest.mark.parametrize("most", [2, 100])
def test_silent_strangers_delay_no_host(monkeypatch, most):
    """However many have connected before it, and say nothing or a part of it."""
    monkeypatch.setattr("towers.cluster.links.greeting._CONNECT_S", 5.0)
    monkeypatch.setattr("towers.cluster.links.greeting._MOST_STRANGERS", most)
    first, second = (Links(each) for each in memberships(2, token="secret"))
    address = first.own_address, int(first._membership.addresses[0].split(":")[1])
    strangers, are_there = [], threading.Event()

    def disturb():
        while len(strangers) < 8:
            try:
                strangers.append(socket.create_connection(address))
            except ConnectionRefusedError:
                continue
            if len(strangers) % 2:
                strangers[-1].sendall(b"towers")
        are_there.set()

    def come():
        are_there.wait()
        return Communicator(second)

    hosts = in_threads([lambda: Communicator(first), disturb, come])[::2]
    for found in on_each(hosts, lambda _, comm: comm.all_reduce(np.ones(2), "sum")):
        assert found.tolist() == [2, 2]
    # Nobody speaks to them any more.
    for each in strangers:
        with each:
            each.settimeout(HANG_S)
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""


def test_a_port_in_use_is_said(monkeypatch):
    monkeypatch.setattr("towers.cluster.links.greeting._CONNECT_S", 0.1)
    first, _ = memberships(2)
    with socket.socket() as holds:
        host, port = first.addresses[0].split(":")
        holds.bind((host, int(port)))
        holds.listen()
        with pytest.raises(LinkError, match=rf"cannot listen at {host}:{port}: Addr"):
            Communicator(Links(first))


def test_it_listens_at_its_own_address_only():
    first, second = memberships(2)
    links = Links(first)
    found = []

    def look():
        while True:
            with open("/proc/self/net/tcp") as file:
                lines = [line.split()[1:4] for line in file][1:]
            port = f"{int(first.addresses[0].split(':')[1]):04X}"
            listening = [at for at, _, state in lines if state == "0A"]
            if at := [each for each in listening if each.endswith(f":{port}")]:
                found.extend(at)
                return Communicator(Links(second))

    in_threads([lambda: Communicator(links), look])
    # 127.0.0.1, in the order of bytes that Linux writes.
    assert [each.split(":")[0] for each in found] == ["0100007F"]
    # Once connected, nobody listens any more.
    with open("/proc/self/net/tcp") as file:
        port = f":{int(first.addresses[0].split(':')[1]):04X}"
        states = [line.split()[3] for line in file if line.split()[1].endswith(port)]
    assert "0A" not in states
