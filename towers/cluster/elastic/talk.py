"""A connection that stays, by which each end also knows that the other one is there."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from towers.cluster.rendezvous.channel import Channel

BEAT_S = 1.0
# As for the heartbeat between hosts.
SILENT_S = 12.0
_CLOSE_S = 2.0


def sentence(words: str) -> str:
    """Makes a sentence of words that say something."""
    return f"{words[0].upper()}{words[1:]}."


class Talk:
    """One end of it; all is for one thread."""

    def __init__(self, channel: Channel):
        """Takes a channel whose ends have greeted each other."""
        self._channel = channel
        self._unsent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        # Beats since something came: what this process sleeps through is no silence.
        self._silent = 0

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, without waiting for the other end."""
        self._unsent.put_nowait(message)

    def end(self) -> None:
        """Closes the connection once all is sent."""
        self._unsent.put_nowait(None)

    async def run(self, hear: Callable[[dict[str, Any]], None]) -> str:
        """Sends and listens until one end closes the connection.

        Args:
            hear: Is called with each message.

        Returns:
            What has become of the other end, such as "has ended".
        """
        tasks = [
            asyncio.create_task(each)
            for each in (self._send(), self._receive(hear), self._beat())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._channel.abort()
        return next(task.result() for task in tasks if task in done)

    async def _send(self) -> str:
        with contextlib.suppress(OSError):
            while (message := await self._unsent.get()) is not None:
                await self._channel.send(message)
            # To close it now would take with it what was sent last, if something comes.
            self._channel.finish()
        # The other end closes it, or has, as who receives will see.
        await asyncio.sleep(_CLOSE_S)
        return "has ended"

    async def _receive(self, hear) -> str:
        try:
            while True:
                message = await self._channel.receive()
                self._silent = 0
                if "beat" not in message:
                    hear(message)
        except (ValueError, TypeError, LookupError):
            return "has said what no host says"
        except OSError:
            return "has ended"

    async def _beat(self) -> str:
        while self._silent * BEAT_S <= SILENT_S:
            self._silent += 1
            # To one that takes nothing, beats would only pile up.
            if self._unsent.empty():
                self.send({"beat": 1})
            await asyncio.sleep(BEAT_S)
        return f"has not been heard for {SILENT_S:.0f} s"
