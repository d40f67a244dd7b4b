"""Trains two towers on two threads of TensorFlow, by a clock that they alone advance.

    python two_threads.py VARIABLE_UPDATE STEPS_PER_EXECUTION PREFETCH

Prints the seconds of all phases, and what `Starvation` says of them, as JSON.
"""

import json
import sys
import threading

import keras
import tensorflow as tf

from tests.limits import HANG_S
from towers import configure, multi_gpu_model
from towers.keras_adapter.patching import Target, patched
from towers.loop import timers
from towers.monitoring.bottleneck.starvation import Starvation
from towers.partition.call import PartitionedCall

TOWERS = 2
BATCHES = 24
seconds, lock, both = [0.0], threading.Lock(), threading.Barrier(TOWERS)


def clock() -> tf.Tensor:
    """Returns the time at which the clock is read in the graph."""
    time = tf.numpy_function(lambda: seconds[0], [], tf.float64)
    return tf.ensure_shape(time, [])


def keep_a_thread(value):
    """Keeps a thread until both towers have one; then a second has passed."""
    both.wait(HANG_S)
    with lock:
        seconds[0] += 1.0
    return value


def on_tower(run, call, k, phase, values):
    """Runs a tower's phase on what `keep_a_thread` returns."""
    kept = tf.numpy_function(keep_a_thread, values[:1], values[0].dtype, stateful=False)
    return run(call, k, phase, [tf.ensure_shape(kept, values[0].shape), *values[1:]])


if __name__ == "__main__":
    way, steps, prefetch = sys.argv[1], *map(int, sys.argv[2:])
    tf.config.threading.set_inter_op_parallelism_threads(TOWERS)
    configure(TOWERS)
    timers.now = clock
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    parallel = multi_gpu_model(model, TOWERS, variable_update=way, prefetch=prefetch)
    parallel.compile("sgd", "mse", steps_per_execution=steps)
    batch = tf.ones([6, 4]), tf.ones([6, 2])
    data = tf.data.Dataset.from_tensors(batch).repeat(BATCHES)
    said = []
    starvation = Starvation(
        warmup_steps=0,
        terminal=False,
        say=said.append,
        clock=lambda: seconds[0],
    )
    with patched(Target(PartitionedCall, "_call_on_tower"), on_tower):
        parallel.fit(data, verbose=0, callbacks=[starvation])
    print(json.dumps([parallel.builder.timers.totals(), " ".join(said)]))
