"""Keras optimizers: the variables they read, and the steps that may be patched."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers import base_optimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from towers.keras_adapter.layers import is_keras_own
from towers.keras_adapter.patching import Target

SGD_UPDATE_STEP = Target(keras.optimizers.SGD, "update_step", unless_replaced=True)
"""`SGD.update_step(gradient, variable, learning_rate)`."""

ADAGRAD_UPDATE_STEP = Target(
    keras.optimizers.Adagrad, "update_step", unless_replaced=True
)
"""`Adagrad.update_step(gradient, variable, learning_rate)`."""

ADAM_UPDATE_STEP = Target(keras.optimizers.Adam, "update_step", unless_replaced=True)
"""`Adam.update_step(gradient, variable, learning_rate)`, which is `AdamW`'s, too."""

# Older versions lack the class; no object is an instance of an empty tuple.
_MULTI_OPTIMIZER = getattr(keras.optimizers, "MultiOptimizer", ())

APPLY = tuple(
    Target(each, "apply")
    for each in (BaseOptimizer, keras.optimizers.LossScaleOptimizer, _MULTI_OPTIMIZER)
    if each and "apply" in vars(each)
)
"""`apply(gradients, variables)` of each class of Keras's that defines one.

It builds an optimizer, and updates variables and whatever else the optimizer has.
"""

SCALE_LOSS = Target(keras.optimizers.LossScaleOptimizer, "scale_loss")
"""`scale_loss(loss)`: returns the loss of which Keras's step takes the gradient."""

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

GLOBAL_NORM = Target(base_optimizer, "global_norm", unless_replaced=True)
"""`global_norm(gradients)`, of which `_clip_gradients` makes use."""

# Optimizers that update each element of a variable independently.
_ELEMENTWISE = (
    *(keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW),
    *(keras.optimizers.Adamax, keras.optimizers.RMSprop, keras.optimizers.Adagrad),
    *(keras.optimizers.Adadelta, keras.optimizers.Ftrl, keras.optimizers.Lion),
    keras.optimizers.Nadam,
    # Older versions lack it.
    *filter(None, [getattr(keras.optimizers, "ScheduleFreeAdamW", None)]),
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

    If optimizers are nested, the innermost one has the learning rate.
    """
    return innermost(optimizer)._learning_rate


def innermost(optimizer: Any) -> Any:
    """Returns the optimizer inside wrappers, such as one that scales the loss."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def accumulator(
    optimizer: keras.optimizers.Adagrad, variable: keras.Variable
) -> keras.Variable:
    """Returns Adagrad's sum of squares of a variable's gradients."""
    return optimizer._accumulators[slot_index(optimizer, variable)]


def moments(
    optimizer: keras.optimizers.Adam, variable: keras.Variable
) -> tuple[keras.Variable, keras.Variable]:
    """Returns Adam's means of a variable's gradients, and of their squares."""
    i = slot_index(optimizer, variable)
    return optimizer._momentums[i], optimizer._velocities[i]


def slot_index(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> int:
    """Returns the index of a variable in an optimizer's lists, such as `momentums`."""
    return optimizer._get_variable_index(variable)


def is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    """Checks whether an optimizer is known to be elementwise.

    This holds for some of Keras's optimizers, and for subclasses with the same update.
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
    """Returns an optimizer's slots with the shape of a variable.

    With `of_any_shape`, the result has all slots of the variable. There are none before
    the optimizer is built.
    """
    for leaf in updating(optimizer):
        for i, known in enumerate(leaf._trainable_variables):
            if known is variable:
                slots_of_variable = [values[i] for values in _slot_lists(leaf)]
                slots_of_variable = [
                    slot
                    for slot in slots_of_variable
                    if isinstance(slot, keras.Variable)
                ]
                return [
                    s
                    for s in slots_of_variable
                    if of_any_shape or s.shape == variable.shape
                ]
    return []


def _slot_lists(optimizer):
    """Yields the lists that have an item for each of the optimizer's variables."""
    count = len(optimizer._trainable_variables)
    for name, values in vars(optimizer).items():
        known = name in ("_trainable_variables", "_variables")
        if isinstance(values, list) and len(values) == count and not known:
            yield values


@contextlib.contextmanager
def gradients_clipped(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
    norm: tf.Tensor | None = None,
) -> Iterator[Sequence[Any]]:
    """Clips gradients by norm; the optimizer itself does not, within the context.

    Yields the clipped gradients.

    `norm` is the norm of all gradients, for an optimizer with a `global_clipnorm`.

    The gradients of a variable that occurs several times are clipped together. Sparse
    gradients stay sparse, with the same numbers as in Keras, which makes them dense.
    """
    before = optimizer.clipnorm, optimizer.global_clipnorm
    if optimizer.global_clipnorm:
        limit = optimizer.global_clipnorm
        gradients, _ = tf.clip_by_global_norm(gradients, limit, use_norm=norm)
        gradients = [*map(_each_row_once, gradients)]
    elif optimizer.clipnorm:
        gradients, indices = list(gradients), {}
        for i, variable in enumerate(variables):
            indices.setdefault(id(variable), []).append(i)
        for positions in indices.values():
            clipped = [gradients[i] for i in positions]
            clipped, _ = tf.clip_by_global_norm(clipped, optimizer.clipnorm)
            for i, gradient in zip(positions, clipped, strict=True):
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
        rows, segments = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(gradient.values, segments, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


@contextlib.contextmanager
def only_for(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> Iterator[None]:
    """Restricts averages and accumulated gradients to some variables in the context.

    Keras updates these for all variables that the optimizer was built with.
    """
    wanted = {id(variable) for variable in variables}
    own = optimizer._trainable_variables
    indices = [i for i, variable in enumerate(own) if id(variable) in wanted]
    masked = {"_trainable_variables": [own[i] for i in indices]}
    if optimizer.use_ema:
        averages = optimizer._model_variables_moving_average
        masked["_model_variables_moving_average"] = [averages[i] for i in indices]
    if optimizer.gradient_accumulation_steps:
        masked["_accumulated_gradients"] = [
            accumulated_gradient if i in indices else None
            for i, accumulated_gradient in enumerate(optimizer._accumulated_gradients)
        ]
    # Keras would track assigned attributes.
    attributes = vars(optimizer)
    before = {name: attributes[name] for name in masked}
    attributes.update(masked)
    try:
        yield
    finally:
        attributes.update(before)


def updating(optimizer: Any) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that update variables, inside any wrappers."""
    optimizer = innermost(optimizer)
    if isinstance(optimizer, _MULTI_OPTIMIZER):
        return [*optimizer.optimizers]
    return [optimizer]


def updating_one(
    optimizer: Any, variable: keras.Variable
) -> keras.optimizers.Optimizer:
    """Returns the optimizer for a variable, even if not built with the variable."""
    optimizer = innermost(optimizer)
    if isinstance(optimizer, _MULTI_OPTIMIZER):
        return optimizer._optimizer_map(variable)
    return optimizer


def known_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables that an optimizer was built for."""
    return [*optimizer._trainable_variables]


def slots(optimizer: keras.optimizers.Optimizer) -> list[list[keras.Variable]]:
    """Returns an optimizer's slots, of any shape, for each of its `known_variables`."""
    return [
        [slot for slot in of_one if isinstance(slot, keras.Variable)]
        for of_one in zip(*_slot_lists(optimizer), strict=True)
    ] or [[] for _ in optimizer._trainable_variables]


def all_variables(optimizer: Any) -> list[keras.Variable]:
    """Returns an optimizer's variables, including those that it does not list.

    An example is Nadam's product of momentums, if another optimizer builds Nadam.
    """
    by_id = {id(variable): variable for variable in optimizer.variables}
    for leaf in (optimizer, *updating(optimizer)):
        own = [v for v in vars(leaf).values() if isinstance(v, keras.Variable)]
        by_id |= {id(variable): variable for variable in own}
    return [*by_id.values()]


def scalars(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables that an optimizer shares among all model variables.

    The step count and the learning rate are excluded.
    """
    known = {id(slot) for of_one in slots(optimizer) for slot in of_one}
    known.add(id(iterations_variable(optimizer)))
    known.add(id(learning_rate_variable(optimizer)))
    return [v for v in all_variables(optimizer) if id(v) not in known]


def add_slot_here(
    optimizer: keras.optimizers.Optimizer,
    reference: keras.Variable,
    name: str | None = None,
    initializer: Any = "zeros",
) -> keras.Variable:
    """Creates a slot as `ADD_SLOT` does, on the device of the scope.

    Keras creates slots on the device of the variable.
    """
    return BaseOptimizer.add_variable_from_reference(
        optimizer, reference, name=name, initializer=initializer
    )


def accumulated(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> tuple[keras.Variable | None, int]:
    """Returns a variable's accumulated gradients, and the number of accumulated steps.

    Returns `None`, and 1, if the optimizer does not accumulate gradients.
    """
    steps = optimizer.gradient_accumulation_steps
    if not steps:
        return None, 1
    sums = optimizer._accumulated_gradients
    return sums[slot_index(optimizer, variable)], steps


def average(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> keras.Variable | None:
    """Returns an optimizer's moving average of a variable, if it keeps one."""
    if not optimizer.use_ema:
        return None
    return optimizer._model_variables_moving_average[slot_index(optimizer, variable)]


def overridden(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Returns the methods of Keras's optimizers that a user's class replaces."""
    return sorted(
        name
        for cls in type(optimizer).__mro__
        if issubclass(cls, BaseOptimizer) and not is_keras_own(cls)
        for name in vars(cls)
        # Each version of Python writes other names of its own, such as
        # `__firstlineno__`, into a class.
        if hasattr(BaseOptimizer, name) and not name.startswith("__")
    )


@contextlib.contextmanager
def taking(optimizer: Any, count: int) -> Iterator[None]:
    """Lets an optimizer take `count` gradients, some for the same variable.

    A `MultiOptimizer` checks the number of gradients.
    """
    optimizer = innermost(optimizer)
    if not isinstance(optimizer, _MULTI_OPTIMIZER):
        yield
        return
    attributes = vars(optimizer)
    before = attributes["_trainable_variables_indices"]
    attributes["_trainable_variables_indices"] = dict.fromkeys(range(count))
    try:
        yield
    finally:
        attributes["_trainable_variables_indices"] = before
