"""Keras optimizers: the variables they read, and the steps that may be patched."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from towers.keras_adapter.patching import Target

SGD_UPDATE_STEP = Target(keras.optimizers.SGD, "update_step", unless_replaced=True)
"""`SGD.update_step(gradient, variable, learning_rate)`."""

ADAGRAD_UPDATE_STEP = Target(
    keras.optimizers.Adagrad, "update_step", unless_replaced=True
)
"""`Adagrad.update_step(gradient, variable, learning_rate)`."""

APPLY_GRADIENTS = Target(
    BaseOptimizer, "_backend_apply_gradients", unless_replaced=True
)
"""`BaseOptimizer._backend_apply_gradients(gradients, variables)`.

Keras calls it for all variables at once, and it calls `update_step` for each.
"""


ADD_SLOT = Target(TFOptimizer, "add_variable_from_reference")
"""`add_variable_from_reference(reference_variable, name, initializer)`.

Keras's optimizers create each slot of a variable by it.
"""

# Each number of a variable is updated by itself, whatever the others are.
_ELEMENTWISE = (
    *(keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW),
    *(keras.optimizers.Adamax, keras.optimizers.RMSprop, keras.optimizers.Adagrad),
    *(keras.optimizers.Adadelta, keras.optimizers.Ftrl, keras.optimizers.Lion),
)


SUM_OVER_REPLICAS = Target(TFOptimizer, "_all_reduce_sum_gradients")
"""`TFOptimizer._all_reduce_sum_gradients(gradients_and_variables)`.

It sends all gradients through one operation, on one device.
"""


def iterations_variable(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Returns the variable that counts an optimizer's steps."""
    return optimizer._iterations


def learning_rate_variable(optimizer: Any) -> Any:
    """Returns the variable that holds an optimizer's learning rate, or its schedule.

    It is that of the innermost optimizer, where others wrap it.
    """
    return innermost(optimizer)._learning_rate


def innermost(optimizer: Any) -> Any:
    """Returns the optimizer that others wrap, such as one that scales the loss."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def accumulator(
    optimizer: keras.optimizers.Adagrad, variable: keras.Variable
) -> keras.Variable:
    """Returns what Adagrad has added up of the squares of a variable's gradients."""
    return optimizer._accumulators[slot_index(optimizer, variable)]


def slot_index(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> int:
    """Returns the place of a variable in an optimizer's lists, such as `momentums`."""
    return optimizer._get_variable_index(variable)


def is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tells whether an optimizer is known to update each number by itself.

    It is one of Keras's, or a subclass that updates as that does.
    """
    steps = "update_step", "_backend_update_step", "_backend_apply_gradients"
    return any(
        all(getattr(type(optimizer), step) is getattr(known, step) for step in steps)
        for known in _ELEMENTWISE
    )


def slots_of(
    optimizer: keras.optimizers.Optimizer,
    variable: keras.Variable,
    of_any_shape: bool = False,
) -> list[keras.Variable]:
    """Returns the variables of an optimizer that are shaped like one of a model's.

    With `of_any_shape`, these are all that it has for that variable. Keras's optimizers
    have a list for each kind of slot, in the order of the variables that they were
    built with. There are none before that.
    """
    optimizer = innermost(optimizer)
    if not optimizer.built:
        return []
    # Of those that a `keras.optimizers.MultiOptimizer` has, each has its own variables.
    if several := getattr(optimizer, "optimizers", ()):
        return [
            slot
            for each in several
            if any(variable is own for own in each._trainable_variables)
            for slot in slots_of(each, variable, of_any_shape)
        ]
    own, index = optimizer._trainable_variables, slot_index(optimizer, variable)
    found = []
    for name, slots in vars(optimizer).items():
        if not isinstance(slots, list) or len(slots) != len(own):
            continue
        slot = slots[index]
        if name in ("_trainable_variables", "_variables"):
            continue
        if isinstance(slot, keras.Variable) and (
            of_any_shape or slot.shape == variable.shape
        ):
            found.append(slot)
    return found


@contextlib.contextmanager
def gradients_clipped(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
) -> Iterator[Sequence[Any]]:
    """Inside, an optimizer clips no norms; yields gradients whose norms it has clipped.

    The gradients of a variable that is there several times are clipped together. Sparse
    ones stay sparse, with the numbers that Keras gets, which makes them dense.
    """
    before = optimizer.clipnorm, optimizer.global_clipnorm
    if optimizer.global_clipnorm:
        gradients, _ = tf.clip_by_global_norm(gradients, optimizer.global_clipnorm)
        gradients = [*map(_each_row_once, gradients)]
    elif optimizer.clipnorm:
        gradients, places = list(gradients), {}
        for i, variable in enumerate(variables):
            places.setdefault(id(variable), []).append(i)
        for together in places.values():
            mine = [gradients[i] for i in together]
            mine, _ = tf.clip_by_global_norm(mine, optimizer.clipnorm)
            for i, gradient in zip(together, mine, strict=True):
                gradients[i] = gradient
    optimizer.clipnorm = optimizer.global_clipnorm = None
    try:
        yield gradients
    finally:
        optimizer.clipnorm, optimizer.global_clipnorm = before


def _each_row_once(gradient):
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    with tf.device(gradient.values.device):
        rows, places = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


@contextlib.contextmanager
def only_for(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> Iterator[None]:
    """Inside, an optimizer keeps averages, and accumulates gradients, of these alone.

    Keras does so for all variables that the optimizer was built with.
    """
    wanted = {id(variable) for variable in variables}
    own = optimizer._trainable_variables
    mine = [i for i, variable in enumerate(own) if id(variable) in wanted]
    masked = {"_trainable_variables": [own[i] for i in mine]}
    if optimizer.use_ema:
        averages = optimizer._model_variables_moving_average
        masked["_model_variables_moving_average"] = [averages[i] for i in mine]
    if optimizer.gradient_accumulation_steps:
        masked["_accumulated_gradients"] = [
            each if i in mine else None
            for i, each in enumerate(optimizer._accumulated_gradients)
        ]
    # Not by assigning attributes, which Keras would track.
    attributes = vars(optimizer)
    before = {name: attributes[name] for name in masked}
    attributes.update(masked)
    try:
        yield
    finally:
        attributes.update(before)
