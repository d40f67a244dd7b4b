"""Starts hosts that come and go, and others where some have failed or are wanted.

A slot is a place for one process after another. All that happens is an event in one
queue: signals, ends of processes, what the coordinator tells. A slot that fails three
times running is left out while enough others remain. A fixed number of hosts keeps the
simpler supervisor, as all its processes end together.
"""

import contextlib
import math
import queue
import signal
import socket
import time
from typing import Any

from towers.cluster import addresses
from towers.cluster.elastic import Coordinator, Event, Formed, Lost, Over, Wanted
from towers.launch.arguments import LaunchOptions
from towers.launch.elastic.course import Course, Ended, ProcessPlaced
from towers.launch.elastic.host_file import HostFile
from towers.launch.elastic.hosts import Hosts
from towers.launch.elastic.slot import TIMES, ProcessSlot
from towers.launch.generation import STOPPED, USAGE
from towers.launch.host import Host
from towers.launch.machine import Places, say
from towers.program import words
from towers.program.ending import ANOTHER_FAILED

# For the coordinator's machine to answer.
_ANSWER_S = 5.0
_STAYS_OUT = "does not start again"


class Launcher:
    """Hosts that are started, and their coordinator, if this is its machine.

    Attributes:
        events: Where signals are put.
    """

    def __init__(
        self, options: LaunchOptions, machine: Places, file: HostFile | None = None
    ):
        """Starts nothing yet.

        Args:
            options: What is asked for.
            machine: Where hosts start.
            file: What says how many hosts are wanted, or on which machines.
        """
        # Of signals' numbers, `Ended`, `ProcessPlaced`, and what the coordinator tells.
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self._options, self._course = options, Course()
        self._file = file
        self._count = 1 if options.host_rank is not None else options.most
        if file is not None:
            self._count = file.count
        self._machine = machine
        self._hosts = Hosts(options, machine, self.events.put)
        self._coordinator: Coordinator | None = None
        if not options.host_rank:
            self._coordinator = self._new_coordinator()
        # When those on other machines have had time enough to end.
        self._limit_s = math.inf

    def run(self) -> int:
        """Starts the hosts, and returns the exit code once all have ended."""
        with contextlib.ExitStack() as opened:
            if self._coordinator is not None:
                opened.callback(self._coordinator.close)
                where = self._coordinator.start()
                self._hosts.where = _reached_by(self._options) or where
            self._machine.say_where(self._count)
            heard: list[Any] = []
            for slot in self._hosts.slots[: self._count]:
                # A signal that comes meanwhile ends this.
                if not any(isinstance(each, int) for each in heard):
                    self._start(slot)
                while not self.events.empty():
                    heard.append(self.events.get())
            for event in heard:
                self._hear(event)
            while self._goes_on():
                self._hear(self._next())
                for slot in self._hosts.due():
                    self._start_again(slot)
                if self._file and (wanted := self._file.changed()) is not None:
                    self._want(wanted)
        return self._course.code()

    def _want(self, wanted: int | list[str]) -> None:
        """Asks for another number of hosts, or for hosts on other machines."""
        if isinstance(wanted, int):
            return self._coordinator.want(wanted)
        gone = self._machine.want(wanted, self._hosts.slots)
        known = {each.slot for each in self._coordinator.states()}
        for slot in self._hosts.slots:
            if slot.number in gone - known:
                slot.leave()
        self._coordinator.want(len(wanted), without=gone)

    def _new_coordinator(self) -> Coordinator:
        options = self._options
        return Coordinator(
            *(options.least, options.most, self._machine.token),
            self._machine.listens_at,
            expected=options.least if self._machine.places_later else self._count,
            interface=None if options.coordinator is None else options.interface,
            join_seconds=options.join_seconds,
            fail_seconds=options.fail_seconds,
            max_restarts=options.max_restarts,
            tell=self._tell,
            say=self._say,
        )

    def _tell(self, event: Event) -> None:
        """Is told by the coordinator, in its thread."""
        if isinstance(event, Formed):
            self._course.begun_s = time.monotonic()
        self.events.put(event)

    def _say(self, line: str) -> None:
        if not self._course.is_ending:
            say(line)

    def _next(self) -> Event | Ended | ProcessPlaced | int | None:
        """Waits for an event, or until there is something else to do."""
        next_s = min(self._limit_s, self._hosts.next_s)
        if self._file is not None:
            next_s = min(next_s, self._file.next_s)
        left = None if next_s == math.inf else max(0.0, next_s - time.monotonic())
        try:
            return self.events.get(timeout=left)
        except queue.Empty:
            return None

    def _hear(self, event: Event | Ended | ProcessPlaced | int | None) -> None:
        match event:
            case int():
                if event != signal.SIGUSR1:  # which asks for a checkpoint
                    self._course.stop(event)
                    self._hosts.start_no_more()
                self._hosts.pass_on(event)
            case Ended():
                self._note_end(event)
            case ProcessPlaced():
                self._expect_those_here()
            case Formed():
                self._note_formed(event)
            case Lost(failed=True):
                self._hosts.lose(event.slot, self._options.fail_seconds)
            case Wanted():
                self._note_wanted(event.count)
            case Over():
                self._note_over(event)

    def _start(self, slot: ProcessSlot) -> None:
        restarted = self._course.begun_s is not None
        if self._coordinator is None:
            restarted = slot.starts > 0
            # What became of the last process is no cause of what becomes of this one.
            self._course.failures.clear()
        self._hosts.start(slot, restarted)
        if self._coordinator is None:
            slot.train(self._options.join_seconds)  # it is not told when

    def _start_again(self, slot: ProcessSlot) -> None:
        where = self._hosts.where
        if self._coordinator is None and not _listens(where):
            # The last process may have found that, too.
            if self._course.failures[-1].host.exit_code == ANOTHER_FAILED:
                say(f"Nobody listens at {where} any more; no host starts again.")
                return slot.give_up()
        self._start(slot)

    def _note_end(self, ended: Ended) -> None:
        host, course = ended.host, self._course
        slot = next(each for each in self._hosts.slots if each.host is host)
        slot.end(ended.at_s)
        if host.code == 0 and not slot.leaves:
            course.is_done = True
            if self._coordinator is not None:
                self._coordinator.finish()
            return self._end_all()
        if not slot.was_ended and not slot.leaves:
            course.failures.append(ended)
        was_stopped = host.exit_code in (0, *STOPPED) and not slot.was_ended
        if course.is_ending:
            self._note_late_end(slot, host, was_stopped)
        elif slot.again:
            self._start(slot)
        elif slot.leaves:
            say(f"{_name(host)} has left.")
        elif was_stopped:
            say(f"{_name(host)} was stopped: {host.how}; it {_STAYS_OUT}.")
            self._expect_those_here()
        else:
            self._note_failure(slot, host)

    def _note_late_end(self, slot: ProcessSlot, host: Host, was_stopped: bool) -> None:
        """Has the others end, too, where one has failed while all end."""
        if was_stopped:
            return
        self._end_all()
        if not slot.was_ended and host.exit_code != ANOTHER_FAILED:
            say(f"{_failed(host)}.")

    def _note_failure(self, slot: ProcessSlot, host: Host) -> None:
        """Has it start again, or leaves it out."""
        slot.losses += host.is_lost
        slot.failures += not host.is_lost
        here = [each for each in self._hosts.staying() if each is not slot]
        known = self._known(slot)
        others = len(here) if self._options.host_rank is None else known
        enough = others >= self._options.least
        times = f", {TIMES} times running" if slot.failures >= TIMES else ""
        if host.exit_code == USAGE or (times and enough):
            slot.is_out = True
            rest = f"is left out, and {words.count(others, 'host')} may go on"
            say(f"{_failed(host)}{times}; it {rest if enough else _STAYS_OUT}.")
            self._expect_those_here()
        elif not known and all(each.failures >= TIMES for each in (slot, *here)):
            self._hosts.start_no_more()
            say(f"{_failed(host)}{times}; it {_STAYS_OUT}, as others have failed, too.")
        else:
            say(f"{_failed(host)}{times}; it starts again in {slot.wait():g} s.")

    def _known(self, slot: ProcessSlot) -> int:
        """How many others the coordinator knows, as far as this launcher does."""
        if self._coordinator is None:
            return 0
        states = self._coordinator.states()
        return sum(
            each.slot != slot.number and each.does != "leaves" for each in states
        )

    def _expect_those_here(self) -> None:
        """Has the first generation not wait for a host that does not come."""
        if self._options.host_rank is None and self._course.begun_s is None:
            count = len(self._hosts.placed())
            self._coordinator.expect(max(count, self._options.least))

    def _note_formed(self, event: Formed) -> None:
        self._course.members = event.slots
        for slot in self._hosts.slots:
            if slot.number in event.slots:
                slot.train()
        if event.generation:
            goes = words.count(len(event.slots), "host goes", "hosts go")
            self._say(f"{goes} on, as {event.why}.")

    def _note_wanted(self, count: int) -> None:
        if self._options.host_rank is not None or self._course.is_ending:
            return
        states = self._coordinator.states()
        self._hosts.end_surplus(count, {each.slot: each.does for each in states})
        for slot in self._hosts.missing(count):
            self._start(slot)

    def _note_over(self, event: Over) -> None:
        if not self._course.is_ending and event.failed:
            say(event.why)
        self._course.over = event
        self._hosts.start_no_more()
        if event.failed and self._course.stopped is None:
            self._end_all()

    def _end_all(self) -> None:
        self._hosts.start_no_more()
        self._hosts.end_within(self._options.fail_seconds)

    def _goes_on(self) -> bool:
        """Tells whether there are hosts, or may be on other machines."""
        if self._hosts.are_there:
            return True
        if self._options.host_rank is None or self._coordinator is None:
            return False
        if not self._course.is_ending:
            return True
        limit_s = time.monotonic() + self._options.fail_seconds
        self._limit_s = min(self._limit_s, limit_s)
        is_late = time.monotonic() >= self._limit_s
        stays = self._course.stopped is None and not is_late
        return stays and bool(self._coordinator.states())


def _reached_by(options: LaunchOptions) -> str | None:
    """Where the host here reaches the coordinator, if that is not where it listens."""
    if None in (options.interface, options.coordinator) or addresses.is_only_local(
        addresses.split(options.coordinator)[0]
    ):
        return None
    # The name that others reach may mean the loopback here.
    _, port = addresses.split(options.coordinator)
    return addresses.joined(addresses.of_interface(options.interface), port)


def _listens(where: str) -> bool:
    """Tells whether anybody listens at an address, as far as it can be reached."""
    try:
        socket.create_connection(addresses.split(where), timeout=_ANSWER_S).close()
    except OSError as error:
        return not isinstance(error, ConnectionRefusedError)
    return True


def _name(host: Host) -> str:
    return f"Host {host.rank} (pid {host.pid})"


def _failed(host: Host) -> str:
    log = f" (see {host.log})" if host.log else ""
    return f"{_name(host)} failed: {host.how}{log}"
