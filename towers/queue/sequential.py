"""Without Ray: the runs are started here, one after another on each device."""

import functools
from collections.abc import Callable, Mapping, Sequence

from towers.queue import entry as states
from towers.queue.entry import Entry
from towers.queue.process import Process
from towers.queue.record import Record
from towers.queue.schedule import Queue
from towers.queue.slots import Device, Slots


class Sequential(Queue):
    """Runs on the devices of this machine.

    Where runs take several devices, the devices form groups of as many as the largest
    run takes, and each group trains one run after another.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        slots: Slots,
        record: Record,
        environ: Mapping[str, str],
        start: Callable[..., Process] = Process,
    ):
        """Takes over what there is to run.

        Args:
            entries: The runs; those that have ended stay as they are.
            slots: The devices.
            record: Where runs are noted that have ended well.
            environ: The environment of the runs, but for what they get of the machine.
            start: Starts the process of a run.
        """
        super().__init__(entries, record)
        self._slots, self._environ, self._starter = slots, environ, start
        self._running: dict[Process, tuple[Entry, Sequence[Device]]] = {}

    def _begin(self):
        waiting = [entry for entry in self.entries if entry.state == states.WAITING]
        most = max((entry.run.devices for entry in waiting), default=1)
        for devices in self._slots.groups(most):
            self._start_next(devices)

    def _is_running(self):
        return bool(self._running)

    def _signal(self, number):
        for process in self._running:
            process.signal(number)

    def _start_next(self, devices):
        """Starts the next run on devices that are free."""
        waiting = (entry for entry in self.entries if entry.state == states.WAITING)
        while not self.stopped and (entry := next(waiting, None)):
            entry.devices = devices[: entry.run.devices]
            try:
                process = self._start(entry)
            except OSError as error:
                entry.state, entry.reason = states.FAILED, f"Cannot start it: {error}"
                continue
            entry.state = states.RUNNING
            self._running[process] = entry, devices
            return

    def _start(self, entry):
        put = self.events.put
        return self._starter(
            self._slots.flags(entry.run, entry.devices),
            entry.run.log,
            self._slots.environ(entry.devices, self._environ),
            told=lambda _, report: put(functools.partial(entry.hear, report)),
            ended=lambda process: put(functools.partial(self._ended, process)),
        )

    def _ended(self, process):
        entry, devices = self._running.pop(process)
        self._end(entry, process.exit_code, process.reason if process.code else "")
        self._start_next(devices)
