"""Signals as events, whatever the main thread does when they arrive.

Python runs a handler when the main thread computes again, which may be late. So a
thread reads their numbers from Python's wakeup descriptor.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

from towers.program import forks

_NOTHING_TO_SAVE = (
    b"SIGUSR1 received: nothing is saved now, as no training is in progress.\n"
)
STOPPING = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
"""The signals that ask for the end, as users know them."""


class Wakeup:
    """Has a thread call a function with the number of each signal that has a handler.

    Python runs a handler when the main thread next computes. Of a signal that arrives
    just before it waits, or that the kernel gives to another thread, it would not hear
    until something else wakes it. The number in a pipe does not get lost.
    """

    def __init__(self, heard: Callable[[int], None]):
        """Begins in the main thread; `heard` is called in another one."""
        receive, send = os.pipe()
        os.set_blocking(send, False)
        self._receive = forks.close_in_children(open(receive, "rb", buffering=0))
        self._send = forks.close_in_children(open(send, "wb", buffering=0))
        self._before = signal.set_wakeup_fd(send, warn_on_full_buffer=False)
        self._heard = heard
        threading.Thread(target=self._read, daemon=True).start()

    def close(self) -> None:
        """Puts back what there was before, and ends the thread."""
        signal.set_wakeup_fd(self._before)
        self._send.close()

    def _read(self):
        with self._receive:
            while number := self._receive.read(1):
                self._heard(number[0])


def listen(numbers: Iterable[int], heard: Callable[[int], None]) -> None:
    """Has a thread call a function for each signal, from now on.

    Args:
        numbers: The signals. Those that are ignored, as by nohup, stay so.
        heard: Is called with the number.
    """
    numbers = {n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    Wakeup(lambda number: number in numbers and heard(number))
    for number in numbers:
        forks.handle(number, _do_nothing)


def refuse_to_save() -> None:
    """Has SIGUSR1 say a line, and not end the process, where nobody handles it.

    It asks for a checkpoint, and whoever sends it need not know whether `fit` runs.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        forks.handle(signal.SIGUSR1, _say_nothing_is_saved)


def _say_nothing_is_saved(number, frame):
    os.write(2, _NOTHING_TO_SAVE)


def raise_at_ctrl_c() -> None:
    """Has Ctrl-C raise KeyboardInterrupt, which `towers._start` has put off.

    Where Ctrl-C is ignored, as in a shell's background jobs, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _do_nothing(number: int, frame: Any) -> None:
    """Handles a signal whose number is read from the pipe, or that is passed over."""


# Signals that ask a run to stop, or to save: noted, and heeded between two calls.


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
        numbers = {
            signal.SIGUSR1: self._on_save,
            **dict.fromkeys(STOPPING, self._on_stop),
        }
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
        self._stops += number in STOPPING
        if self._stops > 1:
            os.write(2, b"\nLeft at once; the checkpoints are as they were.\n")
            os._exit(128 + number)
