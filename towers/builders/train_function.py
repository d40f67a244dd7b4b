"""Makes the function that Keras's `fit` calls with an iterator over batches."""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towers.builders.pieces import Pieces
from towers.loop import loop

Scope = Callable[[], contextlib.AbstractContextManager]


def train_function(
    pieces: Pieces, training: Any, scope: Scope
) -> Callable[[Any], dict[str, tf.Tensor]]:
    """Makes the function that Keras's `fit` calls with an iterator over batches.

    Args:
        pieces: Place batches, and hold the store.
        training: Creates variables and trains: `Steps`, or `AsynchronousTraining`.
        scope: Makes the context in which steps are traced and run.

    Returns:
        A function that trains on as many batches as the model has steps per execution,
        and returns the logs of the last; see `loop.train_function`.
    """
    context, store = pieces.context, pieces.store

    def step(data, local_batches, fetched):
        if not tf.executing_eagerly():
            context.facts.graph = tf.compat.v1.get_default_graph()
        devices = context.plan.devices
        timed = context.timers.step(data, local_batches, devices, fetched)
        with scope(), timed as local_batches:
            return training.train_step(data, local_batches)

    def cut(data):
        with scope():
            return pieces.batches.cut(data)

    def create(spec):
        with scope():
            training.create_variables(spec)

    steps, eagerly = context.model.steps_per_execution, context.model.run_eagerly
    placing = loop.Placing(cut, pieces.batches.copy_each)
    train = loop.train_function(create, placing, step, steps, eagerly, context.prefetch)
    follow, broadcast = store.follow_first_host, store.broadcast
    if not eagerly:
        follow = tf.function(follow, autograph=False)
        broadcast = tf.function(broadcast, autograph=False)

    def function(iterator):
        # Between two batches, callbacks do the same on all hosts.
        if store.stale and context.plan.hosts.count > 1:
            # A host that has just joined needs the values of the others.
            loop.create_for(create, iterator)
            with scope():
                follow()
        if store.differ():
            with scope():
                broadcast()
        store.stale = False
        if store.hosts_parts is not None:
            store.hosts_parts.begin_step()
        context.timers.reads(iterator)
        return train(iterator)

    return function
