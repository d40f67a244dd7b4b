"""Makes the function that Keras's `fit` calls, of a step on towers."""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towers.builders.common import Pieces
from towers.loop import loop

Scope = Callable[[], contextlib.AbstractContextManager]


def train_function(
    pieces: Pieces,
    train_step: Callable[[Any, Any], dict[str, tf.Tensor]],
    scope: Scope,
    create_variables: Callable[[Any], None],
) -> Callable[[Any], dict[str, tf.Tensor]]:
    """Makes the function that Keras's `fit` calls with an iterator over batches.

    Args:
        pieces: Place batches, and give copies of variables their values.
        train_step: Trains on a batch, and on the local batches that were placed.
        scope: Makes the context that steps are traced and run in.
        create_variables: Creates what the step creates late, for a batch of some specs.

    Returns:
        A function that takes as many batches as the model has steps in a call, and
        returns the logs of the last; see `loop.train_function`.
    """
    context, copies = pieces.context, pieces.copies

    def step(data, local_batches, fetched):
        if not tf.executing_eagerly():
            context.facts.graph = tf.compat.v1.get_default_graph()
        with scope(), context.timers.step(data, local_batches, fetched):
            return train_step(data, local_batches)

    def cut(data):
        with scope():
            return pieces.batches.cut(data)

    def create(spec):
        with scope():
            create_variables(spec)

    steps, eagerly = context.model.steps_per_execution, context.model.run_eagerly
    placing = loop.Placing(cut, pieces.batches.copy_each)
    train = loop.train_function(create, placing, step, steps, eagerly, context.prefetch)
    follow, broadcast = copies.follow_first_host, copies.broadcast
    if not eagerly:
        follow = tf.function(follow, autograph=False)
        broadcast = tf.function(broadcast, autograph=False)

    def function(iterator):
        # Between two batches, callbacks do the same on all hosts.
        if copies.stale and context.plan.hosts.count > 1:
            # A host that has just arrived has to have what the others have.
            loop.create_for(create, iterator)
            with scope():
                follow()
        if copies.differ():
            with scope():
                broadcast()
        copies.stale = False
        copies.hosts_parts.begin_step()
        context.timers.reads(iterator)
        return train(iterator)

    return function
