"""Messages between two processes that know the same token, which is never sent.

Both ends send a random number first. With the token, these make the key of this one
connection, and every message carries a code (HMAC) by that key, by its direction and by
its number. Thus none can be made, changed or sent again by whoever has no token. They
can be read: nothing secret is in them.
"""

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
from typing import Any

from towers.program import forks

_GREETING = b"towers-1"
_NONCE, _CODE, _LENGTH = 16, hashlib.sha256().digest_size, 4
# What the first host tells of 1,024 hosts takes 100 KB. What others tell is short, and
# the first host keeps no more of a stranger's.
_LONGEST, _LONGEST_HEARD = 2**20, 2**14


class StrangerError(OSError):
    """The other end does not speak as hosts of Towers do."""


class MalformedError(StrangerError):
    """The other end has sent a message that no host sends."""


class TokenError(OSError):
    """The other end has another token."""


class Channel:
    """One end of a connection.

    Each method raises an OSError if the connection breaks, and bounds nothing in time.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        token: str | None,
        listens: bool,
    ):
        """Makes the end of a connection, for `greet` to begin with.

        Args:
            reader: Reads from it.
            writer: Writes to it.
            token: What both ends know; `None` if anybody may join.
            listens: Whether this end was connected to.
        """
        self._reader, self._writer = reader, writer
        self._token, self._listens = (token or "").encode(), listens
        self._sent = self._received = 0
        self._key = b""
        _notice_silence(writer)
        forks.close_in_children(self)

    @property
    def own_host(self) -> str:
        """The IP address of this end."""
        return self._writer.get_extra_info("sockname")[0]

    @property
    def other_host(self) -> str:
        """The IP address of the other end."""
        return self._writer.get_extra_info("peername")[0]

    async def greet(self) -> None:
        """Agrees on a key with the other end.

        Raises:
            StrangerError: It is no host of Towers.
        """
        own = secrets.token_bytes(_NONCE)
        self._writer.write(_GREETING + own)
        await self._writer.drain()
        greeting = await self._read(len(_GREETING) + _NONCE)
        if not greeting.startswith(_GREETING):
            raise StrangerError("what answers there is no host of Towers")
        nonces = [own, greeting[len(_GREETING) :]]
        if not self._listens:
            nonces.reverse()
        self._key = hmac.digest(self._token, b"".join(nonces), "sha256")

    async def send(self, message: dict[str, Any]) -> None:
        """Sends a message of what JSON knows."""
        payload = json.dumps(message).encode()
        code = self._code(payload, self._sent, self._listens)
        self._sent += 1
        self._writer.write(len(payload).to_bytes(_LENGTH) + code + payload)
        await self._writer.drain()

    async def receive(self) -> dict[str, Any]:
        """Receives a message.

        Raises:
            TokenError: It was made with another token.
            StrangerError: It is longer than a host's.
            MalformedError: It is none of a host's.
        """
        length = int.from_bytes(await self._read(_LENGTH))
        if length > (_LONGEST_HEARD if self._listens else _LONGEST):
            raise StrangerError(f"a message of {length:,} bytes came")
        code = await self._read(_CODE)
        payload = await self._read(length)
        expected = self._code(payload, self._received, not self._listens)
        if not hmac.compare_digest(code, expected):
            raise TokenError("the token is another one")
        self._received += 1
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise MalformedError("a message came that is no JSON") from error
        if not isinstance(message, dict):
            raise MalformedError("a message came that is no object")
        return message

    async def close(self) -> None:
        """Closes the connection, once all is sent."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass  # the other end was faster

    def finish(self) -> None:
        """Tells the other end that no more is sent, once all is; it may answer."""
        self._writer.write_eof()

    async def abort(self) -> None:
        """Closes the connection at once."""
        self._writer.transport.abort()
        await self.close()

    def _code(self, payload: bytes, number: int, from_listener: bool) -> bytes:
        place = number.to_bytes(8) + bytes([from_listener])
        return hmac.digest(self._key, place + payload, "sha256")

    async def _read(self, count: int) -> bytes:
        try:
            return await self._reader.readexactly(count)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the connection was closed") from error


def _notice_silence(writer: asyncio.StreamWriter) -> None:
    """Has the connection break if the other machine is gone, or cut off, for 25 s."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS has other names for some.
    for name, value in (("KEEPIDLE", 10), ("KEEPINTVL", 5), ("KEEPCNT", 3)):
        if (option := getattr(socket, f"TCP_{name}", None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
