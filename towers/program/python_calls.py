"""Python functions that threads of TensorFlow call, until Python ends.

A thread that calls Python once Python has ended never returns, and whoever frees the
iterator waits for it. So calls are counted. At exit they return no values, which
TensorFlow takes for an error, and the exit waits for a tenth of a second without a
call. `StopIteration` would be the end of the data, and `Dataset.cache` would keep a
part.
"""

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from towers.keras_adapter.datasets import guard_python

# Threads of TensorFlow call no more once there were no calls for so long.
_QUIET_S, _AT_MOST_S = 0.1, 10.0


class _Calls:
    """Counts calls, and refuses them while Python ends."""

    def __init__(self):
        self._lock = threading.Lock()
        self._begun = self._running = 0
        self._ending = False

    def __enter__(self) -> bool:
        """Tells whether the call may be."""
        with self._lock:
            self._begun += 1
            self._running += 1
        return not self._ending

    def __exit__(self, *_):
        with self._lock:
            self._running -= 1

    def end(self) -> None:
        """Refuses calls from now on, and waits until there are none."""
        self._ending, seen = True, 0
        latest_s = time.monotonic() + _AT_MOST_S
        while self._begun != seen or self._running:
            if time.monotonic() > latest_s:
                return
            seen = self._begun
            time.sleep(_QUIET_S)


_calls = _Calls()
# A child has none of the threads that call, and one of them may hold the lock.
os.register_at_fork(after_in_child=_calls.__init__)
atexit.register(_calls.end)


def until_exit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function that may be called in the background, as tf.data does.

    A thread that waits in Python, or calls it, when Python has ended does not return.
    TensorFlow would wait for it forever, to free an iterator.

    Returns:
        The function, which returns no values once Python ends. TensorFlow makes an
        error of that, without a stack trace. A StopIteration would be the end of the
        data, of which `Dataset.cache` would keep the part as the whole.
    """

    @functools.wraps(function)
    def called(*arguments):
        with _calls as allowed:
            return function(*arguments) if allowed else []

    return called


@functools.cache
def guard_all() -> None:
    """Does the same to all functions that TensorFlow calls: a user's data set has some.

    Who keeps a user's iterator beyond its use has to call this. Keras alone would free
    it while Python is there.
    """
    guard_python(until_exit)
