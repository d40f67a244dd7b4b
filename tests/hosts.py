"""Several hosts on this machine, each a process."""

import concurrent.futures
import contextlib
import secrets
import socket
from collections.abc import Sequence

from tests import warm


def run(module: str, layout: Sequence[int], *arguments: object) -> None:
    """Does `python -m module RANK ADDRESSES TOWERS arguments` on hosts, to their ends.

    `layout` has the number of towers of each host.
    """
    ports = free_ports(len(layout))
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    first = addresses, ",".join(map(str, layout))

    def host(rank):
        done = warm.run(module, rank, *first, *arguments)
        return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]

    with concurrent.futures.ThreadPoolExecutor(len(layout)) as every:
        ended = [*every.map(host, range(len(layout)))]
    assert [code for code, _ in ended] == [0] * len(layout), ended


def free_ports(count: int) -> list[int]:
    """Returns free ports, which stay free until hosts listen there.

    The system gives none of these to whoever connects, or asks for any port.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = 10_000 + secrets.randbelow(22_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            ports += [port] * (port not in ports)
    return ports
