"""A tower that computes everything several times, as on a device that much slower."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import tensorflow as tf

from towers.builders.pieces import executor
from towers.tower.traced import Sized, Traced


@contextlib.contextmanager
def slowed(index: int, times: int) -> Iterator[None]:
    """Inside, one tower of each step that is traced is slow.

    Args:
        index: Which one.
        times: How often it computes the same, one after another.
    """
    run = executor.run

    def slow(towers, calls):
        towers = [*towers]
        if isinstance(towers[index], Traced | Sized):
            towers[index] = _Repeated(towers[index], times)
        return run(towers, calls)

    with mock.patch.object(executor, "run", slow):
        yield


class _Repeated:
    """A traced tower that is called several times, one call after another."""

    def __init__(self, tower, times):
        self._tower, self._times = tower, times
        self.idle = tower.idle

    def __call__(self, params, state, rows, fraction, *extra):
        for _ in range(self._times):
            result = self._tower(params, state, rows, fraction, *extra)
            # TensorFlow leaves out a call whose results nothing needs.
            dense = [g for g in result.gradients if isinstance(g, tf.Tensor)]
            finite = [tf.reduce_all(tf.math.is_finite(each)) for each in dense]
            fraction = tf.where(tf.reduce_all(finite), fraction, fraction + 1)
        return result

    def of_size(self, size, idle, *arguments):
        return self(*arguments)
