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
