"""A tower that takes longer than it computes, as on a slower device."""

import contextlib
import time
from collections.abc import Iterator
from unittest import mock

import tensorflow as tf

from towers.builders.pieces import executor
from towers.keras_adapter.graphs import run_independently
from towers.tower.traced import Sized, Traced


@contextlib.contextmanager
def slowed(index: int, times: int) -> Iterator[None]:
    """Inside, one tower of each step that is traced is slow.

    Args:
        index: Which one.
        times: How many times as long it takes. Meanwhile it holds one of TensorFlow's
            threads, as a device of its own would, but no core.
    """
    run = executor.run

    def slow(towers, calls):
        towers = [*towers]
        if isinstance(towers[index], Traced | Sized):
            towers[index] = _Slow(towers[index], times)
        return run(towers, calls)

    with mock.patch.object(executor, "run", slow):
        yield


class _Slow:
    """A traced tower whose results come late."""

    def __init__(self, tower, times):
        self._tower, self._times = tower, times
        self.idle = tower.idle

    def __call__(self, *arguments):
        with tf.control_dependencies(_tensors(arguments)):
            begun_s = tf.timestamp()
        with tf.control_dependencies([begun_s]):
            result = self._tower(*arguments)
        with tf.control_dependencies(_tensors(result)):
            waited = tf.numpy_function(self._wait, [begun_s], [])
        run_independently([begun_s.op, waited])
        with tf.control_dependencies([waited]):
            return tf.nest.map_structure(
                lambda each: tf.identity(each) if tf.is_tensor(each) else each,
                result,
                expand_composites=True,
            )

    def of_size(self, size, idle, *arguments):
        return self(*arguments)

    def _wait(self, begun_s):
        time.sleep((self._times - 1) * (time.time() - begun_s))


def _tensors(nest):
    flat = tf.nest.flatten(nest, expand_composites=True)
    return [each for each in flat if tf.is_tensor(each)]
