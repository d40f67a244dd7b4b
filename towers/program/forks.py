"""Keeps from forked children what is of this process alone.

A fork copies descriptors, signal handlers and functions for the exit, but no threads. A
child would answer signals for its parent, keep its parent's locks and connections open,
and remove its parent's files at its own end. With what is registered here, a child acts
as one of a plain Python process, whoever has forked it.
"""

import atexit
import contextlib
import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from towers.keras_adapter.pools import end_pools

Handler = Callable[[int, Any], Any] | int | None
_SECONDS = 5.0


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


F = TypeVar("F", bound=_HasDescriptor)

_own_files: weakref.WeakSet = weakref.WeakSet()
_masks = threading.local()


class _OwnHandler:
    """A handler of this process alone.

    Attributes:
        function: Handles the signal in this process.
        children: The handler that children have.
    """

    def __init__(self, function: Callable[[int, Any], Any], children: Handler):
        """Takes both."""
        self.function, self.children = function, children

    def __call__(self, number: int, frame: Any) -> Any:
        """Handles the signal, as `signal.signal` asks of a handler."""
        return self.function(number, frame)


def close_in_children(file: F) -> F:
    """Closes a file, socket or pipe in each child that is forked from now on.

    Args:
        file: It keeps its descriptor until it is closed.

    Returns:
        The same.
    """
    _own_files.add(file)
    return file


def handle(number: int, handler: Callable[[int, Any], Any]) -> Handler:
    """Sets the handler of a signal for this process alone.

    Children have the handler that was there before the first one of this kind.

    Args:
        number: The signal.
        handler: A function, as `signal.signal` takes it.

    Returns:
        The handler before, as `signal.signal` does.
    """
    before = signal.getsignal(number)
    children = before.children if isinstance(before, _OwnHandler) else before
    return signal.signal(number, _OwnHandler(handler, children))


def handler_of(number: int) -> Handler:
    """Returns the handler of a signal, as it was given to `handle`."""
    handler = signal.getsignal(number)
    return handler.function if isinstance(handler, _OwnHandler) else handler


def at_exit(function: Callable, *args: Any, **options: Any) -> Callable[[], None]:
    """Calls a function as this process exits, and not as its children do.

    Returns:
        What `atexit.unregister` takes.
    """
    process = os.getpid()

    def end():
        if os.getpid() == process:
            function(*args, **options)

    return atexit.register(end)


def _hold_signals():
    """Keeps signals from a child that has its parent's handlers still."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _release_signals():
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _become_a_child():
    try:
        _let_go()
    finally:
        _release_signals()


def _let_go():
    wakes, own = signal.set_wakeup_fd(-1), _own_descriptors()
    if wakes not in own:
        signal.set_wakeup_fd(wakes)
    nobody = os.open(os.devnull, os.O_RDWR)
    for descriptor in own:
        # The copies of the parent's objects keep the number, so no other file gets it.
        os.dup2(nobody, descriptor, inheritable=False)
    os.close(nobody)
    _own_files.clear()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if isinstance(handler, _OwnHandler):
            signal.signal(number, handler.children)


def _own_descriptors():
    descriptors = set()
    for file in [*_own_files]:
        with contextlib.suppress(OSError, ValueError):  # it is closed
            descriptors.add(file.fileno())
    return descriptors - {-1}  # of closed sockets


os.register_at_fork(
    before=_hold_signals,
    after_in_parent=_release_signals,
    after_in_child=_become_a_child,
)


# Ends pools of processes as the program exits, also those that would not end.


@functools.cache
def end_pools_at_exit() -> None:
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
    at_exit(wait)
