"""Hosts meet, in threads of one process: all learn the same, or the same sentence."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import socket
import threading

import pytest

from tests.limits import HANG_S
from towers.cluster import addresses
from towers.cluster.rendezvous import (
    HostsMissingError,
    RendezvousError,
    channel,
    guest,
    host,
    meet,
    meeting,
)
from towers.hosts.group import ProcessPlace

# Longer than any test may take: who waits for that, fails.
LONG = 10 * HANG_S
SHORT = 0.2


def free_port():
    with addresses.held_port("127.0.0.1") as held:
        return held.getsockname()[1]


def places(count, seconds=LONG, **changes):
    first = ProcessPlace(0, count, f"127.0.0.1:{free_port()}", "secret", seconds)
    first = dataclasses.replace(first, **changes)
    return [dataclasses.replace(first, rank=rank) for rank in range(count)]


def start(place):
    """Starts a host in a thread; its future has what it learned."""
    future = concurrent.futures.Future()

    def run():
        try:
            future.set_result(meet(place))
        except BaseException as error:
            future.set_exception(error)

    # Not a pool's: whoever waits in vain must not keep pytest.
    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.fixture
def said(monkeypatch):
    """What hosts say to the user, and when it is the first."""
    lines = []
    for name in ("say", "warn"):
        monkeypatch.setattr(host_voice := meeting.voice, name, lines.append)
        assert host_voice is guest.voice
    return lines


def connected(place):
    """Connects to the first host as soon as it listens."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(addresses.split(place.coordinator))


@pytest.fixture
def welcomed(monkeypatch):
    """Is set when a host has come to the first one."""
    event = threading.Event()
    welcome = meeting.Meeting._welcome

    async def notice(self, *about):
        came = await welcome(self, *about)
        event.set()
        return came

    monkeypatch.setattr(meeting.Meeting, "_welcome", notice)
    return event


def sentence(future):
    error = future.exception(HANG_S)
    assert isinstance(error, RendezvousError), error
    assert "\n" not in str(error) and str(error).endswith(".")
    return str(error)


def test_all_learn_the_same():
    first, *others = places(4, generation=2)
    # The first one comes last.
    futures = [*map(start, reversed(others)), start(first)]
    met = sorted((each.result(HANG_S) for each in futures), key=lambda m: m.rank)
    assert [each.rank for each in met] == [0, 1, 2, 3]
    assert len({(each.addresses, each.names, each.generation) for each in met}) == 1
    one = met[0]
    assert (one.count, one.generation, len({*one.addresses})) == (4, 2, 4)
    node = f"{socket.gethostname()}, pid {os.getpid()}"
    assert one.names == tuple(f"host {rank} ({node})" for rank in range(4))
    for address in one.addresses:
        name, port = addresses.split(address)
        assert name == "127.0.0.1"
        with socket.socket() as server:
            server.bind((name, port))  # free, for the host to listen


def test_the_addresses_of_tf_config_are_kept():
    named = "a:1", "b:2"
    futures = [*map(start, places(2, addresses=named))]
    assert {each.result(HANG_S).addresses for each in futures} == {named}


def test_who_is_missing_is_named_on_all():
    first, one, _, _ = places(4, SHORT)
    futures = [start(first), start(dataclasses.replace(one, join_seconds=LONG))]
    told = {sentence(each) for each in futures}
    assert len(told) == 1
    (text,) = told
    assert text.startswith(f"Within {SHORT} s, hosts 2 and 3 of 4 did not come to ")
    assert "there: host 0 (" in text and ") and host 1 (" in text
    assert all(isinstance(each.exception(), HostsMissingError) for each in futures)


def test_a_first_host_that_is_missing_is_named():
    _, one = places(2, SHORT)
    future = start(one)
    text = sentence(future)
    assert text.startswith(f"Within {SHORT} s, host 1 of 2 (")
    assert f"the first host at {one.coordinator} (Connection refused)" in text
    assert isinstance(future.exception(), HostsMissingError)


def test_an_unknown_coordinator():
    first, one = places(2, SHORT, coordinator="no.such.host.invalid:7")
    assert "Name or service not known" in sentence(start(first))
    assert "Name or service not known" in sentence(start(one))


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        b"x" * 2**21,
        b"{}\n",
    ],
    ids=["silent", "http", "noise", "too long", "no code"],
)
def test_a_stranger_changes_nothing(said, words):
    first, one = places(2)
    futures = [start(first)]
    with connected(first) as stranger, connected(first) as gone:
        for connection in stranger, gone:
            with contextlib.suppress(ConnectionError):  # It may have been closed.
                connection.sendall(words)
        gone.close()
        futures.append(start(one))
        assert {each.result(HANG_S).count for each in futures} == {2}


GOOD = {
    "rank": 1,
    "count": 2,
    "generation": 0,
    "node": "node1",
    "pid": 7,
    "address": "127.0.0.1:7",
    "versions": host.versions(),
}
MALFORMED = {
    "no object": "[]",
    "no JSON": "{",
    "deep": "[" * 16_000,
    "nothing": "{}",
    "more": json.dumps(GOOD | {"more": 1}),
    "no versions": json.dumps(GOOD | {"versions": {}}),
    "versions of numbers": json.dumps(
        GOOD | {"versions": dict.fromkeys(host.versions(), 3)}
    ),
    **{
        f"{name} {value!r}": json.dumps(GOOD | {name: value})
        for name in GOOD
        for value in (None, [], {"a": 1}, True, 1.5, -1)
        if not (name == "pid" and value == -1)
    },
    "rank as text": json.dumps(GOOD | {"rank": "1"}),
    "address of nothing": json.dumps(GOOD | {"address": "here"}),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_message_ends_its_own_connection_only(said, kind):
    async def malformed(place):
        end = await channel.connect(*addresses.split(place.coordinator))
        number = (await end.receive())["towers"]
        text = MALFORMED[kind]
        if text.endswith("}"):
            added = {"proof": channel.proof(None, number)}
            text = json.dumps(json.loads(text) | added)
        end._writer.write(text.encode() + b"\n")
        with pytest.raises(ConnectionResetError):
            await end.receive()
        await end.close()

    first, one = places(2, token=None)
    futures = [start(first)]
    connected(first).close()
    for _ in range(2):
        asyncio.run(asyncio.wait_for(malformed(first), HANG_S))
    futures.append(start(one))
    assert {each.result(HANG_S).count for each in futures} == {2}
    assert said[1:] == [
        "A process on 127.0.0.1 sent a message that no host of Towers sends; its "
        "connection was closed."
    ]


def test_another_token_is_turned_away(said):
    first, one = places(2)
    hosts = [start(first)]
    connected(first).close()
    other = start(dataclasses.replace(one, token="guess"))
    assert "has another token than host 1 (" in sentence(other)
    assert not hosts[0].done()
    hosts.append(start(one))
    assert {each.result(HANG_S).count for each in hosts} == {2}
    assert said == [
        "A process on 127.0.0.1 has another token, and was turned away; give all "
        "hosts the same TOWERS_TOKEN."
    ]


def test_no_token_is_said(said):
    hosts = [*map(start, places(2, token=None))]
    assert {each.result(HANG_S).count for each in hosts} == {2}
    assert len(said) == 1 and said[0].startswith("Hosts meet without a token, so who")


def test_one_number_twice_is_told_to_all_at_once():
    first, one, _ = places(3)
    told = {sentence(each) for each in [start(first), start(one), start(one)]}
    assert len(told) == 1
    assert told.pop().startswith("2 processes are host 1: host 1 (")


def test_different_counts_are_told_to_all_at_once():
    first, one = places(2)
    told = {
        sentence(e) for e in [start(first), start(dataclasses.replace(one, count=3))]
    }
    assert len(told) == 1
    text = told.pop()
    assert text.startswith("Hosts expect different numbers of hosts: 2 on host 0 (")
    assert " and 3 on host 1 (" in text


HOST = host.HostDescription(
    *(0, 3, 0, "n", 1, "a:1"),
    {"python": "3", "tensorflow": "2.21.0", "keras": "3.15", "towers": "1"},
)


@pytest.mark.parametrize("package", ["tensorflow", "keras", "towers"])
def test_different_versions_are_told(package):
    other = dataclasses.replace(HOST, rank=1, versions=HOST.versions | {package: "0.1"})
    third = dataclasses.replace(HOST, rank=2)
    assert host.difference([HOST, third]) is None
    assert host.difference([other, third, HOST]) == (
        f"Hosts have different versions of {package}: {HOST.versions[package]} on host "
        "0 (n, pid 1) and host 2 (n, pid 1) and 0.1 on host 1 (n, pid 1); install the "
        "same one on all."
    )


def test_an_old_generation_is_turned_away():
    first, one = places(2, generation=1)
    hosts = [start(first)]
    old = start(dataclasses.replace(one, generation=0))
    assert re.match(
        r"This is generation 0 of host 1 .* generation 1 has", sentence(old)
    )
    assert isinstance(old.exception(), HostsMissingError)
    hosts.append(start(one))
    assert {each.result(HANG_S).generation for each in hosts} == {1}


def test_a_new_generation_ends_the_old_one_and_waits_for_its_own(welcomed):
    first, one, _ = places(3)
    old = [start(first), start(one)]
    assert welcomed.wait(HANG_S)
    newer = [dataclasses.replace(each, count=2, generation=1) for each in (first, one)]
    futures = [start(newer[1])]
    for each in old:
        assert sentence(each).startswith("Generation 1 has begun on host 1 (")
        assert isinstance(each.exception(), HostsMissingError)
    futures.append(start(newer[0]))
    assert {each.result(HANG_S).generation for each in futures} == {1}


async def come(place):
    """Comes as a host whose server is at x:1; returns its end of the connection."""
    came = await channel.connect(*addresses.split(place.coordinator))
    own = dataclasses.asdict(host.HostDescription.here(place, "x:1"))
    number = (await came.receive())["towers"]
    await came.send(own | {"proof": channel.proof(place.token, number)})
    assert (await came.receive())["seconds_left"] > 0
    return came


def test_a_host_that_goes_may_come_again(monkeypatch):
    first, one, two = places(3)
    gone = threading.Event()
    visit = meeting.Meeting._visit

    async def notice(self, end):
        await visit(self, end)
        gone.set()

    async def come_and_go():
        await (await come(one)).close()

    monkeypatch.setattr(meeting.Meeting, "_visit", notice)
    hosts = [start(first)]
    connected(first).close()
    assert gone.wait(HANG_S)
    gone.clear()
    asyncio.run(come_and_go())
    assert gone.wait(HANG_S)
    hosts += [start(one), start(two)]
    for each in hosts:
        assert "x:1" not in each.result(HANG_S).addresses


def test_a_host_that_goes_before_it_has_answered_is_named():
    first, one = places(2)
    future = start(first)
    connected(first).close()

    async def come_and_not_answer():
        came = await come(one)
        assert (await came.receive())["addresses"][1] == "x:1"
        await came.close()

    asyncio.run(come_and_not_answer())
    assert re.fullmatch(r"Gone while the hosts met: host 1 \(.*\)\.", sentence(future))


def test_who_waits_says_so(said, monkeypatch):
    for module in (meeting, guest):
        monkeypatch.setattr(module, "QUIET_S", 0.0)
    first, one = places(2, SHORT)
    sentence(start(one))
    assert said[0].startswith(f"Waiting for the first host at {one.coordinator} (")
    sentence(start(first))
    assert said[1].startswith(f"Waiting for host 1 of 2 at {one.coordinator}, for 0 s")


def test_a_port_that_is_taken(monkeypatch):
    monkeypatch.setattr(meeting, "_PORT_S", 0.0)
    first, _ = places(2)
    with socket.socket() as other:
        other.bind(addresses.split(first.coordinator))
        other.listen()
        text = sentence(start(first))
    assert f"cannot listen at {first.coordinator} (Address already in use)" in text


def test_a_port_of_a_process_that_ends_is_waited_for():
    first, one = places(2)
    with socket.socket() as other:
        other.bind(addresses.split(first.coordinator))
        other.listen()
        hosts = [start(first)]
    hosts.append(start(one))
    assert {each.result(HANG_S).count for each in hosts} == {2}


def test_a_name_that_others_cannot_reach(monkeypatch):
    """As Debian has it: the own name is 127.0.1.1."""
    monkeypatch.setattr(addresses, "resolved", lambda name: "127.0.1.1")
    first, one = places(2)
    port = addresses.split(first.coordinator)[1]
    named = dataclasses.replace(first, coordinator=f"node0:{port}")
    assert "its name node0 means 127.0.1.1, which others" in sentence(start(named))
    # The interface that they reach is named.
    hosts = [start(dataclasses.replace(named, interface="lo")), start(one)]
    assert {each.result(HANG_S).addresses[0][:10] for each in hosts} == {"127.0.0.1:"}


def test_an_interface_that_is_not_there():
    first, _ = places(2, interface="none0")
    error = start(first).exception(HANG_S)
    assert isinstance(error, ValueError)
    assert str(error).startswith("Received the interface none0; expected one of")


def test_hosts_meet_where_a_loop_runs_as_in_a_notebook():
    first, one = places(2)
    other = start(one)

    async def cell():
        return meet(first)

    assert asyncio.run(cell()).addresses == other.result(HANG_S).addresses


def test_only_who_knows_the_token_has_the_proof():
    """It is of a number that is drawn for each connection."""
    first, second = channel.proof("secret", "12"), channel.proof("secret", "34")
    assert len({first, second, channel.proof("guess", "12"), "secret"}) == 4
    assert channel.proof(None, "12") == channel.proof("", "12")


def test_no_child_keeps_a_connection():
    """A child that is forked while hosts meet keeps none of them waiting."""
    first, one = places(2)
    hosts = [start(first)]
    connected(first).close()

    async def come_and_fork():
        came = await come(one)
        child = os.fork()
        if not child:
            os._exit(not os.path.samestat(os.fstat(came.fileno()), os.stat(os.devnull)))
        assert os.waitpid(child, 0)[1] == 0
        await came.close()

    asyncio.run(come_and_fork())
    assert isinstance(hosts[0].exception(HANG_S), HostsMissingError)
