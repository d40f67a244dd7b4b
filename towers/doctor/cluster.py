"""What is wrong with `TF_CONFIG`, which names the hosts of a run on several."""

import collections
import json
import os
import re
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from towers.doctor.finding import Finding, note, ok, wrong
from towers.program import words

_NAME = "TF_CONFIG"
_EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
_ADDRESS = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})")
# An evaluator stands beside the cluster.
_OUTSIDE = "evaluator"


def check(environ: Mapping[str, str] = os.environ, resolve_s: float = 5.0) -> Finding:
    """Checks the variable, and whether its hosts are known here."""
    text = environ.get(_NAME, "")
    if not text.strip():
        return ok("not set: one host")
    try:
        cluster, kind, index = read(text)
    except ValueError as error:
        return wrong(str(error), received=text)
    addresses = [each for listed in cluster.values() for each in listed]
    found = f"{words.count(len(addresses), 'task')}, this one is {kind} {index}"
    doubts = _unknown(addresses, resolve_s)
    if kind != _OUTSIDE:
        doubts += _taken(cluster[kind][index])
    if doubts:
        return note(f"{found}; {'; '.join(doubts)}", cluster=cluster, doubts=doubts)
    return ok(found, cluster=cluster)


def read(text: str) -> tuple[dict[str, list[str]], str, int]:
    """Reads the variable's value.

    Args:
        text: JSON.

    Returns:
        The addresses of each type of task; type and index of this process's task.

    Raises:
        ValueError: If it is anything else.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"not JSON ({error}): {_short(text)}; expected such as {_EXAMPLE}"
        ) from error
    cluster = value.get("cluster") if isinstance(value, dict) else None
    if not isinstance(cluster, dict) or not cluster:
        raise ValueError(
            f"no cluster in {_short(text)}; expected such as {_EXAMPLE}, or unset it"
        )
    cluster = {kind: _listed(kind, hosts) for kind, hosts in cluster.items()}
    _check_unique(cluster)
    return cluster, *_task(value.get("task"), cluster)


def _listed(kind: str, hosts: Any) -> list[str]:
    """A type's addresses, each of which is one."""
    hosts = [hosts] if isinstance(hosts, str) else hosts
    if not isinstance(hosts, list) or not hosts:
        raise ValueError(
            f"the cluster's {kind!r} is {_short(json.dumps(hosts))}; expected a list "
            "of addresses, such as host1:2222"
        )
    for host in hosts:
        match = _ADDRESS.fullmatch(host) if isinstance(host, str) else None
        if match is None or not 0 < int(match["port"]) < 2**16:
            raise ValueError(
                f"the cluster's {kind!r} has the address {_short(json.dumps(host))}; "
                "expected HOST:PORT, such as host1:2222"
            )
    return hosts


def _check_unique(cluster):
    counts = collections.Counter(each for hosts in cluster.values() for each in hosts)
    twice = [address for address, count in counts.items() if count > 1]
    if twice:
        raise ValueError(
            f"the address {twice[0]} is there {counts[twice[0]]} times; expected one "
            "for each task, so give those on one host ports of their own"
        )


def _task(task: Any, cluster: Mapping[str, Sequence[str]]) -> tuple[str, int]:
    kind = task.get("type") if isinstance(task, dict) else None
    if not isinstance(kind, str) or kind not in {*cluster, _OUTSIDE}:
        raise ValueError(
            f"the task is {_short(json.dumps(task))}, whose type the cluster has not; "
            f"expected one of {', '.join(cluster)}"
        )
    count = 1 if kind == _OUTSIDE else len(cluster[kind])
    index = str(task.get("index"))
    if not index.isdecimal() or int(index) >= count:
        raise ValueError(
            f"the task is {_short(json.dumps(task))}, but the cluster has {count} of "
            f"type {kind}; expected an index from 0 to {count - 1}"
        )
    return kind, int(index)


def _split(address: str) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(address)
    return match["host"].strip("[]"), int(match["port"])


def _unknown(addresses: Sequence[str], limit_s: float) -> list[str]:
    """Says which hosts' names cannot be resolved here."""
    hosts = dict.fromkeys(_split(address)[0] for address in addresses)
    unknown = set(hosts)

    def resolve(host):
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError):
            return
        unknown.discard(host)

    # All at once, as each may wait for a server that does not answer.
    threads = [
        threading.Thread(target=resolve, args=(host,), daemon=True) for host in hosts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s / len(threads))
    return [
        f"the host {host} is not known here; check its name"
        for host in hosts
        if host in unknown
    ]


def _taken(address: str) -> list[str]:
    """Says whether this task's own port is used by another process."""
    _, port = _split(address)
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind(("", port))
        except OSError as error:
            return [
                f"the port {port} of this task cannot be taken ({error.strerror}): end "
                "what uses it, or choose another"
            ]
    return []


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
