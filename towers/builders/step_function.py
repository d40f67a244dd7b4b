"""Makes a function of a batch of a model's step, as one device would call it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from towers.builders.context import Context
from towers.keras_adapter.models import measuring, overrides

_STEPS = "train_step", "test_step", "predict_step"


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
