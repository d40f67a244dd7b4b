"""Tells all hosts, within seconds, that one of them has failed, and why.

Each host keeps a connection to the first one, beside its links, and a thread
that sends a beat now and then. A process that ends closes its connection, whatever
ended it; a process that is stopped, or out of reach, is silent. The first host passes
on what was first. Of the links, whichever broke first would tell: it may be that of a
host that ended because of another.
"""

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
from towers.cluster.links.lines import Connections
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
# Why a host has left what the others are in, where it was no error.
_DONE = "its program has ended"
# Connections that have not said yet who they are, beside those of the hosts.
_MOST_STRANGERS = 100


class Heartbeat:
    """This host's part in it.

    Attributes:
        failure: What has failed, as a sentence; `None` as long as nothing has.
        describe: Says what this host does, in what JSON can hold, if another asks.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        fail: Callable[[str], None],
    ) -> None:
        """Begins nothing yet.

        Args:
            rank: Which of the hosts this one is.
            names: What to call each of them in sentences.
            fail: Is called once, in a thread, with what has failed. The process is
                ended if it does not end then by itself.
        """
        self._rank, self._names, self._fail = rank, names, fail
        self.failure: str | None = None
        self.describe: Callable[[], Any] = lambda: None
        # What hosts have answered, by number, since this one has asked.
        self._answers: dict[int, Any] = {}
        self._failed = threading.Event()
        # All hosts may come at once.
        self._connections = Connections(_MOST_STRANGERS + len(names))
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
        self._thread: threading.Thread | None = None
        self._timer: threading.Timer | None = None

    def listen(self, address: str) -> str:
        """Waits for the other hosts at an address; they need what this returns."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family)
        self._secret = os.urandom(16).hex()
        told = json.dumps([address, self._server.getsockname()[1], self._secret])
        self._connections.listen(self._server)
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
        """Notes that this host begins a call in which hosts meet, such as `fit`."""
        with self._lock:
            self._calls, self._inside = self._calls + 1, True
            self._entered_s = time.monotonic()

    def leave(self, error: BaseException | None) -> None:
        """Notes that the call has ended, and tells other hosts of an error."""
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
        """Notes that this host's program is at its end, and waits for the other hosts'.

        Returns:
            Whether all are, within so many seconds.
        """
        self._note_done(self._rank)
        self._connections.tell({"done": self._rank})
        self._settled.wait(seconds)
        return len(self._done) == len(self._names)

    def close(self) -> None:
        """Ends the thread, and closes the connections."""
        with self._lock:
            if self._connections.is_closed:
                return
            self._connections.wake()
            if self._timer is not None:
                self._timer.cancel()
        if self._thread is not None:
            self._thread.join()
        self._connections.close()
        # Whoever waits, in another thread, hears nothing any more.
        self._failed.set()
        self._settled.set()

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

    def wait_for_failure(self, seconds: float = SILENT_S + 3) -> str | None:
        """Waits until it is known what has failed; `None` if that does not come.

        A connection may end before it is known why.
        """
        self._failed.wait(seconds)
        return self.failure

    def _start(self):
        self._thread = threading.Thread(
            target=self._run, name="towers-heartbeat", daemon=True
        )
        self._thread.start()

    def _run(self):
        next_s = time.monotonic()
        while not self._connections.is_closed:
            for key, events in self._connections.wait(next_s - time.monotonic()):
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
            if not self._connections.keys():
                # Nobody is left to wait for.
                self._settled.set()
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
            peer.rank = self._rank_in(message, "rank")
            known = {key.data.rank for key in self._connections.keys()} - {None}
            if len(known) == len(self._names) - 1:
                # Nobody else has to come.
                self._connections.drop(self._server)
        elif "left" in message:
            self._left[self._rank_in(message, "host")] = (
                int(message["left"]),
                str(message["why"]),
                time.monotonic(),
            )
            self._pass_on(connection, message)
        elif "ask" in message:
            self._pass_on(connection, message)
            self._connections.tell({"does": self._rank, "said": self.describe()})
        elif "does" in message:
            self._pass_on(connection, message)
            with self._answered:
                self._answers[self._rank_in(message, "does")] = message["said"]
                self._answered.notify_all()
        elif "done" in message:
            self._pass_on(connection, message)
            self._note_done(self._rank_in(message, "done"))
        elif "failed" in message:
            self._note(self._rank_in(message, "failed"), str(message["why"]))

    def _rank_in(self, message, name):
        """Returns the number of a host that a message names; raises if it has none."""
        return range(len(self._names)).index(message[name])

    def _note_done(self, rank):
        with self._lock:
            self._done.add(rank)
            self._left.setdefault(rank, (0, _DONE, time.monotonic()))
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
            if self.failure is not None or self._connections.is_closed:
                return
            self.failure = f"{self._names[rank]} {why}"
            # Daemon, as the process may well end before.
            self._timer = threading.Timer(END_S, self._end)
            self._timer.daemon = True
            self._timer.start()
        self._connections.tell({"failed": rank, "why": why})
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
