"""Patches functions (`patched`) and values (`swapped`), in the only way allowed.

Two independent ways of patching undo each other in the wrong order, and then one patch
stays forever. Both context managers are safe with threads and exceptions.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class Target:
    """A function that may be patched: an attribute of a class or a module.

    Create it once, when the module that uses it is imported.

    While any patch is active, the owner holds a dispatcher. The dispatcher calls the
    patch of the calling thread, else the patch for all threads, else the original
    function. Threads may therefore enter and leave in any order.
    """

    def __init__(self, owner: Any, name: str, *, unless_replaced: bool = False):
        """Takes the function to patch, which the class or module itself defines.

        With `unless_replaced`, a function that other code has put there is not patched.
        Otherwise the patch gets that function as the original.
        """
        self._owner, self._name = owner, name
        self._own = vars(owner)[name] if unless_replaced else None
        self._lock = threading.Lock()
        self._inside = 0
        self._before = self._dispatcher = None
        self._of_thread = threading.local()
        self._of_all: tuple[Callable, ...] = ()

    def enter(self, by: Callable[..., Any], all_threads: bool) -> None:
        """Begins a patch; call `patched` instead."""
        with self._lock:
            self._inside += 1
            if all_threads:
                self._of_all += (by,)
            current = vars(self._owner)[self._name]
            if current is not self._dispatcher and self._own in (None, current):
                self._before, self._dispatcher = current, self._dispatch(current)
                setattr(self._owner, self._name, self._dispatcher)
        if not all_threads:
            self._of_thread.__dict__.setdefault("stack", []).append(by)

    def leave(self, by: Callable[..., Any], all_threads: bool) -> None:
        """Ends a patch; call `patched` instead."""
        if not all_threads:
            self._of_thread.stack.pop()
        with self._lock:
            self._inside -= 1
            if all_threads:
                at = self._of_all.index(by)
                self._of_all = self._of_all[:at] + self._of_all[at + 1 :]
            # If other code has replaced the dispatcher meanwhile, that function stays
            # around the dispatcher, which then only forwards calls.
            if self._inside == 0 and vars(self._owner)[self._name] is self._dispatcher:
                setattr(self._owner, self._name, self._before)

    def _dispatch(self, before):
        @functools.wraps(before)
        def dispatch(*args, **kwargs):
            function = before
            for patch in self._of_thread.__dict__.get("stack") or self._of_all:
                function = functools.partial(patch, function)
            return function(*args, **kwargs)

        return dispatch


@contextlib.contextmanager
def patched(
    target: Target, by: Callable[..., Any], *, all_threads: bool = False
) -> Iterator[None]:
    """Redirects calls of a function to another function within the context.

    Patches nest: a call goes to the thread's innermost patch. The patch gets the
    function that it replaces, which may be the next patch, and then the arguments. With
    `all_threads`, calls of other threads go to the patch, too.
    """
    target.enter(by, all_threads)
    try:
        yield
    finally:
        target.leave(by, all_threads)


# Reentrant, as a thread may swap other values within.
_swapping = threading.RLock()


@contextlib.contextmanager
def swapped(objects: Sequence[Any], name: str, values: Sequence[Any]) -> Iterator[None]:
    """Gives an attribute of some objects other values, one each, within the context.

    All threads see the values. A second thread that swaps values waits until the first
    thread has restored them.
    """
    with _swapping:
        before = [getattr(target, name) for target in objects]
        try:
            for target, value in zip(objects, values, strict=True):
                setattr(target, name, value)
            yield
        finally:
            for target, value in zip(objects, before, strict=True):
                setattr(target, name, value)
