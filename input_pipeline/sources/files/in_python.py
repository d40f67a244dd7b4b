"""Python within a graph, where an error is no stack trace."""

import atexit
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

# Threads of TensorFlow call no more once there were no calls for so long.
_QUIET_S, _AT_MOST_S = 0.1, 10.0


class _Calls:
    """Counts calls, and refuses them while Python ends.

    A thread that waits in Python, or calls it, when Python has ended does not return.
    TensorFlow would wait for it forever, to free an iterator.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._begun = self._running = 0
        self._ending = False

    def __enter__(self):
        with self._lock:
            self._begun += 1
            self._running += 1
        if self._ending:
            self.__exit__()
            raise ValueError("Python ends")

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
atexit.register(_calls.end)


def call(
    function: Callable[..., Sequence[np.ndarray]],
    arguments: Sequence[tf.Tensor],
    types: Sequence[tf.DType],
) -> list[tf.Tensor]:
    """Calls a function of arrays, which returns some of these types.

    TensorFlow logs the stack of what Python raises, also where it is awaited. So a
    ``ValueError`` becomes an InvalidArgumentError here.
    """

    def run(*arguments):
        try:
            with _calls:
                return b"", *function(*arguments)
        except ValueError as error:
            nothing = (np.empty([0], kind.as_numpy_dtype) for kind in types)
            return str(error).encode(), *nothing

    outputs = [tf.string, *types]
    fault, *found = tf.numpy_function(run, arguments, outputs, stateful=False)
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(fault, ""), [fault])]):
        return [tf.identity(each) for each in found]
