"""Each other host connects to the first one."""

import asyncio
import contextlib
import dataclasses
import os
import socket
from typing import Any

from towers.cluster import addresses
from towers.cluster.rendezvous import channel as channels
from towers.cluster.rendezvous.host import (
    ANSWER_S,
    QUIET_S,
    HostDescription,
    HostsMissingError,
    RendezvousError,
    membership,
    own_address,
    within,
)
from towers.hosts.group import Membership, ProcessPlace
from towers.program import voice


class Guest:
    """A host that connects to the first one."""

    def __init__(self, place: ProcessPlace):
        self._place = place
        self._reason = "it has not answered"

    async def join(self) -> Membership:
        """Tries to connect, again and again, and learns who all are."""
        place, pause = self._place, 0.05
        note = asyncio.get_running_loop().call_later(QUIET_S, self._say_what_is_wrong)
        try:
            async with asyncio.timeout(place.join_seconds) as limit:
                end = limit.when()
                while True:
                    try:
                        return await self._try(limit, note)
                    except RendezvousError:
                        raise
                    except (AttributeError, LookupError, TypeError):
                        self._reason = "it says what no host says"
                    except (OSError, ValueError) as error:
                        self._reason = reason(error)
                    limit.reschedule(end)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, 1)
        except TimeoutError as error:
            raise HostsMissingError(
                f"Within {place.join_seconds:g} s, host {place.rank} of {place.count} "
                f"({socket.gethostname()}, pid {os.getpid()}) could not meet the first "
                f"host at {place.coordinator} ({self._reason}); start it there, and "
                "open that port to this host."
            ) from error
        finally:
            note.cancel()

    async def _try(self, limit: asyncio.Timeout, note: asyncio.Handle) -> Membership:
        place = self._place
        async with asyncio.timeout(ANSWER_S):
            channel = await channels.connect(*addresses.split(place.coordinator))
        try:
            with contextlib.ExitStack() as held:
                address = own_address(place, channel.own_host, held)
                async with asyncio.timeout(ANSWER_S):
                    number = (await channel.receive())["towers"]
                    own = dataclasses.asdict(HostDescription.here(place, address))
                    own["proof"] = channels.proof(place.token, number)
                    await channel.send(own)
                    left = self._good(await channel.receive())["seconds_left"]
                note.cancel()
                now = asyncio.get_running_loop().time()
                limit.reschedule(now + left + 3 * ANSWER_S)
                listed = self._good(await channel.receive())
                # All are there: from here on, it takes milliseconds.
                limit.reschedule(asyncio.get_running_loop().time() + 3 * ANSWER_S)
                await channel.send({"acknowledged": True})
                self._good(await channel.receive())
                return membership(place, listed)
        finally:
            await within(1.0, channel.close())

    def _good(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a message of the first host, unless hosts cannot meet."""
        if "other_token" in message:
            raise RendezvousError(
                f"The first host at {self._place.coordinator} has another token than "
                f"host {self._place.rank} ({socket.gethostname()}); give all hosts the "
                "same TOWERS_TOKEN."
            )
        if "failed" in message:
            kind = HostsMissingError if message["missing"] else RendezvousError
            raise kind(message["failed"])
        return message

    def _say_what_is_wrong(self) -> None:
        voice.say(
            f"Waiting for the first host at {self._place.coordinator} "
            f"({self._reason}), for {self._place.join_seconds - QUIET_S:.0f} s at "
            "most."
        )


def reason(error: Exception) -> str:
    """Says in a few words why a host could not be reached."""
    if isinstance(error, TimeoutError):
        return f"no answer within {ANSWER_S:g} s"
    if (getattr(error, "errno", None) or 0) > 0:
        return os.strerror(error.errno)  # without what asyncio adds
    return getattr(error, "strerror", None) or str(error)
