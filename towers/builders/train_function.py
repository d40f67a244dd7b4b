"""Makes functions of a step: of a batch, and of the iterator that `fit` hands over."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from towers.builders.common import Pieces
from towers.builders.context import Context
from towers.keras_adapter.models import measuring, overrides
from towers.loop import loop

Scope = Callable[[], contextlib.AbstractContextManager]
_STEPS = "train_step", "test_step", "predict_step"


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
    context, store = pieces.context, pieces.store

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
    follow, broadcast = store.follow_first_host, store.broadcast
    if not eagerly:
        follow = tf.function(follow, autograph=False)
        broadcast = tf.function(broadcast, autograph=False)

    def function(iterator):
        # Between two batches, callbacks do the same on all hosts.
        if store.stale and context.plan.hosts.count > 1:
            # A host that has just arrived has to have what the others have.
            loop.create_for(create, iterator)
            with scope():
                follow()
        if store.differ():
            with scope():
                broadcast()
        store.stale = False
        store.hosts_parts.begin_step()
        context.timers.reads(iterator)
        return train(iterator)

    return function


def has_own_steps(model: keras.Model) -> bool:
    """Tells whether a model defines a step itself."""
    return any(overrides(model, step) for step in _STEPS)


def step_function(context: Context, step: str) -> Callable[[Any], Any]:
    """Returns a step of the model, of a batch as `fit` gives it.

    It preprocesses the batch, and creates variables on the device of home.
    """
    model, preprocess = context.model, context.preprocess

    def function(data):
        measured = contextlib.nullcontext()
        if preprocess is not None:
            given = keras.utils.unpack_x_y_sample_weight(data)
            with tf.name_scope("preprocess"):
                data = preprocess(given, step == "train_step")
            data = keras.utils.pack_x_y_sample_weight(*data)
            if not has_own_steps(model):
                # Keras's own metrics know targets as the user gives them.
                measured = measuring(model, *given[:2])
        with _creating_on(context.plan.home), measured:
            return getattr(model, step)(data)

    return function


@contextlib.contextmanager
def _creating_on(device: str) -> Iterator[None]:
    """Inside, variables are created on a device, such as slots of an optimizer."""

    def create(creator, **given):
        with tf.device(device):
            return creator(**given)

    with contextlib.ExitStack() as stack:
        # Keras leaves the graph for it.
        with tf.init_scope():
            stack.enter_context(tf.variable_creator_scope(create))
        yield
