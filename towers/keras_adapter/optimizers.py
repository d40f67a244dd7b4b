"""Keras optimizers: the variables they read, and the steps that may be patched."""

from typing import Any

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer

from towers.keras_adapter.patching import Target

SGD_UPDATE_STEP = Target(keras.optimizers.SGD, "update_step", unless_replaced=True)
"""`SGD.update_step(gradient, variable, learning_rate)`."""

APPLY_GRADIENTS = Target(
    BaseOptimizer, "_backend_apply_gradients", unless_replaced=True
)
"""`BaseOptimizer._backend_apply_gradients(gradients, variables)`.

Keras calls it for all variables at once, and it calls `update_step` for each.
"""


def iterations_variable(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Returns the variable that counts an optimizer's steps."""
    return optimizer._iterations


def learning_rate_variable(optimizer: Any) -> Any:
    """Returns the variable that holds an optimizer's learning rate, or its schedule.

    It is that of the innermost optimizer, where others wrap it.
    """
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer._learning_rate


def slot_index(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> int:
    """Returns the place of a variable in an optimizer's lists, such as `momentums`."""
    return optimizer._get_variable_index(variable)
