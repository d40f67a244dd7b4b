"""Tells all hosts, within seconds, that one of them has failed, and why.

Each host keeps a connection to the first one, beside its links, and a thread
that sends a beat now and then. A process that ends closes its connection, whatever
ended it; a process that is stopped, or out of reach, is silent. The first host passes
on what was first. Of the links, whichever broke first would tell: it may be that of a
host that ended because of another.
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

from towers.cluster import addresses
from towers.cluster.links import LinkError
from towers.program import words
from towers.program.ending import ANOTHER_FAILED

BEAT_S = 1.0
# A C function that keeps Python's lock keeps the beat from being sent: up to about a
# second less than this does no harm.
SILENT_S = 12.0
# Whoever is still where another host has left waits for it.
LEFT_S = 5.0
# Then the process is ended, as it does not do so by itself.
END_S = 12.0
_MOST_BYTES = 2**16
# Connections that have not said yet who they are, beside those of the hosts.
_MOST_STRANGERS = 100


class HostFailedError(RuntimeError):
    """Another host of those that train together has failed; this one cannot go on."""


@dataclasses.dataclass
class _Peer:
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


class _Connections:
    """Those of a host, which none of the others can block.

    Attributes:
        selector: Waits for them; its data are a `_Peer`, `None` of what listens.
        lock: Is held by whoever changes something.
    """

    def __init__(self, most_strangers: int):
        self.selector, self.lock = selectors.DefaultSelector(), threading.RLock()
        self._most_strangers = most_strangers

    def keys(self) -> list[selectors.SelectorKey]:
        """Returns those to others."""
        keys = [*self.selector.get_map().values()]
        return [key for key in keys if key.data is not None]

    def add(self, connection: socket.socket, rank: int | None) -> None:
        """Adds one to a host, if its number is known."""
        connection.setblocking(False)
        with self.lock:
            self.selector.register(connection, selectors.EVENT_READ, _Peer(rank))

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
            self.selector.modify(key.fileobj, events, peer)

    def drop(self, connection: socket.socket) -> None:
        """Closes one."""
        with self.lock:
            self.selector.unregister(connection)
        connection.close()


class Heartbeat:
    """This host's part in it.

    Attributes:
        failure: What has failed, as a sentence; `None` as long as nothing has.
        describe: Says what this host does, in what JSON can hold, if another asks.
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
        self.describe: Callable[[], Any] = lambda: None
        # What hosts have answered, by number, since this one has asked.
        self._answers: dict[int, Any] = {}
        self._failed = threading.Event()
        # All hosts may come at once.
        self._connections = _Connections(_MOST_STRANGERS + len(names))
        self._lock = self._connections.lock
        self._answered = threading.Condition(self._lock)
        self._secret = ""
        self._server: socket.socket | None = None
        # By host, which call it has left by an error, and why.
        self._left: dict[int, tuple[int, str, float]] = {}
        # Which call this host is in, counted from 1, and since when.
        self._calls, self._inside, self._entered_s = 0, False, 0.0
        # Hosts whose programs are at their end.
        self._done: set[int] = set()
        self._settled = threading.Event()

    def listen(self, address: str) -> str:
        """Waits for the other hosts at an address; they need what this returns."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family)
        self._secret = os.urandom(16).hex()
        told = json.dumps([address, self._server.getsockname()[1], self._secret])
        self._connections.selector.register(self._server, selectors.EVENT_READ, None)
        self._start()
        return told

    def connect(self, told: str) -> None:
        """Connects to the first host, which has returned this from `listen`.

        Raises:
            LinkError: It cannot be reached there.
        """
        address, port, secret = json.loads(told)
        try:
            connection = socket.create_connection((address, port), timeout=SILENT_S)
        except OSError as error:
            raise LinkError(
                f"{self._names[self._rank]} cannot connect to {self._names[0]} at "
                f"{addresses.joined(address, port)}: {error}; open all ports between "
                "the hosts."
            ) from error
        self._connections.add(connection, 0)
        self._connections.tell({"rank": self._rank, "secret": secret})
        self._start()

    def enter(self) -> None:
        """Is told that this host begins a call in which hosts meet, such as `fit`."""
        with self._lock:
            self._calls, self._inside = self._calls + 1, True
            self._entered_s = time.monotonic()

    def leave(self, error: BaseException | None) -> None:
        """Is told that it has ended; others hear of an error."""
        with self._lock:
            self._inside = False
        if error is not None and self.failure is None:
            said = words.error_line(error, [type(error).__name__, "Error:"])
            why = said if "Error" in said else f"{type(error).__name__}: {said}"
            why = why[:300]
            self._connections.tell(
                {"host": self._rank, "left": self._calls, "why": why}
            )

    def finish(self, seconds: float) -> bool:
        """Is told that this host's program is at its end; waits for those of others.

        Returns:
            Whether all are, within so many seconds.
        """
        self._note_done(self._rank)
        self._connections.tell({"done": self._rank})
        self._settled.wait(seconds)
        return len(self._done) == len(self._names)

    def ask(self, seconds: float) -> dict[int, Any]:
        """Asks all hosts what they do.

        Returns:
            What those have said that answered within so many seconds, by number.
        """
        self._answers = {self._rank: self.describe()}
        self._connections.tell({"ask": self._rank})
        with self._answered:
            every = len(self._names)
            self._answered.wait_for(lambda: len(self._answers) == every, seconds)
            return dict(self._answers)

    def wait_for_failure(self, seconds: float) -> str | None:
        """Waits until it is known what has failed; `None` if that does not come."""
        self._failed.wait(seconds)
        return self.failure

    def _start(self):
        threading.Thread(target=self._run, name="towers-heartbeat", daemon=True).start()

    def _run(self):
        next_s = time.monotonic()
        while True:
            ready = self._connections.selector.select(next_s - time.monotonic())
            # What listens comes last: it may close some of the others.
            for key, events in sorted(ready, key=lambda each: each[0].data is None):
                if key.data is None:
                    self._connections.accept(key.fileobj)
                    continue
                if events & selectors.EVENT_WRITE:
                    self._connections.send(key, b"")
                if events & selectors.EVENT_READ:
                    self._receive(key.fileobj, key.data)
            if (now_s := time.monotonic()) >= next_s:
                next_s = now_s + BEAT_S
                self._connections.tell({"beat": 1})
                self._check(now_s)

    def _check(self, now_s):
        """Looks for hosts that are silent, or that others wait for in vain."""
        for key in self._connections.keys():
            peer = key.data
            peer.silent += 1
            if peer.silent * BEAT_S > SILENT_S:
                self._connections.drop(key.fileobj)
                self._note_unheard(peer, f"for {SILENT_S:.0f} s")
        for rank, (call, why, left_s) in [*self._left.items()]:
            waits = self._inside and (self._calls == call or rank in self._done)
            if waits and now_s - max(left_s, self._entered_s) > LEFT_S:
                self._note(rank, f"has left what the others are in: {why}")

    def _receive(self, connection, peer):
        try:
            data = connection.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        except OSError as error:
            self._connections.drop(connection)
            self._note_unheard(peer, f"({error.strerror})")
            return
        if not data or len(peer.buffer) > _MOST_BYTES:
            # Who has said that it is done may go, unless it is waited for.
            may_go = peer.rank in self._done and not self._inside
            self._connections.drop(connection)
            if peer.rank is not None and not may_go:
                _, why, _ = self._left.get(peer.rank, (0, "", 0.0))
                self._note(peer.rank, f"has ended: {why}" if why else "has ended")
            return
        peer.silent = 0
        *lines, peer.buffer = (peer.buffer + data).split(b"\n")
        for line in lines:
            try:
                self._hear(connection, peer, dict(json.loads(line)))
            except (ValueError, TypeError, LookupError, RecursionError):
                # No host of ours.
                self._connections.drop(connection)
                return

    def _hear(self, connection, peer, message: Mapping[str, Any]):
        if peer.rank is None:
            if not hmac.compare_digest(str(message["secret"]), self._secret):
                raise ValueError("a stranger")
            peer.rank = range(len(self._names))[message["rank"]]
            known = {key.data.rank for key in self._connections.keys()} - {None}
            if len(known) == len(self._names) - 1:
                # Nobody else has to come.
                self._connections.drop(self._server)
        elif "left" in message:
            self._left[message["host"]] = (
                message["left"],
                message["why"],
                time.monotonic(),
            )
            self._pass_on(connection, message)
        elif "ask" in message:
            self._pass_on(connection, message)
            self._connections.tell({"does": self._rank, "said": self.describe()})
        elif "does" in message:
            self._pass_on(connection, message)
            with self._answered:
                self._answers[message["does"]] = message["said"]
                self._answered.notify_all()
        elif "done" in message:
            self._pass_on(connection, message)
            self._note_done(message["done"])
        elif "failed" in message:
            self._note(message["failed"], message["why"])

    def _note_done(self, rank):
        with self._lock:
            self._done.add(rank)
            self._left.setdefault(rank, (0, "its program has ended", time.monotonic()))
            if len(self._done) == len(self._names):
                self._settled.set()

    def _note_unheard(self, peer, how):
        # The other end cannot know better, so both say the same.
        if peer.rank is not None and peer.rank not in self._done:
            here = self._names[self._rank]
            why = (
                f"has not been heard by {here} {how}: it is stopped, or cut off from it"
            )
            self._note(peer.rank, why)

    def _note(self, rank, why):
        """Notes what has failed first, and tells the others."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = f"{self._names[rank]} {why}"
        self._connections.tell({"failed": rank, "why": why})
        # Daemon, as the process may well end before.
        timer = threading.Timer(END_S, self._end)
        timer.daemon = True
        timer.start()
        self._failed.set()
        self._settled.set()
        self._fail(self.failure)

    def _end(self):
        if self._inside:
            print(f"\ntowers: {self.failure}; this host ends.", file=sys.stderr)
            sys.stderr.flush()
            os._exit(ANOTHER_FAILED)

    def _pass_on(self, source, message):
        if self._rank == 0:
            self._connections.tell(message, without=source)
