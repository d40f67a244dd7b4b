"""Hosts that are threads of this process, connected over loopback."""

import concurrent.futures
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

from tests.limits import HANG_S
from towers.cluster.communicator import Communicator
from towers.cluster.links import Links
from towers.hosts.group import Membership


def memberships(count: int, **options: Any) -> list[Membership]:
    """Returns what each of several hosts knows."""
    with contextlib.ExitStack() as opened:
        sockets = [
            opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        addresses = tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)
    names = tuple(f"host {k}" for k in range(count))
    return [Membership(k, addresses, names, **options) for k in range(count)]


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Calls functions side by side; an error of theirs is returned."""

    def call(function):
        try:
            return function()
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [*pool.map(call, calls, timeout=HANG_S)]


@contextlib.contextmanager
def communicators(count: int) -> Iterator[list[Communicator]]:
    """Connects hosts."""
    links = [Links(each) for each in memberships(count)]
    try:
        yield in_threads([lambda each=each: Communicator(each) for each in links])
    finally:
        for each in links:
            each.close()


def on_each(every: list[Any], function: Callable[[int, Any], Any]) -> list[Any]:
    """Calls a function with each host's number, and what belongs to it."""
    return in_threads(
        [lambda k=k, each=each: function(k, each) for k, each in enumerate(every)]
    )
