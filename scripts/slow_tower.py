"""A tower that takes longer than it computes, as on a slower device."""

import contextlib
import time
from collections.abc import Iterator

import tensorflow as tf

from towers.keras_adapter.graphs import run_independently
from towers.keras_adapter.patching import Target, patched
from towers.partition.call import PartitionedCall

_ON_A_TOWER = Target(PartitionedCall, "_call_on_tower")


@contextlib.contextmanager
def slowed(index: int, times: int) -> Iterator[None]:
    """Inside, one tower of each step that is traced is slow.

    Args:
        index: Which one.
        times: How many times as long it takes. Meanwhile it holds one of TensorFlow's
            threads, as a device of its own would, but no core.
    """

    def wait(begun_s):
        time.sleep((times - 1) * (time.time() - begun_s))

    def slow(run, call, k, phase, values):
        if k != index:
            return run(call, k, phase, values)
        with tf.control_dependencies(values):
            begun_s = tf.timestamp()
        with tf.control_dependencies([begun_s]):
            made = run(call, k, phase, values)
        with tf.control_dependencies(made):
            waited = tf.numpy_function(wait, [begun_s], [])
        run_independently([begun_s.op, waited])
        with tf.control_dependencies([waited]):
            return [*map(tf.identity, made)]

    with patched(_ON_A_TOWER, slow):
        yield
