"""Keeps the locks, connections and signal handlers of this process from its children.

A fork copies descriptors, signal handlers and exit functions, but no threads. A child
would answer signals for its parent, keep its parent's locks and connections open, and
remove its parent's files as it ends. After registration here, a child behaves like one
of a plain Python process, whichever library has forked it.
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
    """A signal handler of this process alone.

    Attributes:
        function: Handles the signal in this process.
        children: The handler of child processes.
    """

    def __init__(self, function: Callable[[int, Any], Any], children: Handler):
        """Takes the handler of this process and that of its children."""
        self.function, self.children = function, children

    def __call__(self, number: int, frame: Any) -> Any:
        """Handles the signal; see `signal.signal`."""
        return self.function(number, frame)


def close_in_children(file: F) -> F:
    """Closes a file, socket or pipe in each child that is forked from now on.

    Args:
        file: The file; it has to keep its descriptor until it is closed.

    Returns:
        The same file.
    """
    _own_files.add(file)
    return file


def handle(number: int, handler: Callable[[int, Any], Any]) -> Handler:
    """Sets the handler of a signal for this process alone.

    Children get the handler that was set before the first call for this signal.

    Args:
        number: The signal.
        handler: A function, as `signal.signal` takes it.

    Returns:
        The previous handler, as `signal.signal` returns it.
    """
    before = signal.getsignal(number)
    children = before.children if isinstance(before, _OwnHandler) else before
    return signal.signal(number, _OwnHandler(handler, children))


def handler_of(number: int) -> Handler:
    """Returns the handler of a signal, as it was passed to `handle`."""
    handler = signal.getsignal(number)
    return handler.function if isinstance(handler, _OwnHandler) else handler


def at_exit(function: Callable, *args: Any, **options: Any) -> Callable[[], None]:
    """Calls a function as this process exits, but not as its children exit.

    Returns:
        The function to pass to `atexit.unregister`.
    """
    process = os.getpid()

    def end():
        if os.getpid() == process:
            function(*args, **options)

    return atexit.register(end)


def _hold_signals():
    """Blocks signals during a fork, as the child still has its parent's handlers."""
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
        with contextlib.suppress(OSError, ValueError):  # It is closed.
            descriptors.add(file.fileno())
    return descriptors - {-1}  # Closed sockets return -1.


os.register_at_fork(
    before=_hold_signals,
    after_in_parent=_release_signals,
    after_in_child=_become_a_child,
)


# Ends process pools as the program exits, even if they would hang.


@functools.cache
def end_pools_at_exit() -> None:
    """Makes sure that the exit does not wait forever for a pool of `multiprocessing`.

    A signal to a process group may end a pool's processes while one of them holds the
    lock of the pool. Python would wait for that lock as it exits. It ends the remaining
    processes afterwards.
    """
    begun, ended = threading.Event(), threading.Event()

    def end():
        begun.wait()
        # Python does the same at first.
        end_pools()
        ended.set()

    def wait():
        begun.set()
        ended.wait(_SECONDS)

    # Started now, as Python starts no threads while it exits.
    threading.Thread(target=end, daemon=True).start()
    at_exit(wait)
