"""The one way to patch: `patched` for functions, `swapped` for values.

Two ways that know nothing of each other undo each other in the wrong order, and then
one patch stays forever. Both context managers are safe with threads and exceptions.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class Target:
    """A function that may be patched: an attribute of a class or a module.

    Create it once, when the module that uses it is imported.

    While anybody patches the function, the owner holds a dispatcher. It calls what the
    calling thread has asked for, else what was asked for all threads, else the function
    that was there before. So threads may enter and leave in any order.
    """

    def __init__(self, owner: Any, name: str, *, unless_replaced: bool = False):
        """Keeps what to patch: a function that the class or module itself defines.

        With `unless_replaced`, a function that somebody else has put there stays in
        charge. Otherwise it is the one that a patch is handed.
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
            found = vars(self._owner)[self._name]
            if found is not self._dispatcher and self._own in (None, found):
                self._before, self._dispatcher = found, self._dispatch(found)
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
            # If somebody else has replaced the dispatcher meanwhile, theirs stays
            # around ours, which then only passes calls on.
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
    """Inside, calls of a function go to another one.

    Patches nest: the innermost of a thread is called, with the function that it
    stands in for, which is the patch around it, then the arguments of the call. With
    `all_threads`, calls in other threads go there, too.
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
    """Inside, an attribute of some objects has other values, one for each.

    All threads see them. A second thread that swaps values waits until the first one
    has put them back.
    """
    with _swapping:
        before = [getattr(each, name) for each in objects]
        try:
            for each, value in zip(objects, values, strict=True):
                setattr(each, name, value)
            yield
        finally:
            for each, value in zip(objects, before, strict=True):
                setattr(each, name, value)
