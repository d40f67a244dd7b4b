"""A step of training as the guard looks at it, for `check_numerics`.

What the guard asks for is of the model and of its batch: how many steps were done, what
the step may change before an optimizer does, which optimizer takes the gradients.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.analysis import effects
from towers.builders.common import Pieces
from towers.builders.context import Context
from towers.builders.guard import Guard
from towers.builders.train_function import has_own_steps
from towers.keras_adapter import optimizers
from towers.layers import sharded, variables
from towers.partition.call import Gradients
from towers.partition.trace import Trace

State = Sequence[tuple[tf.Variable, tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class GuardedStep:
    """A step of training, which stops before it uses a gradient that is not finite.

    Attributes:
        guard: Stops it.
        whole_batch: Returns the batch, also where this host is given some rows of it.
        optimizer: The optimizer whose scale of the loss may make gradients infinite;
            `None` if there is none.
        own: Whether the model defines its steps. Then its loss is not known, and the
            guard names the towers whose gradients are not finite; `numerics` finds out
            what was wrong with Keras's own step.
        done: How many steps were done before it; `None` if `optimizer` tells.
        state: What to give back if it is stopped; see `Guard.before`.
    """

    guard: Guard
    whole_batch: Callable[[], Any]
    optimizer: keras.optimizers.Optimizer | None
    own: bool
    done: tf.Tensor | None = None
    state: State = ()

    @property
    def reads_losses(self) -> bool:
        """Whether the guard looks at the losses, too."""
        return not self.own

    def before(
        self, gradients: Gradients
    ) -> contextlib.AbstractContextManager[tf.Tensor]:
        """Makes the context in which gradients are used; see `Guard.before`."""
        losses = gradients.losses if self.reads_losses else ()
        losses = [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses]
        return self.guard.before(
            self.whole_batch,
            tf.add_n([tf.zeros([]), *losses]),
            [gradients.sums],
            self.optimizer,
            gradients.packed,
            of_towers=gradients.of_towers if self.own else (),
            done=self.done,
            state=self.state,
        )


def guarded_step(
    pieces: Pieces, data: Any, done: tf.Tensor | None, state: State = ()
) -> GuardedStep | None:
    """Returns a step of training as the guard looks at it; `None` without a guard.

    Args:
        pieces: The pieces of the builder.
        data: The batch.
        done: What `steps_done` has returned as the step began.
        state: What `state_before` has returned then.
    """
    context = pieces.context
    if context.guard is None:
        return None
    own = has_own_steps(context.model)
    if own:
        every = variables.optimizers(context.model).values()
        scaled = keras.optimizers.LossScaleOptimizer
        optimizer = next((one for one in every if isinstance(one, scaled)), None)
    else:
        optimizer = context.model.optimizer
    given = keras.utils.unpack_x_y_sample_weight(data)
    whole_batch = functools.partial(pieces.batches.whole, given)
    return GuardedStep(context.guard, whole_batch, optimizer, own, done, state)


def steps_done(context: Context) -> tf.Tensor | None:
    """Returns how many steps were done, to be read as one begins.

    Optimizers take turns in it. `None` if there is no guard, or the guard asks the
    model's optimizer.
    """
    every = variables.optimizers(context.model).values()
    if context.guard is None or not every or not has_own_steps(context.model):
        return None
    counts = [tf.cast(tf.identity(one.iterations), tf.int64) for one in every]
    return tf.reduce_max(counts)


def state_before(context: Context, trace: Trace | None = None) -> State:
    """Reads what a step of Keras's changes before the optimizer does.

    Args:
        context: The builder's.
        trace: The step; without it, all that a step might change is read.

    Returns:
        Variables, each with its value; none if nothing stops the step.
    """
    if context.guard is None or has_own_steps(context.model):
        return []
    model = context.model
    changed = {id(v.handle): v for v in _values_of(variables.of(model))}
    if trace is not None:
        ids = effects.changed(trace.graph)
        changed = {handle: v for handle, v in changed.items() if handle in ids}
    applied = [*model.trainable_variables]
    for optimizer in variables.optimizers(model).values():
        applied += optimizers.all_variables(optimizer)
    applied = {id(variable.handle) for variable in _values_of(applied)}
    state = []
    for handle, variable in changed.items():
        if handle not in applied:
            with tf.device(variable.device):
                state.append((variable, tf.identity(variable)))
    return state


def _values_of(every):
    """TensorFlow's variables behind Keras's: of one that is cut, each shard."""
    return [place for variable in every for place in sharded.places(variable)]
