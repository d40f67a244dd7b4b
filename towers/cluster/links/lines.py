"""Connections over which hosts tell one another lines, and none can block another."""

import contextlib
import dataclasses
import json
import selectors
import socket
import threading
from collections.abc import Mapping
from typing import Any

from towers.program import forks

_MOST_BYTES = 2**16


@dataclasses.dataclass
class Peer:
    """The other end of a connection.

    Attributes:
        rank: Number of its host; `None` as long as it has not said it.
        silent: Beats of this host since something came from it. What this process
            sleeps through is no silence of another's.
        buffer: A line that has not come whole.
        unsent: What it has not taken yet.
    """

    rank: int | None
    silent: int = 0
    buffer: bytes = b""
    unsent: bytes = b""


class Connections:
    """Those of a host, and what listens for others.

    Attributes:
        lock: Is held by whoever changes something.
        is_closed: Whether nobody is to wait for them any more.
    """

    def __init__(self, most_strangers: int):
        """Takes how many may be there that have not said yet who they are."""
        self._selector, self.lock = selectors.DefaultSelector(), threading.RLock()
        self._most_strangers = most_strangers
        self.is_closed = False
        # What is written to one end wakes whoever waits.
        self._woken, self._wakes = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)

    def keys(self) -> list[selectors.SelectorKey]:
        """Returns those to others, whose data are a `Peer`."""
        every = self._selector.get_map() or {}
        return [key for key in [*every.values()] if key.data is not None]

    def wait(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Waits until something comes, or may be sent.

        Returns:
            From where, and the events of each. Who connects comes last, without data:
            to take it may close some of the others.
        """
        ready = self._selector.select(seconds)
        ready = [each for each in ready if each[0].fileobj is not self._woken]
        return sorted(ready, key=lambda each: each[0].data is None)

    def listen(self, server: socket.socket) -> None:
        """Adds what listens."""
        forks.close_in_children(server)
        self._selector.register(server, selectors.EVENT_READ)

    def add(self, connection: socket.socket, rank: int | None) -> None:
        """Adds one to a host, if its number is known."""
        forks.close_in_children(connection).setblocking(False)
        with self.lock:
            self._selector.register(connection, selectors.EVENT_READ, Peer(rank))

    def accept(self, server: socket.socket) -> None:
        """Adds one that begins; of too many strangers, the oldest has to go."""
        # Whoever connects may have gone again.
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            self.add(connection, None)
        strangers = [key for key in self.keys() if key.data.rank is None]
        for key in strangers[: max(len(strangers) - self._most_strangers, 0)]:
            self.drop(key.fileobj)

    def tell(
        self, message: Mapping[str, Any], without: socket.socket | None = None
    ) -> None:
        """Sends a message to all hosts but one."""
        line = json.dumps(message).encode() + b"\n"
        with self.lock:
            for key in self.keys():
                known = key.data.rank is not None and key.fileobj is not without
                # Of one that does not take them, beats would only pile up.
                if known and not ("beat" in message and key.data.unsent):
                    self.send(key, line)

    def send(self, key: selectors.SelectorKey, line: bytes) -> None:
        """Sends what the other end takes, and keeps the rest."""
        peer = key.data
        with self.lock:
            peer.unsent += line
            try:
                peer.unsent = peer.unsent[key.fileobj.send(peer.unsent) :]
            except BlockingIOError:
                pass
            except OSError:
                # What ends the connection is seen where something is received.
                peer.unsent = b""
            events = selectors.EVENT_READ
            if peer.unsent:
                events |= selectors.EVENT_WRITE
            self._selector.modify(key.fileobj, events, peer)

    def drop(self, connection: socket.socket) -> None:
        """Closes one."""
        with self.lock:
            self._selector.unregister(connection)
        connection.close()

    def wake(self) -> None:
        """Has whoever waits for them look whether they are closed."""
        self.is_closed = True
        self._wakes.send(b"!")

    def close(self) -> None:
        """Closes all; nobody may wait for them any more."""
        with self.lock:
            every = [*self._selector.get_map().values()]
            self._selector.close()
        for key in every:
            with contextlib.suppress(OSError):
                # A process that this one has forked may have it, too.
                key.fileobj.shutdown(socket.SHUT_WR)
                # What is not read would take with it what was sent last.
                while key.data is not None and key.fileobj.recv(_MOST_BYTES):
                    pass
            key.fileobj.close()
        self._wakes.close()
