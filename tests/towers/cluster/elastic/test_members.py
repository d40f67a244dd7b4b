"""Members and their coordinator in threads: what they are told, and strangers."""

import contextlib
import os
import queue
import re
import socket
import threading

import pytest

from tests.limits import HANG_S
from tests.towers.cluster.in_threads import in_threads
from towers.cluster import addresses
from towers.cluster.elastic import (
    Coordinator,
    Formed,
    Lost,
    Member,
    Over,
    Wanted,
    coordinator,
    member,
    talk,
)
from towers.cluster.rendezvous import (
    HostsMissingError,
    RendezvousError,
    channel,
    strangers,
)

HERE = f"({socket.gethostname()}, pid {os.getpid()})"


class Run:
    """A coordinator, and members of this process."""

    def __init__(self, opened, **options):
        self.events, self.said, self._opened = queue.Queue(), [], opened
        options = {"least": 1, "most": 2, "token": "secret", **options}
        one = Coordinator(tell=self.events.put, say=self.said.append, **options)
        self.coordinator = opened.enter_context(one)

    def member(self, token="secret", **options):
        one = Member(self.coordinator.address, token, **options)
        self._opened.callback(one.close)
        return one

    def members(self, count):
        """Members whose calls `lost` and `asked` are put into a queue of each."""
        every = []
        for slot in range(count):
            told = queue.Queue()
            one = self.member(
                slot=slot,
                lost=lambda *about, told=told: told.put(about),
                asked=lambda *about, told=told: told.put(about),
            )
            one.told = told
            every.append(one)
        return every

    def event(self, kind):
        while not isinstance(event := self.events.get(timeout=HANG_S), kind):
            pass
        return event


@pytest.fixture
def run():
    with contextlib.ExitStack() as opened:
        yield lambda **options: Run(opened, **options)


def next_of(*members, steps=0):
    """Has members call `next` at once."""
    return in_threads([lambda each=each: each.next(steps) for each in members])


def until(holds):
    for _ in range(100 * HANG_S):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never holds")


def test_all_learn_the_same(run):
    run = run()
    members = run.members(2)
    one, other = next_of(*members)
    assert (one.rank, other.rank, one.generation, one.count) == (0, 1, 0, 2)
    assert (one.addresses, one.names) == (other.addresses, other.names)
    assert one.names == (f"host 0 {HERE}", f"host 1 {HERE}")
    assert one.token == "secret" and one.elastic and "secret" not in repr(one)
    for address in one.addresses:
        with socket.socket() as server:
            server.bind(addresses.split(address))  # free, for the host to listen
    assert run.event(Formed).names == one.names
    assert [each.does for each in run.coordinator.states()] == ["trains", "trains"]
    assert [each.change for each in members] == [None, None]


def test_one_that_has_done_more_steps_is_first(run):
    run = run()
    one, two = run.members(2)
    found = in_threads([lambda: one.next(3), lambda: two.next(4)])
    assert [each.rank for each in found] == [1, 0]
    states = run.coordinator.states()
    assert [(each.rank, each.slot, each.steps) for each in states] == [
        (0, 1, 4),
        (1, 0, 3),
    ]


def test_one_arrives_and_one_is_lost(run):
    run = run(most=3, expected=2)
    one, two, new = run.members(3)
    next_of(one, two)
    arrives = threading.Thread(target=next_of, args=[new])
    arrives.start()
    until(lambda: one.change and two.change)
    assert one.change == two.change == f"host 2 {HERE} arrives"
    assert [each.rank for each in next_of(one, two, steps=5)] == [0, 1]
    arrives.join()
    assert one.change is None and one.told.empty()
    two.close()
    why = f"host 1 {HERE} has ended"
    assert one.told.get(timeout=HANG_S) == (1, f"Host 1 {HERE} has ended.")
    assert one.change == why and run.event(Lost).why == "has ended"
    assert [each.rank for each in next_of(one, new, steps=6)] == [0, 1]


def test_one_leaves(run):
    run = run()
    one, two = run.members(2)
    next_of(one, two)
    two.leave("SIGTERM")
    until(lambda: one.change and two.change)
    assert one.change == two.change == f"host 1 {HERE} leaves: SIGTERM"
    with pytest.raises(HostsMissingError, match=r"This host leaves: SIGTERM\."):
        two.next(1)
    assert one.next(1).count == 1
    two.close()
    assert not run.event(Lost).failed


def test_one_leaves_while_it_waits(run):
    one, _ = run().members(2)
    leaves = threading.Timer(0.05, one.leave, ["SIGTERM"])
    leaves.start()
    with pytest.raises(HostsMissingError, match=r"This host leaves: SIGTERM\."):
        one.next(1)


def test_another_number_is_wanted(run):
    run = run(most=3)
    members = run.members(3)
    next_of(*members)
    members[1].want(2)
    assert run.event(Wanted).count == 2
    assert members[2].told.get(timeout=HANG_S) == ("2 hosts are wanted",)
    until(lambda: members[0].change)
    assert members[0].change == f"host 2 {HERE} leaves: 2 hosts are wanted"
    assert [each.count for each in next_of(*members[:2], steps=1)] == [2, 2]
    for count in (0, 4):
        for each in (members[0], run.coordinator):
            said = f"Received {count} as the number of hosts; expected 1 to 3."
            with pytest.raises(ValueError, match=re.escape(said)):
                each.want(count)


def test_too_few_come(run):
    run = run(least=2, join_seconds=0.2)
    (found,) = next_of(run.member())
    where = run.coordinator.address
    why = (
        f"At {where}, 1 host is ready (a new host {HERE}) after 0.2 s; expected 2 at "
        "least."
    )
    assert isinstance(found, HostsMissingError) and str(found) == why
    assert run.event(Over) == Over(why, True)
    # Who comes later hears the same.
    (found,) = next_of(run.member())
    assert str(found) == why


def test_one_that_neither_goes_on_nor_ends_is_left_out(run):
    run = run(most=3, expected=2, fail_seconds=0.2)
    one, two, new = run.members(3)
    next_of(one, two)
    arrives = threading.Thread(target=next_of, args=[new])
    arrives.start()
    until(lambda: one.change and two.change)
    assert one.next(1).count == 2
    arrives.join()
    lost = run.event(Lost)
    assert lost.rank == 1 and lost.why.startswith(
        "neither went on nor ended within 0.2"
    )
    # It may wait for the others.
    said = f"Host 1 {HERE} {lost.why}."
    assert two.told.get(timeout=HANG_S) == (0, said)
    with pytest.raises(HostsMissingError, match=re.escape(said)):
        two.next(1)


def test_the_run_is_done(run):
    run = run()
    one, two = run.members(2)
    next_of(one, two)
    one.close(done=True)
    assert run.event(Over) == Over(f"The run is done on host 0 {HERE}.", False)
    assert two.change is None and two.told.empty()
    with pytest.raises(HostsMissingError, match="The run is done on host 0"):
        two.next(1)
    with pytest.raises(HostsMissingError, match=r"This host has left\."):
        one.next(1)


def test_the_launcher_finishes_it(run):
    run = run()
    one, _ = run.members(2)
    run.coordinator.finish()
    assert run.event(Over) == Over("The run is done.", False)
    with pytest.raises(HostsMissingError, match=r"The run is done\."):
        one.next(1)


def test_another_token(run, monkeypatch):
    warned = []
    monkeypatch.setattr(coordinator.voice, "warn", warned.append)
    run = run(most=1)
    (found,) = next_of(run.member(token="guess"))
    assert isinstance(found, RendezvousError)
    assert str(found) == (
        f"The coordinator at {run.coordinator.address} has another token than this "
        f"host {HERE}; give both the same TOWERS_TOKEN."
    )
    assert warned == [
        "A process on 127.0.0.1 has another token, and was turned away; give all hosts "
        "the same TOWERS_TOKEN."
    ]
    assert next_of(run.member())[0].count == 1


def test_other_versions(run, monkeypatch):
    run = run()
    (one,) = run.members(1)
    until(run.coordinator.states)
    known = member.versions()
    monkeypatch.setattr(member, "versions", lambda: known | {"keras": "0.1"})
    (found,) = next_of(run.member())
    assert isinstance(found, RendezvousError)
    assert not isinstance(found, HostsMissingError)
    assert str(found).startswith("Hosts have different versions of keras: ")
    monkeypatch.undo()
    assert [each.count for each in next_of(one, run.member())] == [2, 2]


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        channel._GREETING + bytes(16) + b"\xff" * 100,
        channel._GREETING + bytes(16) + (20).to_bytes(4) + bytes(52),
    ],
    ids=["silent", "http", "noise", "too long", "no code"],
)
def test_a_stranger_changes_nothing(run, words):
    run = run()
    at = addresses.split(run.coordinator.address)
    with socket.create_connection(at) as stranger, socket.create_connection(at) as gone:
        stranger.sendall(words)
        gone.sendall(words)
        gone.close()
        assert [each.count for each in next_of(*run.members(2))] == [2, 2]
        assert len(run.coordinator.states()) == 2


def test_silent_strangers_have_to_go(run, monkeypatch):
    monkeypatch.setattr(strangers, "MOST", 3)
    run = run()
    at = addresses.split(run.coordinator.address)
    with contextlib.ExitStack() as opened:
        silent = [
            opened.enter_context(socket.create_connection(at, HANG_S))
            for _ in range(20)
        ]
        greeting = len(channel._GREETING) + 16
        for each in silent[:15]:
            with contextlib.suppress(ConnectionResetError):
                assert len(each.recv(greeting)) in (0, greeting)
                assert each.recv(1) == b""
        assert [each.count for each in next_of(*run.members(2))] == [2, 2]


def test_one_that_says_what_none_says_is_lost(run):
    run = run()
    one, two = run.members(2)
    next_of(one, two)
    two._send({"ready": "x"})
    assert run.event(Lost).why == "has said what no host says"
    two._send({})
    assert one.next(1).count == 1


def test_a_coordinator_that_is_not_there():
    with addresses.held_port("127.0.0.1") as held:
        at = addresses.joined(*held.getsockname())
        one = Member(at, "secret", join_seconds=0.2)
        with pytest.raises(HostsMissingError) as caught:
            one.next(0)
    assert str(caught.value) == (
        f"Within 0.2 s, this host {HERE} could not reach the coordinator at {at} "
        "(Connection refused); start the launcher there, and open that port to this "
        "host."
    )
    # Who gives up before waits for nothing.
    one = Member(at, "secret")
    one.close()
    assert not one._thread.is_alive()


def test_a_coordinator_that_begins_later_is_met():
    with addresses.held_port("127.0.0.1") as held:
        at = addresses.joined(*held.getsockname())
    one = Member(at, "secret")
    one.leave("SIGTERM")  # what it says meanwhile is said then
    until(lambda: one._reason == "Connection refused")
    with Coordinator(1, 1, "secret", at) as other:
        until(other.states)
        until(lambda: other.states()[0].does == "leaves")
    one.close()


def test_a_coordinator_that_ends(run):
    run = run()
    one, two = run.members(2)
    next_of(one, two)
    threads = [threading.Thread(target=next_of, args=[two])]
    threads[0].start()
    until(lambda: one.change)
    run.coordinator.close()
    where = run.coordinator.address
    threads[0].join()
    until(lambda: not one._thread.is_alive())
    with pytest.raises(
        HostsMissingError, match=f"The coordinator at {where} has ended"
    ):
        one.next(1)
    with pytest.raises(HostsMissingError, match=r"The launcher ends\."):
        two.next(1)
    # What is said then harms nobody.
    one.leave("SIGTERM"), run.coordinator.close()


def test_one_that_is_silent_is_lost_on_both_sides(run, monkeypatch):
    monkeypatch.setattr(talk, "SILENT_S", 0.2)
    monkeypatch.setattr(talk, "BEAT_S", 0.02)
    run = run()
    one, two = run.members(2)
    next_of(one, two)

    async def nothing(*message):
        pass

    monkeypatch.setattr(two._talk._channel, "send", nothing)
    assert run.event(Lost).why == "has not been heard for 0 s"
    assert one.next(1).count == 1
    until(lambda: two.change)
    assert two.change == f"the coordinator at {run.coordinator.address} has ended"


def test_an_address_that_is_taken(monkeypatch):
    monkeypatch.setattr("towers.cluster.rendezvous.meeting._PORT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        one = Coordinator(1, 1, "secret", addresses.joined(*other.getsockname()))
        with pytest.raises(RendezvousError, match="Address already in use"):
            one.start()
        one.close()
