"""A queue of runs: its events, whoever starts the runs, and what ends them."""

import queue
import signal
from collections.abc import Callable, Sequence

from towers.processes.strays import Strays
from towers.queue import entry as states
from towers.queue.entry import Entry
from towers.queue.record import SAVE_S, Record

# What asks for the end. Runs get SIGTERM for all of them: whoever starts a queue in the
# background has its processes ignore Ctrl-C.
STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
# For what a run has started to end after it.
LAST_WORDS_S = 1.0

_STOPPING = "Stopping: the runs save. Another Ctrl-C or SIGTERM ends them at once."

# Is called with the entries, and a line for the user, whenever something has changed.
Show = Callable[[Sequence[Entry], str], None]


class Queue:
    """Runs that are trained until all have ended.

    Subclasses start them: `_begin` those for which there is room, `_is_running` tells
    whether there are events to wait for, `_signal` sends each run a signal.

    Attributes:
        events: Functions to call in the main thread, and the numbers of signals.
        entries: The runs.
        stopped: The signal that has asked for the end, if there was one.
        is_cut_off: Whether what starts the runs has gone, and would be waited for.
    """

    is_cut_off = False

    def __init__(self, entries: Sequence[Entry], record: Record):
        """Takes over what there is to run.

        Args:
            entries: The runs; those that have ended stay as they are.
            record: Where runs are noted that have ended well.
        """
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.entries, self.stopped = entries, None
        self._record, self._asked = record, 0

    def run(self, show: Show) -> None:
        """Runs all, until the last one has ended."""
        self._begin()
        show(self.entries, "")
        while self._is_running():
            event = self.events.get()
            if callable(event):
                event()
            else:
                self._hear(event)
            show(self.entries, _STOPPING if self.stopped else "")

    def _hear(self, number):
        """Passes a signal on to the runs; one that insists kills them."""
        if number not in STOPS:
            return self._signal(number)
        self.stopped = self.stopped or number
        self._asked += 1
        self._signal(signal.SIGTERM if self._asked < 3 else signal.SIGKILL)
        # One that stands still, as by SIGSTOP, would never hear of it.
        self._signal(signal.SIGCONT)

    def _end(self, entry, code, reason):
        """Notes how a run has ended."""
        entry.end(code, reason, bool(self.stopped))
        if entry.state == states.FINISHED:
            self._record.finish(entry.run)


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
    strays.end(LAST_WORDS_S)


def entries(
    runs: Sequence, record: Record, scheduler: str | None = None
) -> list[Entry]:
    """Makes entries of runs; those stay as they are that have ended well before.

    Args:
        runs: The runs.
        record: What earlier queues have noted.
        scheduler: The --scheduler, which does not want runs again that it has stopped.
    """
    return [Entry(run, _state(run, record, scheduler)) for run in runs]


def _state(run, record, scheduler):
    if record.is_finished(run):
        return states.FINISHED
    return states.PRUNED if record.is_pruned(run, scheduler) else states.WAITING
