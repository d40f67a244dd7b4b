"""Ends pools of processes as the program exits, also those that would not end."""

import functools
import threading

from towers.keras_adapter.pools import end_pools
from towers.program import forks

_SECONDS = 5.0


@functools.cache
def end_at_exit() -> None:
    """Has the exit wait for no pool of `multiprocessing` for ever.

    A signal that is sent to a group of processes ends those of a pool while one of them
    has the lock of the pool. Python, as it exits, would wait for that lock. It ends the
    processes that stay afterwards.
    """
    begun, ended = threading.Event(), threading.Event()

    def end():
        begun.wait()
        # What Python does first as well.
        end_pools()
        ended.set()

    def wait():
        begun.set()
        ended.wait(_SECONDS)

    # Now: while Python exits, it begins no thread.
    threading.Thread(target=end, daemon=True).start()
    forks.at_exit(wait)
