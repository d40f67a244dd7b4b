"""A process that trains in one generation of hosts after another."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from towers.cluster import addresses
from towers.cluster.elastic.talk import Talk, sentence
from towers.cluster.rendezvous.channel import Channel, TokenError
from towers.cluster.rendezvous.guest import reason
from towers.cluster.rendezvous.host import (
    ANSWER_S,
    HostsMissingError,
    RendezvousError,
    own_address,
    versions,
)
from towers.hosts.group import JOIN_SECONDS, Membership, ProcessPlace

_CLOSE_S = 5.0
_FORMED = "rank", "addresses", "names", "generation"


def _end_by_sigterm(why: str) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Member:
    """This process's connection to the coordinator, which a thread keeps.

    A run is a loop. `next` waits for a generation and says who is in it. Its hosts
    train together until `change` says something on one of them, which all have to be
    told, or until one is lost. Then each calls `next` again.
    """

    def __init__(
        self,
        coordinator: str,
        token: str,
        *,
        slot: int | None = None,
        join_seconds: float = JOIN_SECONDS,
        interface: str | None = None,
        lost: Callable[[int, str], None] = lambda generation, why: None,
        ends: Callable[[int, str], None] = lambda generation, why: None,
        asked: Callable[[str], None] = _end_by_sigterm,
    ):
        """Begins to connect.

        Args:
            coordinator: Where the coordinator listens, as "host:port".
            token: What all hosts know and strangers do not.
            slot: What this process's launcher calls it. The first generation is in this
                order.
            join_seconds: For how long to try to connect.
            interface: The network interface or address by which other hosts reach this
                one; `None` for the one that reaches the coordinator.
            lost: Is called in a thread once a host of a generation is lost, with the
                generation's number and a sentence.
            ends: Is called in a thread once a generation is to end, in the same way.
                Hosts that train together agree on when.
            asked: Is called in a thread, with the reason, if this host is one too many
                and has to leave. By default, this process gets SIGTERM.
        """
        self._place = ProcessPlace(0, 0, coordinator, token, join_seconds, interface)
        self._slot, self._asked = slot, asked
        self._lost, self._ends = lost, ends
        self._changed = threading.Condition()
        self._failure: RendezvousError | None = None
        self._bounds: tuple[int, int] | None = None
        self._own_host = ""
        self._generation = -1
        self._formed: Membership | None = None
        self._expected: list[int] | None = None
        self._change: str | None = None
        self._reason = "it has not answered"
        self._loop = asyncio.new_event_loop()
        self._talk: Talk | None = None
        # What was to be sent before there was a connection.
        self._unsaid: list[dict[str, Any]] = []
        self._task = self._loop.create_task(self._live())
        self._thread = threading.Thread(
            target=self._run, name="towers-member", daemon=True
        )
        self._thread.start()

    @property
    def change(self) -> str | None:
        """Why the present generation is to end; `None` as long as it is not.

        Hosts hear of it at different times, so those of a generation have to agree
        on the step after which they call `next`.
        """
        return self._change

    def expects(self) -> tuple[int, int] | None:
        """Returns the rank that this host will probably have, and of how many hosts.

        It is for one that is in no generation yet; `None` if none has begun.

        Raises:
            HostsMissingError: No other generation begins, or not with this host.
            RendezvousError: It has another token or other versions than the others.
        """
        with self._changed:
            self._expected = None
            self._send({"expects": True})
            self._wait(lambda: self._expected is not None)
            return tuple(self._expected) or None

    def next(self, steps: int) -> Membership:
        """Says that this host is ready, and waits for a generation that it is in.

        Args:
            steps: How many it has done. The first host of the generation is one that
                has done most.

        Returns:
            Who is in the generation. They have not connected yet.

        Raises:
            HostsMissingError: No other generation begins, or not with this host.
            RendezvousError: It has another token or other versions than the others.
        """
        with self._changed, contextlib.ExitStack() as held:
            self._wait(lambda: self._own_host)
            self._formed = None
            address = own_address(self._place, self._own_host, held)
            self._send({"ready": steps, "address": address})
            return self._wait(lambda: self._formed)

    def leave(self, why: str) -> None:
        """Announces that this host is about to leave, as one that is preempted does.

        The others hear of a change. It trains with them until all have agreed on it.

        Args:
            why: The reason in a word, such as "SIGTERM".
        """
        self._send({"leaves": why})
        self._fail(HostsMissingError(f"This host leaves: {why}."))

    def want(self, count: int) -> None:
        """Asks for another number of hosts.

        Raises:
            ValueError: It is fewer than the least, or more than the most.
        """
        with self._changed:
            least, most = self._wait(lambda: self._bounds)
        if not least <= count <= most:
            raise ValueError(
                f"Received {count} as the number of hosts; expected {least} to {most}."
            )
        self._send({"wants": count})

    def close(self, done: bool = False) -> None:
        """Closes the connection.

        Args:
            done: Whether the run is done, so that nobody goes on without this host. For
                the others it has failed if neither this nor `leave` has told them.
        """
        self._send({"done": done})
        self._fail(HostsMissingError("This host has left."))
        self._post(self._end)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def _wait(self, found):
        """Waits until there is something, and returns it; raises what has failed."""
        while True:
            if self._failure is not None:
                raise self._failure
            if value := found():
                return value
            self._changed.wait()

    def _fail(self, error, change=None):
        """Has `next` raise an error, if it is the first one."""
        with self._changed:
            self._failure = self._failure or error
            self._change = self._change or change
            self._changed.notify_all()

    def _send(self, message):
        self._post(lambda: self._say(message))

    def _post(self, function):
        # Once the connection has ended, there is nobody to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    # What follows is for the thread.

    def _run(self):
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
        finally:
            self._loop.close()

    def _say(self, message):
        if self._talk is None:
            self._unsaid.append(message)
        else:
            self._talk.send(message)

    def _end(self):
        if self._talk is None:
            self._task.cancel()
        else:
            self._talk.end()

    async def _live(self):
        place = self._place
        try:
            async with asyncio.timeout(place.join_seconds):
                talk = await self._connect()
        except TimeoutError:
            return self._fail(
                HostsMissingError(
                    f"Within {place.join_seconds:g} s, this host "
                    f"({socket.gethostname()}, pid {os.getpid()}) could not reach the "
                    f"coordinator at {place.coordinator} ({self._reason}); start the "
                    "launcher there, and open that port to this host."
                )
            )
        except (RendezvousError, ValueError) as error:
            return self._fail(error)
        self._talk = talk
        for message in self._unsaid:
            talk.send(message)
        why = await talk.run(self._hear)
        said = f"the coordinator at {place.coordinator} {why}"
        self._fail(HostsMissingError(sentence(said)), said)

    async def _connect(self) -> Talk:
        """Tries to connect, again and again."""
        pause = 0.05
        while True:
            try:
                return await self._try()
            except RendezvousError:
                raise
            except (OSError, ValueError, LookupError, TypeError) as error:
                self._reason = reason(error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1)

    async def _try(self) -> Talk:
        place = self._place
        async with asyncio.timeout(ANSWER_S):
            at = addresses.split(place.coordinator)
            channel = Channel(*await asyncio.open_connection(*at), place.token, False)
        try:
            async with asyncio.timeout(ANSWER_S):
                await channel.greet()
                node, pid = socket.gethostname(), os.getpid()
                mine = {"node": node, "pid": pid, "slot": self._slot}
                await channel.send({**mine, "versions": versions()})
                answer = await channel.receive()
            if "failed" in answer:
                raise _failed(answer)
            with self._changed:
                self._bounds = tuple(answer["welcome"])
                self._own_host = channel.own_host
                self._changed.notify_all()
            return Talk(channel)
        except TokenError as error:
            await channel.abort()
            raise RendezvousError(
                f"The coordinator at {place.coordinator} has another token than this "
                f"host ({node}, pid {pid}); give both the same TOWERS_TOKEN."
            ) from error
        except BaseException:
            await channel.abort()
            raise

    def _hear(self, message: dict[str, Any]) -> None:
        if "formed" in message:
            told = {name: message["formed"][name] for name in _FORMED}
            listed = {name: tuple(told.pop(name)) for name in ("addresses", "names")}
            with self._changed:
                self._formed = Membership(
                    **told, **listed, token=self._place.token, elastic=True
                )
                self._generation, self._change = told["generation"], None
                self._changed.notify_all()
        elif "place" in message:
            with self._changed:
                self._expected = message["place"]
                self._changed.notify_all()
        elif "change" in message:
            self._change = self._change or message["change"]
            self._ends(self._generation, sentence(message["change"]))
        elif "lost" in message:
            self._change = self._change or message["lost"]
            self._lost(message["generation"], sentence(message["lost"]))
        elif "failed" in message:
            self._fail(_failed(message), message["failed"])
            # It may wait for hosts that go on without it.
            self._lost(self._generation, message["failed"])
        elif "leave" in message:
            self._asked(message["leave"])


def _failed(message):
    kind = HostsMissingError if message["missing"] else RendezvousError
    return kind(message["failed"])
