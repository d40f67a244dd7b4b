"""Who may reach a port of this machine, as the doctor says it."""

import collections
import socket

import psutil
import pytest

from towers.doctor import reach
from towers.doctor.finding import NOTE, OK

_Address = collections.namedtuple("_Address", "family address")
_Stats = collections.namedtuple("_Stats", "isup")
HARDWARE = _Address(psutil.AF_LINK, "02:42:ac:11:00:02")
LOCAL = [_Address(socket.AF_INET, "127.0.0.1"), _Address(socket.AF_INET6, "::1")]
INTERFACES = {
    "lo": LOCAL,
    "eth0": [
        _Address(socket.AF_INET, "10.0.0.1"),
        _Address(socket.AF_INET6, "fe80::42:acff:fe11:2%eth0"),
        HARDWARE,
    ],
    "eth1": [_Address(socket.AF_INET, "8.8.8.8")],
    "eth2": [_Address(socket.AF_INET, "10.9.9.9")],
}

# As nft 1.0 lists them.
NFT_NOTHING = """table inet other {
	chain forward {
		type filter hook forward priority filter; policy drop;
		drop
	}
	chain input {
		type filter hook input priority filter; policy accept;
		tcp dport { 22, 80 } accept
	}
	chain output {
		type filter hook output priority filter; policy drop;
	}
}
"""
NFT_SOME = """table inet towers {
	chain input {
		type filter hook input priority filter; policy accept;
		iifname != "lo" tcp dport { 8476, 32768-60999 } ct state new drop
	}
}
"""
NFT_POLICY = """table ip filter {
	chain INPUT {
		type filter hook input priority filter; policy drop;
	}
}
"""
REFUSES = "exit 1"


def answers(text):
    return f"cat <<'END'\n{text}END"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with these interfaces, and tools that do this."""

    def make(tools, interfaces=INTERFACES, ufw=None):
        stats = {name: _Stats(name != "eth2") for name in interfaces}
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
        for name, script in tools.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o700)
        found = {name: str(tmp_path / name) for name in tools}
        monkeypatch.setattr(reach.shutil, "which", lambda name, path: found.get(name))
        monkeypatch.setattr(reach, "_UFW", tmp_path / "ufw.conf")
        if ufw is not None:
            (tmp_path / "ufw.conf").write_text(ufw)

    return make


def test_addresses_and_the_others(machine):
    machine({})
    finding = reach.check(["10.0.0.1", "10.0.0.2", "10.0.0.3"])
    assert finding.verdict == NOTE
    assert finding.text == (
        "a server on all interfaces, as TensorFlow's is, listens at 8.8.8.8 (eth1, "
        "public) and 10.0.0.1 (eth0, private); no tool is here to ask whether a "
        "firewall filters; to shut others out: ufw allow ssh, ufw allow from 10.0.0.2 "
        "to any proto tcp, ufw allow from 10.0.0.3 to any proto tcp, ufw default deny "
        "incoming, ufw enable"
    )
    assert finding.figures == {
        "addresses": {"8.8.8.8": ("eth1", "public"), "10.0.0.1": ("eth0", "private")},
        "filters": None,
    }


def test_hosts_on_one_machine_let_in_nobody(machine):
    machine({"nft": answers(NFT_SOME)})
    assert reach.check(["127.0.0.1"]).text.endswith("; see that they let in nobody")
    machine({})
    text = reach.check(["127.0.0.1"]).text
    assert "; to shut others out: ufw allow ssh, ufw default deny incoming" in text


def test_a_machine_that_nobody_reaches(machine):
    machine({}, {"lo": LOCAL})
    finding = reach.check(["127.0.0.1"])
    assert finding.verdict == OK and "no address at which others" in finding.text


@pytest.mark.parametrize(
    ("tools", "ufw", "filters", "said"),
    [
        ({"nft": answers(NFT_SOME)}, None, True, "nft has rules for what comes in"),
        ({"nft": answers(NFT_POLICY)}, None, True, "nft has rules for what comes in"),
        (
            {"nft": answers(""), "iptables": answers("-P INPUT DROP\n")},
            *(None, True, "iptables has rules for what comes in"),
        ),
        (
            {"iptables": answers("-P INPUT ACCEPT\n-A INPUT -s 8.8.8.8/32 -j DROP\n")},
            *(None, True, "iptables has rules for what comes in"),
        ),
        (
            {"nft": answers(NFT_NOTHING), "iptables": answers("-P INPUT ACCEPT\n")},
            *(None, False, "; nothing that comes in is filtered by nft and iptables;"),
        ),
        (
            {"nft": REFUSES, "iptables": answers("-P INPUT ACCEPT\n")},
            *(None, None, "; nft did not answer to this user, so that it is not known"),
        ),
        ({"nft": REFUSES}, "ENABLED=yes\n", True, "ufw.conf says that its rules are"),
        ({"nft": REFUSES}, "ENABLED=no\n", None, "; nft did not answer to this user"),
    ],
)
def test_firewalls(machine, tools, ufw, filters, said):
    machine(tools, ufw=ufw)
    finding = reach.check(["10.0.0.2"])
    assert said in finding.text
    assert finding.figures["filters"] is filters
    assert finding.verdict == (OK if filters else NOTE)
    assert filters is not True or finding.text.endswith("let in only the other hosts")


def test_this_machine():
    """Really, whatever it has."""
    assert reach.check(["127.0.0.1"]).verdict in (OK, NOTE)
