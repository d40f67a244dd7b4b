"""Other code for a method of Keras's or TensorFlow's while a step is traced.

There is one way to do so, since two that know nothing of one another undo each other in
the wrong order, and then one of them stays for ever.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Replacement:
    """Replaces an attribute of a class or module, for the threads that ask for it.

    While any thread is inside of `by`, the owner has a function that looks which thread
    calls it. A thread that is inside gets what it has asked for; any other gets what
    the owner had before. So threads may enter and leave in any order, and none sees
    what another has replaced.
    """

    def __init__(self, owner: Any, name: str, alone: bool = False):
        """Keeps what to replace.

        Args:
            owner: A class or a module.
            name: The name of a method or function of its own.
            alone: Whether a function that somebody else has put there stays: who did
                so knows better. Otherwise it is what `by` hands on.
        """
        self._owner, self._name = owner, name
        self._own = vars(owner)[name] if alone else None
        self._lock = threading.Lock()
        self._inside = 0
        self._before = self._dispatch = None
        self._here = threading.local()

    @contextlib.contextmanager
    def by(self, other: Callable[..., Any]) -> Iterator[None]:
        """Inside, calls in this thread go to another function.

        Args:
            other: It is called with the function that it stands in for, and then the
                arguments of the call.
        """
        stack = self._here.__dict__.setdefault("stack", [])
        self._enter()
        stack.append(other)
        try:
            yield
        finally:
            stack.pop()
            self._leave()

    def _enter(self):
        with self._lock:
            self._inside += 1
            found = vars(self._owner)[self._name]
            if found is self._dispatch or self._own not in (None, found):
                return
            self._before, self._dispatch = found, self._dispatcher(found)
            setattr(self._owner, self._name, self._dispatch)

    def _leave(self):
        with self._lock:
            self._inside -= 1
            # If somebody has replaced it meanwhile, theirs stays, around ours, which
            # does nothing any more.
            if self._inside == 0 and vars(self._owner)[self._name] is self._dispatch:
                setattr(self._owner, self._name, self._before)

    def _dispatcher(self, before):
        @functools.wraps(before)
        def dispatch(*args, **kwargs):
            stack = self._here.__dict__.get("stack")
            if not stack:
                return before(*args, **kwargs)
            return stack[-1](before, *args, **kwargs)

        return dispatch
