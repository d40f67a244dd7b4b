"""The first host listens for the others, until all have come or the time is over."""

import asyncio
import contextlib
import errno
import hmac
import secrets
import socket
from typing import Any

from towers.cluster import addresses
from towers.cluster.rendezvous import channel as channels
from towers.cluster.rendezvous.channel import Channel
from towers.cluster.rendezvous.host import (
    ANSWER_S,
    QUIET_S,
    HostDescription,
    HostsMissingError,
    RendezvousError,
    difference,
    membership,
    numbered,
    own_address,
    warn_of_stranger,
    warn_of_token,
    within,
)
from towers.hosts.group import Membership, ProcessPlace
from towers.program import forks, voice, words

# For a process of an earlier generation to free the port, or a name to be known.
_PORT_S = 30.0


async def hold(place: ProcessPlace) -> Membership:
    """Listens, until all have come or the time is over."""
    if place.token is None:
        voice.warn(
            "Hosts meet without a token, so whoever reaches "
            f"{place.coordinator} may join; set the same TOWERS_TOKEN on all of them."
        )
    with contextlib.ExitStack() as held:
        listening = held.enter_context(await listen(place))
        reached_by = listening.getsockname()[0]
        own = HostDescription.here(place, own_address(place, reached_by, held))
        return await Meeting(place, own).hold(listening)


async def listen(place: ProcessPlace) -> socket.socket:
    """Returns a socket at the coordinator's address.

    Raises:
        RendezvousError: It is none of this machine's, or is taken.
        ValueError: The interface is none of this machine's.
    """
    host, port = addresses.split(place.coordinator)
    loop = asyncio.get_running_loop()
    end = loop.time() + min(_PORT_S, place.join_seconds)
    while True:
        try:
            return _bound(_listening_address(place, host), port)
        except RendezvousError:
            raise
        except OSError as error:
            unknown = isinstance(error, socket.gaierror)
            may_come = unknown or error.errno == errno.EADDRINUSE
            if may_come and loop.time() < end:
                await asyncio.sleep(0.2)
                continue
            do = "give another coordinator, or name the interface"
            if unknown:
                do = "give its IP address as the coordinator, as TOWERS_COORDINATOR"
            raise RendezvousError(
                f"The first host cannot listen at {place.coordinator} "
                f"({error.strerror}); expected a free port of an address of this "
                f"machine: {do}."
            ) from error


def _bound(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bound = forks.close_in_children(socket.socket(family))
    try:
        # Connections of an earlier generation may linger.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound


def _listening_address(place: ProcessPlace, host: str) -> str:
    if place.interface is not None and not addresses.is_only_local(host):
        return addresses.of_interface(place.interface)
    address = addresses.resolved(host)
    if addresses.is_only_local(address) and not addresses.is_only_local(host):
        raise RendezvousError(
            f"On the first host its name {host} means {address}, which others cannot "
            "reach; name the network interface by which they do (--interface or "
            "TOWERS_INTERFACE)."
        )
    return address


class Meeting:
    """What the first host knows of those that have come."""

    def __init__(self, place: ProcessPlace, own: HostDescription):
        self._place, self._own = place, own
        self._guests: dict[Channel, HostDescription] = {}
        self._acknowledged: set[Channel] = set()
        self._newer: HostDescription | None = None
        self._changed = asyncio.Event()
        self._warned: set[str] = set()

    async def hold(self, listening: socket.socket) -> Membership:
        """Waits for all, answers all, and waits for their acknowledgements.

        Args:
            listening: A bound socket.
        """
        loop = asyncio.get_running_loop()
        self._end = loop.time() + self._place.join_seconds
        backlog = self._place.count + 128
        server = await channels.listen(self._visit, listening, backlog)
        note = loop.call_later(QUIET_S, self._say_who_is_missing)
        try:
            await self._until(self._are_all_here, self._place.join_seconds)
            return await self._end_of_it(server)
        finally:
            note.cancel()
            server.close()
            await within(ANSWER_S, *(channel.close() for channel in self._guests))

    async def _end_of_it(self, server: asyncio.Server) -> Membership:
        if error := self._what_is_wrong():
            await self._fail(error)
        hosts = sorted([self._own, *self._guests.values()], key=lambda each: each.rank)
        listed = {
            "addresses": [each.address for each in hosts],
            "names": [each.name for each in hosts],
        }
        guests = dict(self._guests)
        await self._tell(listed)
        await self._until(lambda: self._have_answered(guests), ANSWER_S)
        if gone := [guests[each] for each in guests.keys() - self._acknowledged]:
            names = words.all_of(each.name for each in gone)
            await self._fail(HostsMissingError(f"Gone while the hosts met: {names}."))
        # This port may be the one where hosts connect next.
        server.close()
        await self._tell({"go": True})
        return membership(self._place, listed)

    async def _visit(self, channel: Channel) -> None:
        """Speaks with whoever connects, from there until the hosts have met."""
        try:
            host = await self._greet(channel)
            if host is None or not await self._welcome(channel, host):
                return await channel.close()
        except OSError:
            return await channel.close()  # a stranger, or a host that comes again
        self._guests[channel] = host
        self._changed.set()
        try:
            await channel.receive()
            self._acknowledged.add(channel)
        except (OSError, ValueError):
            del self._guests[channel]  # it has gone, and may come again
            await channel.close()
        self._changed.set()

    async def _greet(self, channel: Channel) -> HostDescription | None:
        """Returns what a host tells of itself; `None` if it is none of this run."""
        number = secrets.token_hex(16)
        try:
            async with asyncio.timeout(ANSWER_S):
                await channel.send({"towers": number})
                told = await channel.receive()
                proof = channels.proof(self._place.token, number)
                if hmac.compare_digest(str(told.pop("proof", "")), proof):
                    return HostDescription.heard(told)
                await channel.send({"other_token": True})
        except (TypeError, ValueError):
            warn_of_stranger(channel.other_host, self._warned)
        else:
            warn_of_token(channel.other_host, self._warned)
        return None

    async def _welcome(self, channel: Channel, host: HostDescription) -> bool:
        generation = self._place.generation
        if host.generation < generation:
            said = (
                f"This is generation {host.generation} of {host.name}, and generation "
                f"{generation} has begun on {self._own.name}."
            )
            await channel.send({"failed": said, "missing": True})
        elif host.generation > generation:
            self._newer = host  # it tries again until this process has gone
            self._changed.set()
        else:
            left = self._end - asyncio.get_running_loop().time()
            await channel.send({"seconds_left": left})
            return True
        return False

    def _are_all_here(self) -> bool:
        # Also if a rank is there twice: that need not wait for the one that is not.
        return self._newer is not None or len(self._guests) + 1 >= self._place.count

    def _have_answered(self, guests) -> bool:
        waiting = guests.keys() - self._acknowledged
        return not waiting or not waiting <= self._guests.keys()

    def _what_is_wrong(self) -> RendezvousError | None:
        if newer := self._newer:
            return HostsMissingError(
                f"Generation {newer.generation} has begun on {newer.name}, and this is "
                f"generation {self._place.generation}."
            )
        if said := difference([self._own, *self._guests.values()]):
            return RendezvousError(said)
        if missing := self._missing():
            came = words.all_of(
                each.name for each in [self._own, *self._guests.values()]
            )
            return HostsMissingError(
                f"Within {self._place.join_seconds:g} s, {numbered(missing)} of "
                f"{self._place.count} did not come to {self._place.coordinator}; "
                f"there: {came}."
            )
        return None

    def _missing(self) -> list[int]:
        here = {self._own.rank, *(each.rank for each in self._guests.values())}
        return [rank for rank in range(self._place.count) if rank not in here]

    def _say_who_is_missing(self) -> None:
        if missing := self._missing():
            left = self._place.join_seconds - QUIET_S
            voice.say(
                f"Waiting for {numbered(missing)} of {self._place.count} at "
                f"{self._place.coordinator}, for {left:.0f} s at most."
            )

    async def _fail(self, error: RendezvousError) -> None:
        missing = isinstance(error, HostsMissingError)
        await self._tell({"failed": str(error), "missing": missing})
        raise error

    async def _tell(self, message: dict[str, Any]) -> None:
        await within(ANSWER_S, *(each.send(message) for each in [*self._guests]))

    async def _until(self, true, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not true():
                    self._changed.clear()
                    await self._changed.wait()
