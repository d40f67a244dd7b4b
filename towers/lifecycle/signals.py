"""Signals that ask a run to stop, or to save: noted, and heeded between two calls."""

import os
import signal
import threading

from towers.processes.signals import Wakeup, refuse_to_save
from towers.program import forks

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
"""The signals that ask for the end, as users know them."""


class Stopped(SystemExit):
    """A signal has ended the run, which is saved; exits with 128 and its number."""

    def __init__(self, number: int):
        super().__init__(128 + number)


class Signals:
    """Notes SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 while it is entered.

    A second SIGTERM or SIGINT ends the process at once, also inside of a call of
    TensorFlow's, where Python would come to it only afterwards. Python hands signals to
    its main thread; entered in another, it notes nothing.

    Attributes:
        stop: The signal that asks for the end, if there was one.
        save: Whether SIGUSR1 has asked for a checkpoint; to be set back.
    """

    def __init__(self):
        self.stop: int | None = None
        self.save = False
        self._before = self._wakeup = None
        self._stops = 0
        refuse_to_save()  # before `fit` and after it

    def __enter__(self) -> "Signals":
        self.stop, self.save, self._stops = None, False, 0
        if threading.current_thread() is not threading.main_thread():
            return self
        numbers = {signal.SIGUSR1: self._on_save, **dict.fromkeys(NAMES, self._on_stop)}
        self._before = {n: forks.handle(n, what) for n, what in numbers.items()}
        self._wakeup = Wakeup(self._leave_at_the_second)
        return self

    def __exit__(self, *_) -> None:
        if self._before is None:
            return
        self._wakeup.close()
        for number, what in self._before.items():
            signal.signal(number, what)
        self._before = self._wakeup = None

    def _on_stop(self, number, _):
        self.stop = number

    def _on_save(self, *_):
        self.save = True

    def _leave_at_the_second(self, number):
        self._stops += number in NAMES
        if self._stops > 1:
            os.write(2, b"\nLeft at once; the checkpoints are as they were.\n")
            os._exit(128 + number)
