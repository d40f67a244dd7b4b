"""Several hosts on this machine, each a process."""

import concurrent.futures
import socket
from collections.abc import Sequence

from tests import warm


def run(module: str, layout: Sequence[int], *arguments: object) -> None:
    """Does `python -m module RANK ADDRESSES TOWERS arguments` on hosts, to their ends.

    `layout` has the number of towers of each host.
    """
    ports = _free_ports(len(layout))
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    first = addresses, ",".join(map(str, layout))

    def host(rank):
        done = warm.run(module, rank, *first, *arguments)
        return done.returncode, done.stdout[-2000:] + done.stderr[-2000:]

    with concurrent.futures.ThreadPoolExecutor(len(layout)) as every:
        ended = [*every.map(host, range(len(layout)))]
    assert [code for code, _ in ended] == [0] * len(layout), ended


def _free_ports(count):
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in opened]
    for each in opened:
        each.close()
    return ports
