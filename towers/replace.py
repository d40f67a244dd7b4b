"""Other code for a Keras layer while towers are traced."""

import threading
from collections.abc import Callable
from typing import Any

import keras


class Replacement:
    """A context in which a class of layers has another `call`, for all threads.

    It can be entered several times, also by several threads at once: towers that run
    together are traced by turns, in threads.
    """

    def __init__(self, layer: type[keras.layers.Layer], call: Callable[..., Any]):
        """Keeps what to replace.

        Args:
            layer: The class.
            call: What stands in for its `call`.
        """
        self._layer = layer
        self._calls = layer.call, call
        self._lock = threading.Lock()
        self._depth = 0

    def __enter__(self) -> None:
        self._enter(1)

    def __exit__(self, *error: Any) -> None:
        self._enter(-1)

    def _enter(self, step):
        with self._lock:
            self._depth += step
            self._layer.call = self._calls[self._depth > 0]
