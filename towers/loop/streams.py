"""Queues of work for threads that do not wait for one another."""

import collections
import threading
from collections.abc import Iterator, Sequence
from typing import Any

# Pieces of work that wait for the fastest tower, so that it need not wait for them.
_AHEAD = 2


class Streams:
    """What the towers have still to do in a call: for each a queue of its own.

    More is put in as the fastest tower needs it; of what is in memory, the rest is the
    arrears of slower ones.
    """

    def __init__(self, towers: int):
        self._queues = [collections.deque() for _ in range(towers)]
        self._changed = threading.Condition()
        self._open = True

    def put(self, work: Sequence[Any]) -> bool:
        """Adds a piece of work for each tower, when one is about to run out of it.

        Returns:
            Whether more is wanted: not if a tower has failed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._open or min(map(len, self._queues)) < _AHEAD
            )
            if self._open:
                for queue, piece in zip(self._queues, work, strict=True):
                    queue.append(piece)
                self._changed.notify_all()
            return self._open

    def of(self, tower: int) -> Iterator[Any]:
        """Yields a tower's work, as it comes, until the end."""
        queue = self._queues[tower]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: queue or not self._open)
                if not queue:
                    return
                piece = queue.popleft()
                self._changed.notify_all()
            yield piece

    def close(self) -> None:
        """Says that there will be no more."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def stop(self) -> None:
        """Takes back what has not been begun."""
        with self._changed:
            for queue in self._queues:
                queue.clear()
            self.close()
