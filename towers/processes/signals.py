"""Signals as events, whatever the main thread does when they arrive."""

import os
import signal
import threading
from collections.abc import Callable, Iterable

_MOST = 64  # bytes at once; one is a signal


def listen(numbers: Iterable[int], heard: Callable[[int], None]) -> None:
    """Has a thread call a function for each signal, from now on.

    Python runs a handler when the main thread next computes. Of a signal that arrives
    just before it waits, or that the kernel gives to another thread, it would not hear
    until something else wakes it. The number in a pipe does not get lost.

    Args:
        numbers: The signals. Those that are ignored, as by nohup, stay so.
        heard: Is called with the number.
    """
    receive, send = os.pipe()
    os.set_blocking(send, False)
    signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    numbers = {n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    for number in numbers:
        signal.signal(number, _do_nothing)
    threading.Thread(target=_read, args=(receive, numbers, heard), daemon=True).start()


def raise_at_ctrl_c() -> None:
    """Has Ctrl-C raise KeyboardInterrupt, which `towers._start` has put off.

    Where Ctrl-C is ignored, as in a shell's background jobs, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _do_nothing(number, frame):
    """Has Python put the number into the pipe."""


def _read(receive, numbers, heard):
    while found := os.read(receive, _MOST):
        for number in found:
            if number in numbers:
                heard(number)
