"""A place for one host on this machine, and what becomes of its processes."""

import dataclasses
import math
import signal
import time

from towers.launch.generation import TERM_SECONDS
from towers.launch.host import Host

# A host that fails so many times running is left out, if it may be.
TIMES = 3
# Once one has trained for so long, its failures are forgotten.
SETTLED_S = 60.0
_LONGEST_PAUSE_S = 60.0


@dataclasses.dataclass(eq=False)
class ProcessSlot:
    """One process after another.

    Attributes:
        number: What hosts and logs are called by.
        host: Its process, as long as that runs.
        starts: How many it has had.
        failures: How many have failed one after another.
        losses: How many were lost with their machine since one has trained for long.
        due_s: When to start the next one, by `time.monotonic`.
        leaves: Whether the process was told to leave, as it is one too many.
        again: Whether another one is to start after it nevertheless.
        is_out: Whether none starts any more.
        limit_s: When to end the process, if it has not ended by itself.
        was_ended: Whether it had to be.
    """

    number: int
    host: Host | None = None
    starts: int = 0
    failures: int = 0
    losses: int = 0
    due_s: float | None = None
    leaves: bool = False
    again: bool = False
    is_out: bool = False
    limit_s: float | None = None
    was_ended: bool = False
    # From when on its process counts as one that trains well.
    _settles_s: float = math.inf

    @property
    def is_there(self) -> bool:
        """Whether it has a process that stays, or is about to have one."""
        return self.due_s is not None or (self.host is not None and not self.leaves)

    @property
    def next_s(self) -> float:
        """When there is something to do for it."""
        return min(math.inf if s is None else s for s in (self.due_s, self.limit_s))

    def begin(self, host: Host) -> None:
        """Takes over a process that has been started."""
        self.host, self.due_s, self.starts = host, None, self.starts + 1
        self.leaves = self.again = self.was_ended = False
        self._settles_s = math.inf

    def train(self, after_s: float = 0.0) -> None:
        """Is told that its process trains, or does so after some seconds."""
        if self._settles_s == math.inf:
            self._settles_s = time.monotonic() + after_s + SETTLED_S

    def end(self, ended_s: float) -> None:
        """Is told that its process has ended, and when."""
        self.host = self.limit_s = None
        if ended_s >= self._settles_s:
            self.failures = self.losses = 0

    def wait(self) -> float:
        """Has the next one start after a pause; returns how many seconds."""
        pause_s = min(_LONGEST_PAUSE_S, 2.0 ** (self.failures + self.losses - 1))
        self.due_s = time.monotonic() + pause_s
        return pause_s

    def leave(self) -> None:
        """Has its process leave, as it is one too many; starts no other."""
        self.give_up()
        if self.host is not None:
            self.leaves = True
            self.host.signal(signal.SIGTERM)

    def give_up(self) -> None:
        """Starts none that was to start."""
        self.due_s, self.again = None, False

    def end_within(self, seconds: float) -> None:
        """Gives its process some time to end by itself."""
        if self.host is not None and self.limit_s is None:
            self.limit_s = time.monotonic() + seconds

    def press(self) -> None:
        """Ends its process if it was to have ended by now."""
        if self.limit_s is None or time.monotonic() < self.limit_s:
            return
        if not self.was_ended:
            self.host.signal(signal.SIGTERM)
            # One that stands still would never hear of it.
            self.host.signal(signal.SIGCONT)
            self.was_ended = True
            self.limit_s = time.monotonic() + TERM_SECONDS
        else:
            self.host.signal(signal.SIGKILL)
            self.limit_s = None
