"""Lets threads of TensorFlow call Python functions until Python ends.

A thread that calls Python after Python has ended never returns, and the thread that
frees the iterator waits for it. So calls are counted. At exit, functions return no
values, which TensorFlow treats as an error, and the exit waits for a tenth of a second
without a call. `StopIteration` would be the end of the data, and `Dataset.cache` would
keep a part of them.
"""

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from towers.keras_adapter.datasets import guard_python

# Threads of TensorFlow make no more calls after a pause of this length.
_QUIET_S, _AT_MOST_S = 0.1, 10.0


class _Calls:
    """Counts calls, and refuses them while Python ends."""

    def __init__(self):
        self._lock = threading.Lock()
        self._begun = self._running = 0
        self._ending = False

    def __enter__(self) -> bool:
        """Counts a call; returns whether it is allowed."""
        with self._lock:
            self._begun += 1
            self._running += 1
        return not self._ending

    def __exit__(self, *_):
        with self._lock:
            self._running -= 1

    def end(self) -> None:
        """Refuses calls from now on, and waits until none are running."""
        self._ending, seen = True, 0
        latest_s = time.monotonic() + _AT_MOST_S
        while self._begun != seen or self._running:
            if time.monotonic() > latest_s:
                return
            seen = self._begun
            time.sleep(_QUIET_S)


_calls = _Calls()
# A child has none of the calling threads, one of which may hold the lock.
os.register_at_fork(after_in_child=_calls.__init__)
atexit.register(_calls.end)


def until_exit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that it may be called in the background, as by tf.data.

    A thread that waits in Python, or calls it, after Python has ended does not return.
    TensorFlow would wait for the thread forever, to free an iterator.

    Returns:
        The function, which returns no values once Python ends. TensorFlow raises an
        error for that, without a stack trace. A StopIteration would be the end of the
        data, of which `Dataset.cache` would keep a part as if it were complete.
    """

    @functools.wraps(function)
    def called(*arguments):
        with _calls as allowed:
            return function(*arguments) if allowed else []

    return called


@functools.cache
def guard_all() -> None:
    """Wraps all functions that TensorFlow calls, such as those of user data sets.

    Call it to keep a user's iterator beyond its use. Keras alone would free the
    iterator before Python ends.
    """
    guard_python(until_exit)
