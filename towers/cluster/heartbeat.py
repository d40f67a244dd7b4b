"""Tells all hosts, within seconds, that one of them has failed, and why.

Each host keeps a connection to the first one, beside TensorFlow's own, and a thread
that sends a beat now and then. A process that ends closes its connection, whatever
ended it; a process that is stopped, or out of reach, is silent. The first host passes
on what was first. TensorFlow would report whichever host's connection broke first: it
may be that of a host that ended because of another.
"""

import contextlib
import dataclasses
import hmac
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from towers.program.ending import ANOTHER_FAILED

BEAT_S = 1.0
# A thread of Python may have to wait for others that long.
SILENT_S = 12.0
# Whoever is still where another host has left waits for it.
LEFT_S = 5.0
# Then the process is ended, as it does not do so by itself.
END_S = 15.0
_MOST_BYTES = 2**16


class HostFailedError(RuntimeError):
    """Another host of those that train together has failed; this one cannot go on."""


@dataclasses.dataclass
class _Peer:
    """The other end of a connection.

    Attributes:
        rank: Number of its host; `None` as long as it has not said it.
        heard_s: When something came from it.
        buffer: A line that has not come whole.
    """

    rank: int | None
    heard_s: float
    buffer: bytes = b""


class Heartbeat:
    """This host's part in it.

    Attributes:
        failure: What has failed, as a sentence; `None` as long as nothing has.
    """

    def __init__(
        self, rank: int, names: Sequence[str], fail: Callable[[str], None]
    ) -> None:
        """Begins nothing yet.

        Args:
            rank: Which of the hosts this one is.
            names: What to call each of them in sentences.
            fail: Is called once, in a thread, with what has failed.
        """
        self._rank, self._names, self._fail = rank, names, fail
        self.failure: str | None = None
        self._failed = threading.Event()
        self._selector, self._lock = selectors.DefaultSelector(), threading.RLock()
        self._secret = ""
        # By host, which call it has left by an error, and why.
        self._left: dict[int, tuple[int, str, float]] = {}
        # Which call this host is in, counted from 1; 0 for none.
        self._calls, self._inside = 0, False

    def listen(self, address: str) -> str:
        """Waits for the other hosts at an address; they need what this returns."""
        server = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        self._secret = os.urandom(16).hex()
        self._selector.register(server, selectors.EVENT_READ, None)
        self._start()
        return json.dumps([address, server.getsockname()[1], self._secret])

    def connect(self, told: str) -> None:
        """Connects to the first host, which has returned this from `listen`."""
        address, port, secret = json.loads(told)
        connection = socket.create_connection((address, port), timeout=SILENT_S)
        self._register(connection, 0)
        self._send(connection, {"rank": self._rank, "secret": secret})
        self._start()

    def enter(self) -> None:
        """Is told that this host begins a call in which hosts meet, such as `fit`."""
        with self._lock:
            self._calls, self._inside = self._calls + 1, True

    def leave(self, error: BaseException | None) -> None:
        """Is told that it has ended; others hear of an error."""
        with self._lock:
            self._inside = False
        if error is not None and self.failure is None:
            why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self._tell({"host": self._rank, "left": self._calls, "why": why})

    def wait_for_failure(self, seconds: float) -> str | None:
        """Waits until it is known what has failed; `None` if that does not come."""
        self._failed.wait(seconds)
        return self.failure

    def _start(self):
        threading.Thread(target=self._run, name="towers-heartbeat", daemon=True).start()

    def _register(self, connection, rank):
        connection.setblocking(False)
        peer = _Peer(rank, time.monotonic())
        with self._lock:
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _run(self):
        beat_s = 0.0
        while True:
            for key, _ in self._selector.select(BEAT_S / 2):
                if key.data is None:
                    self._register(key.fileobj.accept()[0], None)
                else:
                    self._receive(key.fileobj, key.data)
            now_s = time.monotonic()
            if now_s - beat_s > BEAT_S:
                beat_s = now_s
                self._tell({"beat": 1})
                self._check(now_s)

    def _check(self, now_s):
        """Looks for hosts that are silent, or that others wait for in vain."""
        for key in [*self._selector.get_map().values()]:
            peer = key.data
            if peer is None or now_s - peer.heard_s < SILENT_S:
                continue
            self._drop(key.fileobj)
            if peer.rank is not None:
                self._note(peer.rank, f"has been silent for {SILENT_S:.0f} s")
        for rank, (call, why, left_s) in [*self._left.items()]:
            waits = self._inside and self._calls == call
            if waits and now_s - left_s > LEFT_S:
                self._note(rank, f"has left what the others are in: {why}")

    def _receive(self, connection, peer):
        try:
            data = connection.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(peer.buffer) > _MOST_BYTES:
            self._drop(connection)
            if peer.rank is not None:
                _, why, _ = self._left.get(peer.rank, (0, "", 0.0))
                self._note(peer.rank, f"has ended: {why}" if why else "has ended")
            return
        peer.heard_s = time.monotonic()
        *lines, peer.buffer = (peer.buffer + data).split(b"\n")
        for line in lines:
            try:
                self._hear(connection, peer, dict(json.loads(line)))
            except (ValueError, TypeError, KeyError):
                # No host of ours.
                self._drop(connection)
                return

    def _hear(self, connection, peer, message: Mapping[str, Any]):
        if peer.rank is None:
            if not hmac.compare_digest(str(message["secret"]), self._secret):
                raise ValueError("a stranger")
            peer.rank = int(message["rank"])
        elif "left" in message:
            self._left[message["host"]] = (
                message["left"],
                message["why"],
                time.monotonic(),
            )
            self._pass_on(connection, message)
        elif "failed" in message:
            self._note(message["failed"], message["why"])

    def _note(self, rank, why):
        """Notes what has failed first, and tells the others."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = f"{self._names[rank]} {why}"
        self._tell({"failed": rank, "why": why})
        self._failed.set()
        self._fail(self.failure)
        # Daemon, as the process may well end before.
        timer = threading.Timer(END_S, self._end)
        timer.daemon = True
        timer.start()

    def _end(self):
        if self._inside:
            print(f"\ntowers: {self.failure}; this host ends.", file=sys.stderr)
            sys.stderr.flush()
            os._exit(ANOTHER_FAILED)

    def _pass_on(self, source, message):
        if self._rank == 0:
            self._tell(message, without=source)

    def _tell(self, message, without=None):
        with self._lock:
            for key in self._selector.get_map().values():
                known = key.data is not None and key.data.rank is not None
                if known and key.fileobj is not without:
                    self._send(key.fileobj, message)

    def _send(self, connection, message):
        # What a silent host does not take fills its buffer, and is lost with it.
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(message).encode() + b"\n")

    def _drop(self, connection):
        with self._lock:
            self._selector.unregister(connection)
        connection.close()
