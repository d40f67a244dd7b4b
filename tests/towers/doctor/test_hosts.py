"""What the doctor says of several hosts, which are threads of this process."""

import dataclasses

import pytest

from tests.towers.cluster.in_threads import in_threads, memberships
from towers.doctor import hosts
from towers.doctor.__main__ import main
from towers.doctor.finding import NOTE, OK, WRONG, ok
from towers.hosts.group import STARTED, ProcessPlace


def places(count, **changes):
    listed = memberships(count)[0].addresses
    first = ProcessPlace(0, count, listed[0], "token", 20.0, addresses=listed)
    return [dataclasses.replace(first, rank=k, **changes) for k in range(count)]


def examine(every):
    """What each host finds, by check."""

    def one(place):
        return {name: check() for name, check in hosts.BetweenHosts(place).checks()}

    return in_threads([lambda place=place: one(place) for place in every])


def test_hosts_that_are_well(monkeypatch):
    monkeypatch.setattr(hosts, "_LARGE_BYTES", 4 * 10**6)
    monkeypatch.setattr(hosts, "_SLOW_MB_S", 0.0)
    monkeypatch.setattr(hosts, "_FAR_MS", 1e9)
    monkeypatch.setattr(hosts.reach, "check", lambda hosts: ok(", ".join(hosts)))
    for found in examine(places(3)):
        assert {name: each.verdict for name, each in found.items()} == dict.fromkeys(
            ("names", "hosts", "reach", "clocks", "latency", "bandwidth"), OK
        )
        assert "3 hosts of one version meet: host 0 (" in found["hosts"].text
        assert found["reach"].text == "127.0.0.1"
        assert found["latency"].figures["ms"] > 0
        assert found["bandwidth"].figures["mb_per_s"] > 0


def test_clocks_that_differ(monkeypatch):
    monkeypatch.setattr(hosts, "_LARGE_BYTES", 4000)
    monkeypatch.setattr(hosts, "_CLOCKS_S", -1.0)
    for found in examine(places(2)):
        assert found["clocks"].verdict == NOTE
        assert "s ahead of that of host" in found["clocks"].text


def test_a_host_that_does_not_come():
    (found,) = examine(places(2, join_seconds=0.3)[:1])
    assert found["hosts"].verdict == WRONG and "host 1" in found["hosts"].text
    assert found["bandwidth"].text == "not measured, as the hosts have not met"
    assert found["reach"].text == "not looked at, as the hosts have not met"


@pytest.mark.slow
def test_hosts_of_different_tokens():
    first, second = places(2, join_seconds=3.0)
    found = examine([first, dataclasses.replace(second, token="another")])
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
    assert main(flags) == 1
    assert said in capsys.readouterr().err
