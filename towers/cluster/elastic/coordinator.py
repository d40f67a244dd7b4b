"""The coordinator decides which hosts train together, generation after generation."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Collection
from typing import Any

from towers.cluster import addresses
from towers.cluster.elastic.events import Event
from towers.cluster.elastic.generations import Arrival, HostGenerations, Rules, place_of
from towers.cluster.elastic.talk import Talk
from towers.cluster.rendezvous import meeting
from towers.cluster.rendezvous.channel import Channel, MalformedError, TokenError
from towers.cluster.rendezvous.host import (
    ANSWER_S,
    versions,
    warn_of_stranger,
    warn_of_token,
    within,
)
from towers.cluster.rendezvous.strangers import Strangers
from towers.hosts.group import JOIN_SECONDS, ProcessPlace
from towers.program import voice

# For all to hear that it ends.
_END_S = 2.0


@dataclasses.dataclass(frozen=True)
class State:
    """What a process does that has come.

    Attributes:
        name: What to call it in sentences.
        slot: What its launcher calls it.
        rank: Its number in the present generation; `None` if it is in none.
        steps: How many it has done, as it said last.
        does: "prepares", "is ready", "trains" or "leaves".
    """

    name: str
    slot: int | None
    rank: int | None
    steps: int
    does: str


class Coordinator:
    """Listens for hosts, in a thread; its methods may be called in any."""

    def __init__(
        self,
        least: int,
        most: int,
        token: str,
        address: str = "127.0.0.1:0",
        *,
        expected: int | None = None,
        interface: str | None = None,
        join_seconds: float = JOIN_SECONDS,
        fail_seconds: float = 30.0,
        max_restarts: int | None = None,
        tell: Callable[[Event], None] = lambda event: None,
        say: Callable[[str], None] = voice.say,
    ):
        """Listens to nobody yet.

        Args:
            least: How many hosts a generation has at least.
            most: How many it has at most.
            token: What all hosts know and strangers do not.
            address: Where to listen, as "host:port"; port 0 for any that is free.
            expected: How many hosts the first generation waits for; `None` for the
                most there may be.
            interface: The network interface to listen at; `None` for the address.
            join_seconds: How long to wait for hosts.
            fail_seconds: How long a host may take to be ready for another generation,
                or to end, once there is a reason for one.
            max_restarts: How many generations may begin because of a failure; `None`
                for any number.
            tell: Is called in a thread with what happens.
            say: Is called in a thread with sentences for the user.
        """
        self._token, self._tell, self._say = token, tell, say
        self._place = ProcessPlace(0, most, address, token, join_seconds, interface)
        self._rules = Rules(
            *(address, least, most, expected or most),
            *(join_seconds, fail_seconds, max_restarts),
        )
        self._loop = asyncio.new_event_loop()
        self._listens: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._closed = asyncio.Event()
        self._generations: HostGenerations | None = None
        self._numbers = itertools.count()
        self._strangers = Strangers(most)
        self._visits: set[asyncio.Task] = set()
        self._warned: set[str] = set()
        self._thread = threading.Thread(
            target=self._run, name="towers-coordinator", daemon=True
        )

    def __enter__(self) -> "Coordinator":
        self.start()
        return self

    def __exit__(self, *error) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where it listens, once it has started."""
        return self._listens.result()

    def start(self) -> str:
        """Begins to listen, and returns where.

        Raises:
            RendezvousError: The address is none of this machine's, or is taken.
            ValueError: The interface is none of this machine's.
        """
        self._thread.start()
        return self.address

    def states(self) -> list[State]:
        """Returns what those do that have come and not gone: by rank, then others."""
        return self._call(self._states)

    def want(self, count: int, without: Collection[int] = ()) -> None:
        """Asks for another number of hosts; those that are too many have to leave.

        The last ones do, who get SIGTERM. Others may come.

        Args:
            count: How many are to be there.
            without: The slots of some that have to leave in any case.

        Raises:
            ValueError: It is fewer than the least, or more than the most.
        """
        least, most = self._rules.least, self._rules.most
        if not least <= count <= most:
            raise ValueError(
                f"Received {count} as the number of hosts; expected {least} to {most}."
            )
        self._call(lambda: self._generations.want(count, without))

    def expect(self, count: int) -> None:
        """Has the first generation wait for so many hosts, where it has not begun."""
        self._call(lambda: self._generations.expect(count))

    def finish(self, why: str = "The run is done.") -> None:
        """Begins no generation any more; hosts may train on in the present one."""
        self._call(lambda: self._generations.finish(why))

    def close(self) -> None:
        """Ends the connections, and listens no more."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join(2 * _END_S)

    def _call(self, function):
        """Calls a function in the thread; returns what it does."""

        async def call():
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def _states(self):
        return [
            State(each.name, each.slot, each.rank, each.steps, each.does)
            for each in self._generations.in_order()
        ]

    def _run(self):
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if self._listens.done():
                raise
            self._listens.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        listening = await meeting.listen(self._place)
        host, _ = addresses.split(self._place.coordinator)
        where = addresses.joined(host, listening.getsockname()[1])
        self._generations = HostGenerations(
            dataclasses.replace(self._rules, where=where),
            *(self._loop.call_later, self._tell, self._say),
        )
        server = await asyncio.start_server(
            self._visit, sock=listening, backlog=self._rules.most + 128
        )
        self._listens.set_result(where)
        await self._closed.wait()
        server.close()
        self._generations.finish("The launcher ends.")
        for entry in self._generations.entries:
            entry.end()
        if self._visits:
            await asyncio.wait(self._visits, timeout=_END_S)
        for task in self._visits:
            task.cancel()
        await asyncio.gather(*self._visits, return_exceptions=True)

    async def _visit(self, reader, writer) -> None:
        """Speaks with whoever connects, until one end closes the connection."""
        channel = Channel(reader, writer, self._token, listens=True)
        task = asyncio.current_task()
        self._visits.add(task)
        try:
            if (entry := await self._welcome(channel)) is not None:
                await self._serve_one(*entry)
        except asyncio.CancelledError:
            pass  # of too many strangers the oldest one, or the coordinator ends
        finally:
            self._visits.discard(task)
            await channel.abort()

    async def _welcome(self, channel) -> tuple[Talk, Arrival] | None:
        """Hears who it is; `None` if it is a stranger."""
        try:
            with self._strangers.listening():
                async with asyncio.timeout(ANSWER_S):
                    await channel.greet()
                    said = await channel.receive()
            talk = Talk(channel)
            slot = said["slot"]
            return talk, Arrival(
                *(next(self._numbers), None if slot is None else int(slot)),
                *(str(said["node"]), int(said["pid"])),
                {name: str(said["versions"][name]) for name in versions()},
                *(talk.send, talk.end),
            )
        except TokenError:
            warn_of_token(channel.other_host, self._warned)
            await within(ANSWER_S, channel.send({}))  # whose code tells the same
        except MalformedError:
            warn_of_stranger(channel.other_host, self._warned)
        except OSError:
            pass  # a stranger
        except (ValueError, TypeError, LookupError, AttributeError):
            warn_of_stranger(channel.other_host, self._warned)
        return None

    async def _serve_one(self, talk: Talk, entry: Arrival) -> None:
        said = {"done": False}
        if self._generations.come(entry):
            hear = functools.partial(self._hear, entry, said)
        else:
            hear = said.update
        why = "was ended with its launcher"
        try:
            why = await talk.run(hear)
        finally:
            self._generations.lose(entry, why, said["done"])

    def _hear(self, entry: Arrival, said: dict, message: dict[str, Any]) -> None:
        generations = self._generations
        if "ready" in message:
            generations.ready(entry, int(message["ready"]), str(message["address"]))
        elif "expects" in message:
            entry.send({"place": place_of(entry, generations.in_order())})
        elif "leaves" in message:
            generations.leave(entry, str(message["leaves"]))
        elif "wants" in message:
            count = int(message["wants"])
            if self._rules.least <= count <= self._rules.most:
                generations.want(count)
        elif "done" in message:
            said.update(message)
