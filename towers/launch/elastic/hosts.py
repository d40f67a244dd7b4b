"""The hosts that are started on this machine, each in a place of its own."""

import math
import signal
import time
from collections.abc import Callable, Mapping

from towers.cluster import environment
from towers.hosts.group import ElasticPlace
from towers.launch.arguments import LaunchOptions
from towers.launch.elastic.course import Ended, ProcessPlaced
from towers.launch.elastic.slot import ProcessSlot
from towers.launch.generation import LAST_WORDS_S
from towers.launch.host import Host
from towers.launch.machine import Places
from towers.processes.strays import Strays

# What one process of a host's has started is ended with it, while the others go on.
_MARK = "TOWERS_HOST_PROCESS"


class Hosts:
    """Their places, and the processes in them.

    Attributes:
        slots: The places.
        where: The coordinator's address.
    """

    def __init__(
        self,
        options: LaunchOptions,
        machine: Places,
        tell: Callable[[Ended | ProcessPlaced], None],
    ):
        """Starts none yet.

        Args:
            options: What is asked for.
            machine: What they share.
            tell: Is called in a thread for each process that has ended, or found a
                place.
        """
        self._options, self._machine, self._tell = options, machine, tell
        rank = options.host_rank
        numbers = range(options.most) if rank is None else [rank]
        self.slots = [ProcessSlot(number) for number in numbers]
        self.where = options.coordinator or ""

    def start(self, slot: ProcessSlot, restarted: bool) -> None:
        """Starts a process.

        Args:
            slot: Where.
            restarted: Whether others have begun before it.

        Raises:
            ValueError: It cannot be started.
        """
        options, strays = self._options, Strays(name=_MARK)
        # Of a list of machines, it is the launcher's own.
        on_many = options.host_rank is not None or options.launcher == "ray"
        interface = options.interface if on_many else None

        def ended(host: Host) -> None:
            at_s = time.monotonic()
            strays.end(LAST_WORDS_S)
            host.all_is_shown(LAST_WORDS_S)
            self._tell(Ended(host, at_s))

        def placed(host: Host) -> None:
            self._tell(ProcessPlaced(host))

        place = ElasticPlace(
            *(self.where, self._machine.token, slot.number),
            *(options.join_seconds, interface, restarted),
        )
        variables = environment.elastic_variables(place) | strays.mark
        slot.begin(self._machine.start(slot.number, variables, ended, placed))

    @property
    def are_there(self) -> bool:
        """Whether one runs, or is about to start."""
        return any(each.host or each.due_s is not None for each in self.slots)

    @property
    def next_s(self) -> float:
        """When there is something to do for one of them."""
        return min(slot.next_s for slot in self.slots)

    def staying(self) -> list[ProcessSlot]:
        """Lists those that run and do not leave, or are about to start."""
        return [slot for slot in self.slots if slot.is_there]

    def placed(self) -> list[ProcessSlot]:
        """Lists those of them that do not wait for a place."""
        return [each for each in self.staying() if each.host is None or each.host.pid]

    def due(self) -> list[ProcessSlot]:
        """Lists those that are to start now, and ends what was to have ended."""
        for slot in self.slots:
            slot.press()
        now_s = time.monotonic()
        return [each for each in self.slots if (each.due_s or math.inf) <= now_s]

    def pass_on(self, number: int) -> None:
        """Sends all a signal."""
        for slot in self.slots:
            if slot.host is not None:
                slot.host.signal(number)
                if number != signal.SIGUSR1:  # which asks for a checkpoint
                    # One that stands still would never hear of it.
                    slot.host.signal(signal.SIGCONT)

    def start_no_more(self) -> None:
        """Gives up those that were to start."""
        for slot in self.slots:
            slot.give_up()

    def end_within(self, seconds: float) -> None:
        """Gives all some time to end by themselves."""
        for slot in self.slots:
            slot.end_within(seconds)

    def lose(self, number: int | None, seconds: float) -> None:
        """Ends one that the others go on without, so that another one may start."""
        for slot in self.slots:
            if slot.number == number and slot.host is not None:
                slot.end_within(seconds)
                if slot.host.is_stopped:
                    slot.host.signal(signal.SIGCONT)

    def end_surplus(self, count: int, does: Mapping[int | None, str]) -> None:
        """Ends those that are too many, if the coordinator does not know them.

        The others it tells to leave.

        Args:
            count: How many are to be there.
            does: What those do that it knows.
        """
        for slot in self.slots:
            if slot.host is not None and does.get(slot.number) == "leaves":
                slot.leaves = True
        here = self.staying()
        unknown = [slot for slot in here if slot.number not in does]
        # First those that have not started, and of these the last.
        unknown.sort(key=lambda slot: (slot.host is not None, -slot.number))
        for slot in unknown[: max(0, len(here) - count)]:
            slot.leave()

    def missing(self, count: int) -> list[ProcessSlot]:
        """Lists where others are to start now, for so many to be there.

        Another one starts, too, where one that leaves still runs.
        """
        for slot in self.slots:
            slot.again = False  # what was wanted before
        free = [each for each in self.slots if not each.is_there and not each.is_out]
        free.sort(key=lambda slot: slot.host is not None)
        found = free[: max(0, count - len(self.staying()))]
        for slot in found:
            slot.failures, slot.again = 0, slot.host is not None
        return [slot for slot in found if slot.host is None]
