"""Functions of Keras's loop that compare rows on their first batch, if they have to."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from towers.builders.builder import Builder
from towers.devices import HOST
from towers.keras_adapter.datasets import free_aside
from towers.model.replayable import ReplayableBatches
from towers.program import python_calls
from towers.tower.compare import BatchWanted


def compared(
    make: Callable[[], Callable[[Any], Any]],
    builder: Callable[[], Builder],
    step_scope: Callable[[], AbstractContextManager],
) -> Callable[[Any], Any]:
    """Makes a function of a loop compare rows on its first batch.

    What a graph does not tell is asked for while it is traced, which is before it has
    read anything. The function is made anew then: TensorFlow does not trace a function
    again that has failed.

    Args:
        make: Makes the function.
        builder: Returns the builder in use.
        step_scope: What steps run in.
    """
    function = make()
    steps = builder().model.steps_per_execution

    def call(data):
        nonlocal function
        # What `predict` hands over is a list; what else is read once.
        is_list, batches = isinstance(data, list), None
        if isinstance(data, tf.data.Iterator):
            free_aside(data)
            python_calls.guard_all()
        if not isinstance(data, list | tf.data.Iterator):
            batches = ReplayableBatches(data, steps)
        wanted = set()
        while True:
            again = batches is not None and not is_list
            used = builder()
            try:
                # Where TensorFlow is not told, it would take what a loop hands from
                # step to step through the first GPU.
                with tf.device(HOST):
                    logs = function(batches.read() if again else data)
            except BatchWanted as error:
                if error.key in wanted:
                    raise
                wanted.add(error.key)
                if batches is None:
                    batches = ReplayableBatches(data, steps)
                with step_scope():
                    used.compare_first(batches.first, error)
                function = make()
            else:
                if wanted:
                    used.forget_small_comparisons()
                return logs

    return call
