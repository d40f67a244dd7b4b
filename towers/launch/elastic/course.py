"""What has happened in a run so far, and what its exit code is because of that."""

import dataclasses
import time

from towers.cluster.elastic import Over
from towers.launch.host import Host
from towers.program.ending import ANOTHER_FAILED


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process has ended, and nothing is left of it.

    Attributes:
        host: Which one.
        at_s: When, by `time.monotonic`.
    """

    host: Host
    at_s: float


@dataclasses.dataclass(frozen=True)
class ProcessPlaced:
    """A process has found a place, and runs there.

    Attributes:
        host: Which one.
    """

    host: Host


@dataclasses.dataclass
class Course:
    """What has happened.

    Attributes:
        is_done: Whether a host has ended with 0.
        over: Why no generation begins any more, once the coordinator has said it.
        stopped: The signal that asked for the end; `None` if none did.
        begun_s: When the present generation began; `None` before the first.
        members: The slots of its hosts.
        failures: Hosts that have ended by themselves with another code, in this order.
    """

    is_done: bool = False
    over: Over | None = None
    stopped: int | None = None
    begun_s: float | None = None
    members: tuple[int | None, ...] | None = None
    failures: list[Ended] = dataclasses.field(default_factory=list)
    _stopped_s: float = 0.0

    @property
    def is_ending(self) -> bool:
        """Whether no host starts any more."""
        return self.is_done or self.over is not None or self.stopped is not None

    def stop(self, number: int) -> None:
        """Is told of a signal that asks for the end."""
        self.stopped, self._stopped_s = number, time.monotonic()

    def code(self) -> int:
        """Returns the launcher's exit code, once all hosts have ended."""
        if self.is_done:
            return 0
        causes = [
            each for each in self.failures if each.host.exit_code != ANOTHER_FAILED
        ]
        for each in causes:
            if self._may_have_ended_it(each):
                return each.host.exit_code
        if self.stopped is not None:
            return 128 + self.stopped
        if self.over is not None and not self.over.failed:
            return 0  # done on another machine
        return causes[-1].host.exit_code if causes else ANOTHER_FAILED

    def _may_have_ended_it(self, failure: Ended) -> bool:
        """Tells whether no others have gone on since then."""
        is_member = self.members is None or failure.host.rank in self.members
        return is_member and failure.at_s > max(self.begun_s or 0.0, self._stopped_s)
