"""A host's connections to others, and the exchange of bytes over them.

A head before each message tells purpose and size. Hosts that trace differently would
add what does not belong together, or wait for ever: so what does not match is an error
on both sides.
"""

import contextlib
import itertools
import select
import socket
import struct
import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

from towers.cluster import addresses
from towers.cluster.links.greeting import Greeting, LinkError
from towers.cluster.links.shared_memory import SharedMemoryConnection, share
from towers.hosts.group import HostsDifferError, Membership
from towers.program import forks, words

# Every message tells how many bytes follow, and what they are.
_HEAD, _NAMED = struct.Struct("<Q56s"), 56
# Most bytes that one call of the system takes: others may have to wait so long.
_MOST_BYTES = 2**20
# Fewer bytes are sent together with their head.
_SMALL_BYTES = 2**12


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
        self._wakes.setblocking(False)
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
        greeting = Greeting(self._membership, lambda: self._aborted)
        _, port = addresses.split(self._membership.addresses[self.rank])
        own = self.own_address
        with forks.close_in_children(greeting.listen(own, port)) as server:
            # A host waits for those before it only, so nobody waits in a circle.
            for peer in sorted(peer for peer in peers if peer < self.rank):
                self._to[peer] = greeting.dial(peer)
            missing = {*peers} - self._to.keys()
            self._to.update(greeting.admit(server, self._woken, missing))
        # All do this in the same order, so that nobody waits in a circle.
        for peer in sorted(peers):
            connection = forks.close_in_children(self._to[peer])
            connection.settimeout(max(greeting.until_s - time.monotonic(), 0.001))
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
        self._aborted = self._aborted or message
        # Once it was closed, nobody waits.
        with contextlib.suppress(OSError):
            self._wakes.send(b"!")

    def close(self) -> None:
        """Closes the connections, which nobody uses any more."""
        self.broken = self.broken or LinkError("This host has left the others.")
        for connection in self._to.values():
            # A process that this one has forked may have it, too.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._woken.close()
        self._wakes.close()

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
        names = self._names[self.rank], self._names[source]
        return HostsDifferError.between(names[0], here, names[1], there)
