"""Connections between hosts, over which collectives exchange bytes."""

import contextlib
import hashlib
import hmac
import itertools
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Collection, Generator, Iterable
from typing import NamedTuple

from towers.cluster import addresses
from towers.cluster.membership import HostsDifferError, Membership
from towers.cluster.shared_memory import SharedMemoryConnection, read, share
from towers.program import words

# Every message tells how many bytes follow, and what they are.
_HEAD, _NAMED = struct.Struct("<Q56s"), 56
# Most bytes that one call of the system takes: others may have to wait so long.
_MOST_BYTES = 2**20
# Fewer bytes are sent together with their head.
_SMALL_BYTES = 2**12
# All have met, so it takes milliseconds.
_CONNECT_S, _GREET_S, _AGAIN_S = 60.0, 10.0, 0.02
# Connections that have not shown yet that a host made them.
_MOST_STRANGERS = 100
_GREETING = struct.Struct(">8sI16s")
_MAGIC, _CODE = b"towers-3", hashlib.sha256().digest_size


class LinkError(ConnectionError):
    """Another host cannot be reached any more, or has failed."""


class Message(NamedTuple):
    """What is exchanged.

    Attributes:
        size: Number of bytes.
        parts: Buffers of so many bytes in all, none of them empty.
    """

    size: int
    parts: Iterable[memoryview]


class Links:
    """This host's connections to others.

    One thread at a time uses them; any may abort.

    Attributes:
        rank: Which of the hosts this one is.
        count: How many hosts there are.
        doing: What is exchanged, and since when by `time.monotonic`; `None` between
            exchanges.
        moved_bytes: Bytes sent.
        broken: What has ended the exchanges, once something has.
    """

    def __init__(self, membership: Membership):
        """Connects to no host yet."""
        self._membership, self._names = membership, membership.names
        self.rank, self.count = membership.rank, membership.count
        self._to: dict[int, socket.socket | SharedMemoryConnection] = {}
        self._aborted: str | None = None
        # What is written to one end wakes whoever waits at the other.
        self._woken, self._wakes = socket.socketpair()
        self.doing: tuple[str, float] | None = None
        self.moved_bytes = 0
        self.broken: Exception | None = None

    @property
    def own_address(self) -> str:
        """The IP address at which this host listens."""
        host, _ = addresses.split(self._membership.addresses[self.rank])
        return addresses.resolved(host)

    @property
    def peers(self) -> Collection[int]:
        """The hosts that this one is connected to."""
        return self._to.keys()

    def connect(self, peers: Collection[int]) -> None:
        """Connects to hosts, which do the same.

        Args:
            peers: Their numbers. Where one host has another, that one has it, too.

        Raises:
            LinkError: A host cannot be reached.
        """
        if not peers:
            return
        until_s = time.monotonic() + _CONNECT_S
        _, port = addresses.split(self._membership.addresses[self.rank])
        own = self.own_address
        with _listening(own, port, until_s) as server:
            # A host waits for those before it only, so nobody waits in a circle.
            for peer in sorted(peer for peer in peers if peer < self.rank):
                self._to[peer] = self._dial(peer, until_s)
            self._admit(server, {*peers} - self._to.keys(), until_s)
        # All do this in the same order, so that nobody waits in a circle.
        for peer in sorted(peers):
            connection = self._to[peer]
            connection.settimeout(max(until_s - time.monotonic(), 0.001))
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if connection.getpeername()[0] == connection.getsockname()[0]:
                    self._to[peer] = share(connection) or connection
            except OSError as error:
                name = self._names[peer]
                raise LinkError(f"{name} cannot be reached: {error}.") from error
            connection.setblocking(False)

    def exchange(
        self,
        purpose: str,
        to: int | None = None,
        sent: "Message | None" = None,
        source: int | None = None,
        into: "Message | None" = None,
    ) -> None:
        """Sends bytes to one host, and receives as many as expected from another.

        Args:
            purpose: What they are; the same on both ends.
            to: Number of the host to send to; `None` to send nothing.
            sent: What to send.
            source: Number of the host to receive from; `None` to receive nothing.
            into: What to fill. A part is asked for once the one before is full.

        Raises:
            LinkError: A host has ended or is out of reach, or the exchange was aborted.
            HostsDifferError: The other host sends something else.
        """
        if self.broken is not None:
            raise self.broken
        self.doing = purpose, time.monotonic()
        name = purpose.encode()[:_NAMED]
        outgoing = incoming = iter(())
        if to is not None:
            outgoing = itertools.chain([_HEAD.pack(sent.size, name)], sent.parts)
            if sent.size <= _SMALL_BYTES:
                outgoing = [b"".join(outgoing)]
            outgoing = map(memoryview, outgoing)
            self.moved_bytes += sent.size
        if source is not None:
            incoming = self._checked(source, _HEAD.pack(into.size, name), into.parts)
        try:
            sending, receiving = next(outgoing, None), next(incoming, None)
            while sending or receiving:
                count = 0
                if sending:
                    count = self._send(to, sending)
                    sending = sending[count:] or next(outgoing, None)
                if receiving:
                    received = self._receive(source, receiving)
                    receiving = receiving[received:] or next(incoming, None)
                    count += received
                if not count:
                    self._wait(to if sending else None, source if receiving else None)
        except (OSError, HostsDifferError) as error:
            self.broken = error
            if not isinstance(error, LinkError | HostsDifferError):
                self.broken = LinkError(f"A connection ended: {error}.")
            # Hosts that wait for this one hear of it.
            for connection in self._to.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
            raise self.broken from None
        self.doing = None

    def abort(self, message: str) -> None:
        """Ends what waits, in any thread, by a `LinkError` with a message."""
        self._aborted = message
        self._wakes.send(b"!")

    def close(self) -> None:
        """Closes the connections."""
        for connection in self._to.values():
            connection.close()

    def _checked(self, source, expected, parts):
        """Yields what to fill: a head, which is checked, before the parts."""
        head = bytearray(_HEAD.size)
        yield memoryview(head)
        if head != expected:
            raise self._difference(source, head, expected)
        yield from parts

    def _send(self, to, buffer):
        """Sends what the other end takes; returns how many bytes."""
        try:
            return self._to[to].send(buffer[:_MOST_BYTES])
        except BlockingIOError:
            return 0

    def _receive(self, source, buffer):
        """Receives what is there; returns how many bytes."""
        try:
            count = self._to[source].recv_into(buffer[:_MOST_BYTES])
        except BlockingIOError:
            return 0
        if not count:
            raise LinkError(f"{self._names[source]} has closed its connection.")
        return count

    def _wait(self, to, source):
        """Waits until a host can be sent to, or something came from one."""
        if self._aborted is not None:
            raise LinkError(self._aborted)
        events = {self._woken: select.POLLIN}
        for peer, event in ((to, select.POLLOUT), (source, select.POLLIN)):
            if peer is not None:
                connection = self._to[peer]
                if isinstance(connection, SharedMemoryConnection):
                    event = select.POLLIN
                events[connection] = events.get(connection, 0) | event
        poll = select.poll()
        for connection, event in events.items():
            poll.register(connection, event)
        poll.poll()

    def _difference(self, source, head, expected):
        here, there = (
            f"{name.rstrip(bytes(1)).decode(errors='replace')} "
            f"({words.count(size, 'byte')})"
            for size, name in (_HEAD.unpack(expected), _HEAD.unpack(head))
        )
        return HostsDifferError(
            f"{self._names[self.rank]} exchanges {here} where {self._names[source]} "
            f"exchanges {there}; hosts that train together have to run the same "
            "program with the same arguments, on the same batches."
        )

    def _dial(self, peer, until_s):
        """Connects to a host, which may begin to listen a little later."""
        address = addresses.split(self._membership.addresses[peer])
        while True:
            try:
                connection = socket.create_connection(address, timeout=_GREET_S)
                try:
                    self._greet(connection, peer)
                except BaseException:
                    connection.close()
                    raise
                return connection
            except OSError as error:
                if time.monotonic() > until_s:
                    raise LinkError(
                        f"{self._names[self.rank]} cannot connect to "
                        f"{self._names[peer]} at {self._membership.addresses[peer]}: "
                        f"{error}."
                    ) from error
            time.sleep(_AGAIN_S)

    def _greet(self, connection, peer):
        """Shows the other end that this host has the token, and sees that it has."""
        nonce = secrets.token_bytes(16)
        connection.sendall(_GREETING.pack(_MAGIC, self.rank, nonce))
        answer = read(connection, 16 + _CODE)
        key = nonce + answer[:16]
        if not hmac.compare_digest(answer[16:], self._code(peer, key)):
            raise LinkError("the other end has another token")
        connection.sendall(self._code(self.rank, key))

    def _admit(self, server, missing: Collection[int], until_s: float) -> None:
        """Takes the connections of hosts that are missing.

        It listens to all that connect at once, so a silent stranger delays no host.
        """
        with contextlib.ExitStack() as opened:
            selector = opened.enter_context(selectors.DefaultSelector())
            selector.register(server, selectors.EVENT_READ)
            opened.callback(_close_strangers, selector, 0)
            while waits_for := sorted({*missing} - self._to.keys()):
                if (left_s := until_s - time.monotonic()) <= 0:
                    listed = ", ".join(self._names[peer] for peer in waits_for)
                    raise LinkError(
                        f"{listed} did not connect within {_CONNECT_S:g} s."
                    )
                ready = [key for key, _ in selector.select(left_s)]
                for key in ready:
                    if key.fileobj is not server:
                        _continue(selector, key)
                if any(key.fileobj is server for key in ready):
                    # Whoever connects may have gone again.
                    with contextlib.suppress(OSError):
                        connection, _ = server.accept()
                        connection.setblocking(False)
                        visit = self._welcome(connection, missing)
                        next(visit)
                        selector.register(connection, selectors.EVENT_READ, visit)
                    _close_strangers(selector, _MOST_STRANGERS)

    def _welcome(self, connection, missing) -> Generator[None, None, None]:
        """Takes a connection from a host that is missing.

        It yields whenever it waits for bytes.

        Raises:
            OSError: A stranger connected, or has gone.
        """
        greeting = yield from _arriving(connection, _GREETING.size)
        magic, peer, nonce = _GREETING.unpack(greeting)
        if magic != _MAGIC or peer not in missing or peer in self._to:
            raise LinkError("a stranger connected")
        own = secrets.token_bytes(16)
        connection.sendall(own + self._code(self.rank, nonce + own))
        code = yield from _arriving(connection, _CODE)
        if not hmac.compare_digest(code, self._code(peer, nonce + own)):
            raise LinkError("the other end has another token")
        self._to[peer] = connection

    def _code(self, rank, key):
        token = (self._membership.token or "").encode()
        place = struct.pack(">II", rank, self._membership.generation)
        return hmac.digest(token, place + key, "sha256")


def _arriving(connection, count) -> Generator[None, None, bytes]:
    """Returns so many bytes; yields whenever it waits for some."""
    data = b""
    while len(data) < count:
        yield
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the other end has closed the connection")
        data += part
    return data


def _continue(selector, key):
    """Goes on with a visit that has received something."""
    try:
        next(key.data)
    except StopIteration:
        selector.unregister(key.fileobj)
    except OSError:
        selector.unregister(key.fileobj)
        key.fileobj.close()


def _close_strangers(selector, most):
    """Closes the oldest connections of strangers, so that no more than some stay."""
    strangers = [key for key in selector.get_map().values() if key.data is not None]
    for key in strangers[: max(len(strangers) - most, 0)]:
        selector.unregister(key.fileobj)
        key.fileobj.close()


def _listening(address, port, until_s):
    """A socket that listens; that of an earlier process may still have the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    while True:
        try:
            return socket.create_server((address, port), family=family, backlog=1024)
        except OSError as error:
            if time.monotonic() > until_s:
                raise LinkError(
                    f"This host cannot listen at {addresses.joined(address, port)}: "
                    f"{error.strerror}."
                ) from error
        time.sleep(_AGAIN_S)
