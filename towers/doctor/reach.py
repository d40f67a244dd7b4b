"""Who may reach a port of this machine, as far as it can be asked."""

import ipaddress
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from towers.cluster import addresses
from towers.doctor import process
from towers.doctor.finding import Finding, note, ok
from towers.program import words

_ANSWER_S = 5.0
_UFW = Path("/etc/ufw/ufw.conf")
# For each tool, how it is asked, and the part of its answer in which something is kept
# out. nft also lists what iptables and ufw have set, on most systems of today.
_TOOLS = {
    "nft": (
        ("list", "ruleset"),
        r"hook input(?:(?!^\t\}).)*\b(?:drop|reject|jump|goto)\b",
    ),
    "iptables": (("-S", "INPUT"), r"^-P INPUT DROP|^-A INPUT [^\n]*-j (?!ACCEPT)"),
}


def check(hosts: Sequence[str]) -> Finding:
    """Lists where a server on all interfaces listens, and asks firewalls.

    Args:
        hosts: IP addresses of all hosts.
    """
    listed = _addresses()
    if not listed:
        return ok("this machine has no address at which others could reach it")
    away = [each for each in hosts if not addresses.is_only_local(each)]
    others = [each for each in away if each not in listed]
    shown = words.all_of(
        f"{address} ({interface}, {kind})"
        for address, (interface, kind) in listed.items()
    )
    filters, firewall = _firewall()
    text = f"a server on all interfaces, as TensorFlow's is, listens at {shown}"
    figures = {"addresses": listed, "filters": filters}
    if filters:
        whom = "only the other hosts" if others else "nobody"
        return ok(f"{text}; {firewall}; see that they let in {whom}", **figures)
    # Whoever is connected by ssh stays so.
    allow = ["ssh", *(f"from {each} to any proto tcp" for each in others)]
    shut = [f"ufw allow {each}" for each in allow]
    shut += ["ufw default deny incoming", "ufw enable"]
    return note(f"{text}; {firewall}; to shut others out: {', '.join(shut)}", **figures)


def _addresses() -> dict[str, tuple[str, str]]:
    """Returns the interface and the kind of each address, public ones first."""
    import psutil  # the doctor may have to say that it is missing

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    kinds = {}
    for name, listed in psutil.net_if_addrs().items():
        for each in listed if name in up else ():
            try:
                address = ipaddress.ip_address(each.address.partition("%")[0])
            except ValueError:
                continue  # of the hardware
            # Of a link only, IPv6 has one by itself on each interface.
            if not address.is_loopback and not address.is_link_local:
                kind = "public" if address.is_global else "private"
                kinds[str(address)] = name, kind
    return dict(sorted(kinds.items(), key=lambda item: item[1][1] != "public"))


def _firewall() -> tuple[bool | None, str]:
    """Returns whether a firewall of this machine filters, if known, and a sentence."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    asked, silent = [], []
    for name, (question, kept_out) in _TOOLS.items():
        if (program := shutil.which(name, path=path)) is None:
            continue
        out, _, code = process.run([program, *question], _ANSWER_S)
        if code != 0:
            silent.append(name)
        elif re.search(kept_out, out, re.MULTILINE | re.DOTALL):
            return True, f"{name} has rules for what comes in"
        else:
            asked.append(name)
    # Its rules are for root only, but whether it is on is not.
    if _UFW.is_file() and re.search(r"(?m)^ENABLED=yes", _UFW.read_text()):
        return True, f"{_UFW} says that its rules are on"
    if silent:
        return None, (
            f"{words.all_of(silent)} did not answer to this user, so that it is not "
            "known whether a firewall filters"
        )
    if asked:
        return False, f"nothing that comes in is filtered by {words.all_of(asked)}"
    return None, "no tool is here to ask whether a firewall filters"
