"""Where the launcher and its hosts on Ray's workers leave messages for one another.

All messages stay, in order, for whoever comes later. Each is a name and values:

    began     generation, rank, count, pid      a worker has started its host
    ended     generation, rank, code, how       that has ended
    lost      rank, why                         Ray has lost a worker
    done      why                               Ray has ended the run, if by an error
    signal    generation, rank, number          the launcher has one for this host
    report    generation                        the first host reports: all have to
    over      generation, error                 all have ended: the workers may, too

A queue leaves "begin" first, and "signal" with a number for all of its runs.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import ray

from towers.launch.on_ray import cluster


@ray.remote(num_cpus=0)
class Desk:
    """Keeps messages."""

    def __init__(self):
        self._messages: list[tuple] = []
        self._generations = 0
        self._more = asyncio.Condition()

    async def tell(self, *message: Any) -> None:
        """Leaves a message."""
        async with self._more:
            self._messages.append(message)
            self._more.notify_all()

    async def after(self, count: int) -> list[tuple]:
        """Returns all messages but the first ones, once there are any."""
        async with self._more:
            await self._more.wait_for(lambda: len(self._messages) > count)
            return self._messages[count:]

    async def next_generation(self) -> int:
        """Returns the number of a generation that begins, from 0."""
        self._generations += 1
        return self._generations - 1


def fit(run: Callable[[], Any], desk: Any) -> None:
    """Has Ray Train run, and leaves the message "done" behind.

    It belongs into a thread: in the main one, Ray would take Ctrl-C.

    Args:
        run: Its `fit`.
        desk: A `Desk`.
    """
    why = ""
    try:
        run()
    except Exception as error:
        why = cluster.first_line(error)
    with contextlib.suppress(ray.exceptions.RayError):  # its cluster has gone
        ray.get(desk.tell.remote("done", why))


def messages(desk: Any) -> Iterator[tuple]:
    """Yields the messages of a `Desk` as they come, the last of which is "done"."""
    seen, name = 0, ""
    while name != "done":
        try:
            found = ray.get(desk.after.remote(seen))
        except ray.exceptions.RayError as error:
            found = [("done", cluster.first_line(error))]  # its cluster has gone
        seen += len(found)
        # A worker's last message may come after it.
        for name, *values in sorted(found, key=lambda each: each[0] == "done"):
            yield name, *values
