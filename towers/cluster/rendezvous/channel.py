"""Messages between two processes: lines of JSON.

The end that listens sends a random number. The other end answers with a code (HMAC) of
this number, which nobody can make without the token. The token itself is never sent.
Nothing else is secret, nor safe from whoever controls the network: TensorFlow's own
connections, which hosts use after they have met, are not either.
"""

import asyncio
import hmac
import json
import socket
from typing import Any

from towers.program import forks

# The first host tells 100 KB of 1,024 hosts. A stranger has it keep no more than that.
_LONGEST = 2**20


class Channel:
    """One end of a connection.

    Each method raises an OSError if the connection breaks, and bounds nothing in time.

    Attributes:
        own_host: The IP address of this end.
        other_host: The IP address of the other end.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        """Takes both directions of a connection."""
        self._reader, self._writer = reader, writer
        self.own_host = writer.get_extra_info("sockname")[0]
        self.other_host = writer.get_extra_info("peername")[0]
        _notice_silence(writer)
        forks.close_in_children(self)

    def fileno(self) -> int:
        """Returns the descriptor of the connection."""
        return self._writer.get_extra_info("socket").fileno()

    async def send(self, message: dict[str, Any]) -> None:
        """Sends a message, which JSON can represent."""
        self._writer.write(json.dumps(message).encode() + b"\n")
        await self._writer.drain()

    async def receive(self) -> dict[str, Any]:
        """Receives a message.

        Raises:
            ValueError: No host sends that.
        """
        try:
            line = await self._reader.readline()
            closed = not line.endswith(b"\n")
            message = {} if closed else json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError("it says what no host says") from error
        if closed:
            raise ConnectionResetError("the connection was closed")
        if not isinstance(message, dict):
            raise ValueError("it says what no host says")
        return message

    async def close(self) -> None:
        """Closes the connection, once all is sent."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass  # the other end was faster

    async def abort(self) -> None:
        """Closes the connection at once."""
        self._writer.transport.abort()
        await self.close()


async def connect(host: str, port: int) -> Channel:
    """Connects to a process that listens."""
    return Channel(*await asyncio.open_connection(host, port, limit=_LONGEST))


async def listen(visit: Any, listening: socket.socket, backlog: int) -> asyncio.Server:
    """Calls a coroutine function with a `Channel` for each process that connects."""
    return await asyncio.start_server(
        lambda reader, writer: visit(Channel(reader, writer)),
        sock=listening,
        backlog=backlog,
        limit=_LONGEST,
    )


def proof(token: str | None, number: str) -> str:
    """Returns the code that shows that a process knows the token.

    Args:
        token: What all hosts know; `None` if any process may join.
        number: The random number of the end that listens.
    """
    return hmac.digest((token or "").encode(), number.encode(), "sha256").hex()


def _notice_silence(writer: asyncio.StreamWriter) -> None:
    """Has the connection break if the other machine is gone, or cut off, for 25 s."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS has other names for some.
    for name, value in (("KEEPIDLE", 10), ("KEEPINTVL", 5), ("KEEPCNT", 3)):
        if (option := getattr(socket, f"TCP_{name}", None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
