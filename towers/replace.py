"""Other code for a class of Keras's while a step is traced."""

import threading
from collections.abc import Callable
from typing import Any


class Replacement:
    """A context in which a class has another method, for all threads.

    A method that somebody else has replaced stays theirs.

    It can be entered several times, also by several threads at once: towers that run
    together are traced by turns, in threads.
    """

    def __init__(self, owner: type, name: str, method: Callable[..., Any]):
        """Keeps what to replace.

        Args:
            owner: The class.
            name: The name of one of its own methods.
            method: What stands in for it.
        """
        self._owner, self._name = owner, name
        self._own, self._other = vars(owner)[name], method
        self._lock = threading.Lock()
        self._depth = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                self._swap(self._own, self._other)
            self._depth += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._swap(self._other, self._own)

    def _swap(self, old, new):
        # Somebody else may have replaced it, who then knows better.
        if vars(self._owner)[self._name] is old:
            setattr(self._owner, self._name, new)
