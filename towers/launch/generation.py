"""One generation of hosts: from their start until the last one has ended."""

import dataclasses
import queue
import signal
import time
from collections.abc import Sequence

from towers.launch.host import Host
from towers.processes.strays import Strays
from towers.program.ending import ANOTHER_FAILED, STOPPED

# How one ends that was given wrong arguments.
USAGE = 2
# Between SIGTERM and SIGKILL.
TERM_SECONDS = 10.0
# For what a host has started to end after it.
LAST_WORDS_S = 1.0

Events = queue.SimpleQueue  # of hosts that have ended, and of signals' numbers


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a generation ended.

    Attributes:
        code: 0 if all hosts ended with that, else the exit code of the first cause.
        rank: The host that was the first cause; `None` if none is here.
        said: What happened, in a sentence; empty if nothing went wrong.
        stopped: The signal that asked for the end; `None` if none did.
    """

    code: int = 0
    rank: int | None = None
    said: str = ""
    stopped: int | None = None


class StartedHosts:
    """Hosts that have been started, and what became of them."""

    def __init__(
        self, hosts: Sequence[Host], events: Events, strays: Strays, fail_seconds: float
    ):
        """Takes over the hosts.

        Args:
            hosts: All that were started.
            events: Where they tell that they have ended, and signals arrive.
            strays: All that they start.
            fail_seconds: How long all may take to end once one has failed.
        """
        self._hosts, self._events, self._strays = hosts, events, strays
        self._fail_seconds = fail_seconds
        self._running = {*hosts}
        self._failed: list[Host] = []  # by themselves, in this order
        self._ended_here: list[Host] = []  # had to be ended
        self._were_stopped: list[Host] = []  # were stopped when another one failed
        self._stopped: int | None = None

    def run(self) -> Outcome:
        """Waits until all have ended, and sees to it once one has failed."""
        limit, ways = None, [self._terminate, self._kill]
        while self._running:
            left = None if limit is None else max(0.0, limit - time.monotonic())
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                ways.pop(0)()
                limit = time.monotonic() + TERM_SECONDS if ways else None
                continue
            if isinstance(event, int):
                self._pass_on(event)
                continue
            self._running.discard(event)
            if event.code and not self._ended_here:
                self._failed.append(event)
                # While hosts stop, the first one may still be saving.
                if event.code not in STOPPED and limit is None:
                    limit = time.monotonic() + self._fail_seconds
                    self._wake()
        self._strays.end(LAST_WORDS_S)
        for host in self._hosts:
            host.all_is_shown(LAST_WORDS_S)
        return self._outcome()

    def _pass_on(self, number: int) -> None:
        if number != signal.SIGUSR1:  # which asks for a checkpoint
            self._stopped = number
        for host in self._running:
            host.signal(number)
            if number != signal.SIGUSR1:
                # One that stands still, as by SIGSTOP, would never hear of it.
                host.signal(signal.SIGCONT)

    def _wake(self) -> None:
        """Lets hosts go on that were stopped: they find that others have gone."""
        self._were_stopped = [host for host in self._running if host.is_stopped]
        for host in self._were_stopped:
            host.signal(signal.SIGCONT)

    def _terminate(self) -> None:
        self._ended_here = sorted(self._running, key=lambda host: host.rank)
        for host in self._ended_here:
            host.signal(signal.SIGTERM)

    def _kill(self) -> None:
        for host in self._running:
            host.signal(signal.SIGKILL)
        self._strays.signal(signal.SIGKILL)

    def _outcome(self) -> Outcome:
        if not self._failed:
            return Outcome(stopped=self._stopped)
        first = next(
            (each for each in self._failed if each.code != ANOTHER_FAILED), None
        )
        if first is not None:
            what = "was stopped" if first.code in STOPPED else "failed first"
            said = f"{what}: {first.how}"
        elif self._were_stopped:
            first = self._were_stopped[0]
            said = "stood still, stopped as by SIGSTOP, until others had found that"
        elif self._ended_here:
            first = self._ended_here[0]
            said = (
                f"did not end within {self._fail_seconds:g} s after another host had "
                "found a failure, and was ended"
            )
        else:
            first = self._failed[0]
            return Outcome(
                *(ANOTHER_FAILED, None),
                f"Host {first.rank} ended because another host failed.",
                self._stopped,
            )
        code = first.code if first.code >= 0 else 128 - first.code
        log = f" (see {first.log})" if first.log else ""
        said = f"Host {first.rank} (pid {first.pid}) {said}{log}."
        return Outcome(code or 1, first.rank, said, self._stopped)
