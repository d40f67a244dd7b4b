"""How hosts connect: each shows the other that it has the token, which is never sent.

A host listens for as long as it takes, to all that connect at once, so that a silent
stranger delays no host.
"""

import contextlib
import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Generator

from towers.cluster import addresses
from towers.cluster.links.shared_memory import read
from towers.hosts.group import Membership

# All have met, so it takes milliseconds.
_CONNECT_S, _GREET_S, _AGAIN_S = 60.0, 10.0, 0.02
# Connections that have not shown yet that a host made them.
_MOST_STRANGERS = 100
_GREETING = struct.Struct(">8sI16s")
_MAGIC, _CODE = b"towers-3", hashlib.sha256().digest_size


class LinkError(ConnectionError):
    """Another host cannot be reached any more, or has failed."""


class Greeting:
    """This host's side of new connections.

    Attributes:
        until_s: How long it takes at most, by `time.monotonic`.
    """

    def __init__(self, membership: Membership, why_not: Callable[[], str | None]):
        """Connects to nobody yet.

        Args:
            membership: What this host knows.
            why_not: Says why it is to stop, once it is.
        """
        self._membership, self._names = membership, membership.names
        self._rank, self._why_not = membership.rank, why_not
        self.until_s = time.monotonic() + _CONNECT_S

    def listen(self, address: str, port: int) -> socket.socket:
        """Returns a socket that listens; an earlier process may still have the port.

        Raises:
            LinkError: It keeps it.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        while True:
            try:
                at = address, port
                return socket.create_server(at, family=family, backlog=1024)
            except OSError as error:
                if time.monotonic() > self.until_s:
                    raise LinkError(
                        f"This host cannot listen at {addresses.joined(*at)}: "
                        f"{error.strerror}."
                    ) from error
            self._check()
            time.sleep(_AGAIN_S)

    def dial(self, peer: int) -> socket.socket:
        """Connects to a host, which may begin to listen a little later.

        Raises:
            LinkError: It cannot be reached, or is not to be any more.
        """
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
                if time.monotonic() > self.until_s:
                    raise LinkError(
                        f"{self._names[self._rank]} cannot connect to "
                        f"{self._names[peer]} at {self._membership.addresses[peer]}: "
                        f"{error}."
                    ) from error
            self._check()
            time.sleep(_AGAIN_S)

    def admit(
        self, server: socket.socket, woken: socket.socket, missing: Collection[int]
    ) -> Generator[tuple[int, socket.socket], None, None]:
        """Yields the connections of hosts that are missing, by their numbers.

        Args:
            server: Listens.
            woken: Can be read once this host is to stop.
            missing: The hosts.

        Raises:
            LinkError: One does not come, or is not waited for any more.
        """
        missing = {*missing}
        with contextlib.ExitStack() as opened:
            selector = opened.enter_context(selectors.DefaultSelector())
            for each in (server, woken):
                selector.register(each, selectors.EVENT_READ)
            opened.callback(_close_strangers, selector, 0)
            while missing:
                if (left_s := self.until_s - time.monotonic()) <= 0:
                    listed = ", ".join(self._names[peer] for peer in sorted(missing))
                    raise LinkError(
                        f"{listed} did not connect within {_CONNECT_S:g} s."
                    )
                ready = [key for key, _ in selector.select(left_s)]
                self._check()
                for key in ready:
                    if key.data is not None and (came := _continue(selector, key)):
                        missing.discard(came[0])
                        yield came
                if any(key.fileobj is server for key in ready):
                    # Whoever connects may have gone again.
                    with contextlib.suppress(OSError):
                        connection, _ = server.accept()
                        connection.setblocking(False)
                        visit = self._welcome(connection, missing)
                        next(visit)
                        selector.register(connection, selectors.EVENT_READ, visit)
                    _close_strangers(selector, _MOST_STRANGERS)

    def _check(self):
        if (why := self._why_not()) is not None:
            raise LinkError(why)

    def _greet(self, connection, peer):
        """Shows the other end that this host has the token, and sees that it has."""
        nonce = secrets.token_bytes(16)
        connection.sendall(_GREETING.pack(_MAGIC, self._rank, nonce))
        answer = read(connection, 16 + _CODE)
        key = nonce + answer[:16]
        if not hmac.compare_digest(answer[16:], self._code(peer, key)):
            raise LinkError("the other end has another token")
        connection.sendall(self._code(self._rank, key))

    def _welcome(self, connection, missing) -> Generator[None, None, int]:
        """Listens to one that connects; returns which host it is.

        It yields whenever it waits for bytes.

        Raises:
            OSError: A stranger connected, or has gone.
        """
        greeting = yield from _arriving(connection, _GREETING.size)
        magic, peer, nonce = _GREETING.unpack(greeting)
        if magic != _MAGIC or peer not in missing:
            raise LinkError("a stranger connected")
        own = secrets.token_bytes(16)
        connection.sendall(own + self._code(self._rank, nonce + own))
        code = yield from _arriving(connection, _CODE)
        if not hmac.compare_digest(code, self._code(peer, nonce + own)):
            raise LinkError("the other end has another token")
        if peer not in missing:
            raise LinkError("it has come before")
        return peer

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


def _continue(selector, key) -> tuple[int, socket.socket] | None:
    """Goes on with a visit that has received something; returns a host that came."""
    try:
        next(key.data)
        return None
    except StopIteration as done:
        selector.unregister(key.fileobj)
        return done.value, key.fileobj
    except OSError:
        selector.unregister(key.fileobj)
        key.fileobj.close()
        return None


def _close_strangers(selector, most):
    """Closes the oldest connections of strangers, so that no more than some stay."""
    strangers = [key for key in selector.get_map().values() if key.data is not None]
    for key in strangers[: max(len(strangers) - most, 0)]:
        selector.unregister(key.fileobj)
        key.fileobj.close()
