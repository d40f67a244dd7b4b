"""Other code for a class of Keras's while a step is traced."""

import threading
from collections.abc import Callable
from typing import Any


class Replacement:
    """A context in which a class has another method, for all threads.

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
        self._methods = vars(owner)[name], method
        self._lock = threading.Lock()
        self._depth = 0

    def __enter__(self) -> None:
        self._enter(1)

    def __exit__(self, *error: Any) -> None:
        self._enter(-1)

    def _enter(self, step):
        with self._lock:
            self._depth += step
            setattr(self._owner, self._name, self._methods[self._depth > 0])
