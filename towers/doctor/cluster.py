"""What is wrong with `TF_CONFIG`, which names the hosts of a run on several."""

import os
import socket
import threading
from collections.abc import Mapping, Sequence

from towers.cluster.addresses import split
from towers.cluster.launchers import tf_config
from towers.doctor.finding import Finding, note, ok, wrong
from towers.program import words

_NAME = "TF_CONFIG"


def check(environ: Mapping[str, str] = os.environ, resolve_s: float = 5.0) -> Finding:
    """Checks the variable, and whether its hosts are known here."""
    text = environ.get(_NAME, "")
    if not text.strip():
        return ok("not set: one host")
    try:
        cluster, kind, index = tf_config.read(text)
    except ValueError as error:
        return wrong(str(error), received=text)
    addresses = [each for listed in cluster.values() for each in listed]
    found = f"{words.count(len(addresses), 'task')}, this one is {kind} {index}"
    doubts = unknown(addresses, resolve_s)
    if kind != tf_config.OUTSIDE:
        doubts += _taken(cluster[kind][index])
    if doubts:
        return note(f"{found}; {'; '.join(doubts)}", cluster=cluster, doubts=doubts)
    return ok(found, cluster=cluster)


def unknown(addresses: Sequence[str], limit_s: float) -> list[str]:
    """Says which hosts' names cannot be resolved here."""
    hosts = dict.fromkeys(split(address)[0] for address in addresses)
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
    _, port = split(address)
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
