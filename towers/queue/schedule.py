"""Starts runs where there is room, in order, until all have ended.

No small run overtakes one that waits for several devices, which might wait for ever.
"""

import functools
import queue
import signal
from collections.abc import Callable, Mapping, Sequence

from towers.processes.strays import Strays
from towers.queue import entry as states
from towers.queue.entry import Entry
from towers.queue.process import Process
from towers.queue.record import SAVE_S, Record
from towers.queue.slots import Slots

# What asks for the end. Runs get SIGTERM for all of them: whoever starts a queue in the
# background has its processes ignore Ctrl-C.
STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
# For what a run has started to end after it.
_LAST_WORDS_S = 1.0

STOPPING = "Stopping: the runs save. Another Ctrl-C or SIGTERM ends them at once."

# Is called with the entries, and a line for the user, whenever something has changed.
Show = Callable[[Sequence[Entry], str], None]
# Starts a run's process: its flags, log and environment, and whom it tells what.
Starter = Callable[..., Process]


class Queue:
    """Runs, on devices that they share.

    Attributes:
        events: Where the numbers of signals are put.
        entries: The runs.
        stopped: The signal that has asked for the end, if there was one.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        slots: Slots,
        record: Record,
        environ: Mapping[str, str],
        start: Starter = Process,
    ):
        """Takes over what there is to run.

        Args:
            entries: The runs; those that have ended stay as they are.
            slots: The devices.
            record: Where runs are noted that have ended well.
            environ: The environment of the runs, but for what they get of the machine.
            start: Starts the process of a run.
        """
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.entries, self.stopped = entries, None
        self._slots, self._record = slots, record
        self._environ, self._starter = environ, start
        self._running: dict[Process, Entry] = {}
        self._asked = 0

    def run(self, show: Show) -> None:
        """Runs all, until the last one has ended."""
        self._start_those_with_room()
        show(self.entries, "")
        while self._running:
            event = self.events.get()
            if callable(event):
                event()
            else:
                self._hear(event)
            self._start_those_with_room()
            show(self.entries, STOPPING if self.stopped else "")

    def _start_those_with_room(self):
        """Starts runs in order; one that needs more room is not overtaken."""
        for entry in self.entries:
            if entry.state != states.WAITING:
                continue
            taken = None if self.stopped else self._slots.take(entry.run)
            if taken is None:
                return
            entry.devices = taken
            try:
                process = self._start(entry)
            except OSError as error:
                self._slots.give_back(taken)
                entry.state, entry.reason = states.FAILED, f"Cannot start it: {error}"
                continue
            entry.state = states.RUNNING
            self._running[process] = entry

    def _start(self, entry):
        put = self.events.put
        return self._starter(
            self._slots.flags(entry.run, entry.devices),
            entry.run.log,
            self._slots.environ(entry.devices, self._environ),
            told=lambda process, told: put(functools.partial(self._told, entry, told)),
            ended=lambda process: put(functools.partial(self._ended, process)),
        )

    def _told(self, entry, told):
        entry.progress = told.get("progress", entry.progress)

    def _ended(self, process):
        entry = self._running.pop(process)
        self._slots.give_back(entry.devices)
        reason = process.reason if process.code else ""
        entry.end(process.exit_code, reason, bool(self.stopped))
        if process.code == 0:
            self._record.finish(entry.run)

    def _hear(self, number):
        """Passes a signal on to the runs; one that insists kills them."""
        if number not in STOPS:
            for process in self._running:
                process.signal(number)
            return
        self.stopped = self.stopped or number
        self._asked += 1
        for process in self._running:
            process.signal(signal.SIGTERM if self._asked < 3 else signal.SIGKILL)
            # One that stands still, as by SIGSTOP, would never hear of it.
            process.signal(signal.SIGCONT)


def run(
    queue: Queue,
    strays: Strays,
    listen: Callable[[Sequence[int], Callable[[int], None]], None],
    show: Show,
) -> None:
    """Runs a queue, and sees to it that nothing outlives it.

    Args:
        queue: The queue.
        strays: What its runs start.
        listen: Has a function called for each signal; see `signals.listen`.
        show: See above.
    """
    strays.watch(SAVE_S)
    listen((*STOPS, signal.SIGUSR1), queue.events.put)
    try:
        queue.run(show)
    except BaseException:
        # No fault of the runs: they save.
        strays.signal(signal.SIGTERM)
        strays.end(SAVE_S)
        raise
    strays.end(_LAST_WORDS_S)


def entries(runs: Sequence, record: Record) -> list[Entry]:
    """Makes entries of runs; those stay as they are that have ended well before."""
    return [
        Entry(run, states.FINISHED if record.is_finished(run) else states.WAITING)
        for run in runs
    ]


def environ(strays: Strays, differing: Sequence[str], name: str) -> dict[str, str]:
    """Returns what is added to the environment of all runs.

    Args:
        strays: What they start.
        differing: The flags by which they differ.
        name: The variable that says so.
    """
    return {**strays.mark, name: ",".join(differing)}
