"""A machine of made-up processes, whose clock goes on only while they sleep."""

import itertools
from collections.abc import Callable

from towers.devices.sharing import Registry


class World:
    """The machine.

    Attributes:
        alive: The numbers of the processes that run, and when each began.
        filled: The places that somebody else fills.
        while_sleeping: What others do while a process sleeps.
    """

    def __init__(self, folder):
        self.folder = str(folder)
        self.time, self.alive, self.filled = 0.0, {}, set()
        self.begun = 0
        self.while_sleeping: Callable[[], object] = lambda: None

    def run(self, places, minimum, limit, name="") -> Registry:
        """Starts a process with a run that has not joined yet."""
        # Numbers are used again.
        pid = next(pid for pid in itertools.count(100) if pid not in self.alive)
        self.begun += 1
        self.alive[pid] = float(self.begun)
        run = Registry(
            *(places, minimum, limit, self.folder),
            filled=lambda places, pids: self.filled.intersection(places),
            name=name,
            here=_Here(self, pid),
        )
        run.pid = pid
        return run

    def kill(self, run: Registry) -> None:
        """Ends its process, which cannot say anything any more."""
        del self.alive[run.pid]


class _Here:
    def __init__(self, world, pid):
        self.world, self.pid = world, pid

    def process(self):
        return self.pid, self.world.alive[self.pid]

    def runs(self, pid, started):
        return self.world.alive.get(pid) == started

    def now(self):
        return self.world.time

    def sleep(self, seconds):
        self.world.time += seconds
        self.world.while_sleeping()
