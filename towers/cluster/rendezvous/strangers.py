"""Connections whose other end has not shown yet that it is a host."""

import asyncio
import contextlib
from collections.abc import Iterator

MOST = 100
"""How many there may be beside those of hosts, each of which takes a descriptor."""


class Strangers:
    """Bounds how many of them are listened to: of too many, the oldest has to go."""

    def __init__(self, hosts: int):
        """Takes how many hosts may come at once."""
        self._hosts = hosts
        self._tasks: dict[asyncio.Task, None] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, this task listens to a stranger; it is cancelled if it has to go."""
        task = asyncio.current_task()
        self._tasks[task] = None
        if len(self._tasks) > MOST + self._hosts:
            oldest = next(iter(self._tasks))
            del self._tasks[oldest]
            oldest.cancel()
        try:
            yield
        finally:
            self._tasks.pop(task, None)
