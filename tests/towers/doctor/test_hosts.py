"""What the doctor says of several hosts, which are threads of this process."""

import concurrent.futures
import dataclasses
import socket
import subprocess
import sys

import pytest

from tests import warm
from tests.limits import HANG_S
from towers.doctor import hosts
from towers.doctor.__main__ import main
from towers.doctor.finding import NOTE, OK, WRONG, ok
from towers.hosts.group import STARTED, Membership, ProcessPlace

WELL = dict.fromkeys(
    ("names", "hosts", "reach", "connection", "clocks", "latency", "bandwidth"), OK
)
MET = Membership(0, ("10.0.0.1:1", "10.0.0.2:2"), ("host 0", "host 1"))


def places(count, **changes):
    """The places of hosts at ports that are free."""
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    listed = tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in opened)
    for each in opened:
        each.close()
    first = ProcessPlace(0, count, listed[0], "token", 20.0, addresses=listed)
    return [dataclasses.replace(first, rank=k, **changes) for k in range(count)]


def on_each(function, every):
    """Calls a function with the place of each host, side by side."""
    with concurrent.futures.ThreadPoolExecutor(len(every)) as pool:
        return [*pool.map(function, every)]


def examine(place):
    """What a host finds, by check."""
    return {name: check() for name, check in hosts.BetweenHosts(place).checks()}


@pytest.fixture
def warm_start(monkeypatch):
    """Their processes have TensorFlow imported already, and time to end."""

    def run(command, limit_s, environ):
        done = warm.run(*command[2:])
        return done.stdout, done.stderr, done.returncode

    monkeypatch.setattr(hosts.process, "run", run)


def test_hosts_that_are_well(monkeypatch, warm_start):
    monkeypatch.setattr(hosts, "_SLOW_MB_S", 0.0)
    monkeypatch.setattr(hosts, "_FAR_MS", 1e9)
    monkeypatch.setattr(hosts.reach, "check", lambda hosts: ok(", ".join(hosts)))
    for found in on_each(examine, places(2)):
        assert {name: each.verdict for name, each in found.items()} == WELL
        assert "2 hosts of one version meet: host 0 (" in found["hosts"].text
        assert found["reach"].text == "127.0.0.1"
        assert found["latency"].figures["ms"] > 0
        assert found["bandwidth"].figures["mb_per_s"] > 0


def test_what_hosts_tell_one_another(warm_start):
    def gather(place):
        return hosts.gather(place, {"text": f"GPUs of {place.rank}"})

    first, second = on_each(gather, places(2))
    assert first == second
    assert [name[:7] for name in first] == ["host 0 ", "host 1 "]
    assert [each["text"] for each in first.values()] == ["GPUs of 0", "GPUs of 1"]


def says(monkeypatch, *answer):
    """What a host finds if the process that connects gives this answer."""
    monkeypatch.setattr(hosts.rendezvous, "meet", lambda place: MET)
    monkeypatch.setattr(hosts.process, "run", lambda *_: answer)
    return examine(places(2)[0])


def test_a_network_that_is_poor(monkeypatch):
    lines = '["told", [1, 2]]\n["clocks", [7.0, 3.0]]\n["latency", [0.1]]\n'
    found = says(monkeypatch, lines + '["bandwidth", [9.0, 4.0]]\n', "", 0)
    assert found["connection"].verdict == OK
    for name, said in (
        ("clocks", "that of host 0 is 4.0 s ahead of that of host 1, so their logs"),
        ("latency", "adding 16 bytes takes 100.00 ms, more than 5: each step"),
        ("bandwidth", "adding 100 MB takes 4,000 ms: 25 MB/s, less than 100: grad"),
    ):
        assert found[name].verdict == NOTE and found[name].text.startswith(said)
    found = says(monkeypatch, lines + '["bandwi', "", None)
    assert found["connection"].verdict == OK
    assert found["bandwidth"].verdict == WRONG
    assert found["bandwidth"].text.startswith("not measured, as it takes too long")
    found = says(monkeypatch, lines + '["error", "host 1 has ended."]\n', "", 0)
    assert found["connection"][:2] == (WRONG, "host 1 has ended.")


def test_hosts_that_do_not_connect(monkeypatch):
    found = says(monkeypatch, "", "log", None)
    said = "not all hosts connect within 55 s; let all reach 10.0.0.1:1 and 10.0.0.2:2"
    assert found["connection"][:2] == (WRONG, said)
    assert found["latency"].verdict == NOTE
    assert found["latency"].text == "not measured, as the hosts are not connected"
    found = says(monkeypatch, "", "Fatal Python error\n\nIt ends.\n", -6)
    assert found["connection"].text == "no connection (-6): It ends."
    with pytest.raises(ConnectionError, match="no connection"):
        hosts.gather(places(2)[0], None)


def test_a_host_that_does_not_come():
    found = examine(places(2, join_seconds=0.3)[0])
    assert found["hosts"].verdict == WRONG and "host 1" in found["hosts"].text
    assert found["reach"].text == "not looked at, as the hosts have not met"
    assert found["connection"].text == "not connected, as the hosts have not met"
    assert found["bandwidth"].text == "not measured, as the hosts are not connected"


@pytest.mark.slow
def test_the_program():
    listed = places(2)[0].addresses
    command = [sys.executable, "-m", "towers.doctor", f"--hosts={','.join(listed)}"]
    started = [
        subprocess.Popen([*command, f"--host_rank={k}"], stdout=subprocess.PIPE)
        for k in range(2)
    ]
    for each in started:
        lines = each.communicate(timeout=HANG_S)[0].decode().splitlines()
        assert each.returncode == 0
        assert [line.split()[1] for line in lines[: len(WELL)]] == [*WELL]


@pytest.mark.slow
def test_hosts_of_different_tokens():
    first, second = places(2, join_seconds=3.0)
    every = [first, dataclasses.replace(second, token="another")]
    found = on_each(examine, every)
    assert "another token" in found[1]["hosts"].text
    assert found[0]["hosts"].verdict == WRONG


def test_a_name_that_is_not_known():
    listed = "127.0.0.1:1", "no-such.invalid:2"
    place = dataclasses.replace(places(2)[0], addresses=listed)
    found = hosts.BetweenHosts(place).names()
    assert found.verdict == WRONG and "no-such.invalid is not known" in found.text


def test_which_host_this_one_is(monkeypatch):
    monkeypatch.setenv("TOWERS_TOKEN", "a secret of all hosts")
    # Of documentation, and so nobody's.
    found = hosts.place("203.0.113.1:8476,127.0.0.1:8477", None)
    assert (found.rank, found.count, found.token) == (1, 2, "a secret of all hosts")
    assert found.coordinator == "203.0.113.1:8476"
    started = {"TOWERS_HOST_RANK": "1", "TOWERS_HOST_COUNT": "2"}
    started |= {"TOWERS_COORDINATOR": "a:1", "TOWERS_TOKEN": "another secret of hosts"}
    assert hosts.place("auto", None, started).rank == 1
    with pytest.raises(ValueError, match="PMI_RANK=0; expected hosts that MPI has not"):
        hosts.place("auto", None, {"PMI_RANK": "0", "PMI_SIZE": "2"})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--hosts=127.0.0.1:1,127.0.0.1:2"], "several of these addresses are on this"),
        (
            ["--hosts=203.0.113.1:1,203.0.113.2:2"],
            "none of these addresses are on this",
        ),
        (["--hosts=a"], "expected an address with a port for each of two hosts"),
        (["--hosts=a:1,a:1"], "expected an address with a port for each of two"),
        (["--hosts=a:1,b:1", "--host_rank=2"], "expected 0 to 1"),
        (["--hosts=auto"], "that no launcher has started"),
        (["--host_rank=1"], "without addresses in --hosts"),
    ],
)
def test_hosts_that_are_none(flags, said, capsys, monkeypatch):
    for name in STARTED:
        monkeypatch.delenv(name, raising=False)
    assert main(["", *flags]) == 1
    assert said in capsys.readouterr().err
