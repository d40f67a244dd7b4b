"""Signals that ask a run to stop, or to save: noted, and heeded between two calls."""

import os
import signal
import threading

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
        self._before = None

    def __enter__(self) -> "Signals":
        self.stop, self.save = None, False
        if threading.current_thread() is not threading.main_thread():
            return self
        receive, send = os.pipe()
        os.set_blocking(send, False)
        numbers = {signal.SIGUSR1: self._on_save, **dict.fromkeys(NAMES, self._on_stop)}
        self._before = {n: signal.signal(n, what) for n, what in numbers.items()}
        self._pipe = send, signal.set_wakeup_fd(send, warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(receive,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        if self._before is None:
            return
        send, before = self._pipe
        signal.set_wakeup_fd(before)
        os.close(send)  # which ends the thread
        for number, what in self._before.items():
            signal.signal(number, what)
        self._before = None

    def _on_stop(self, number, _):
        self.stop = number

    def _on_save(self, *_):
        self.save = True


def _watch(receive):
    """Leaves at the second signal to stop."""
    stops = 0
    with os.fdopen(receive, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            stops += number[0] in NAMES
            if stops > 1:
                os.write(2, b"\nLeft at once; the checkpoints are as they were.\n")
                os._exit(128 + number[0])
