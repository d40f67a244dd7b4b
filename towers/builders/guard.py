"""The guard: a step whose loss or gradient is not finite changes nothing, but raises.

In the graph that is one sum over the gradients that are about to be applied, and a
branch on it. The branch looks at each number, as a sum of finite ones may overflow.
Where gradients travel packed, each tower squares and adds those that it sends: that is
one kernel a buffer, beside the reduction, and only scalars go to the host. Which tower,
and what in it, is found out afterwards; see `numerics`.

It looks before home takes the gradients. A step may have several optimizers: what came
before stays, such as the update of another one. Gradients that home computes by itself
are not checked.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.analysis import effects
from towers.collectives import packing, reduce
from towers.devices.names import HOST
from towers.keras_adapter import optimizers
from towers.keras_adapter.models import has_own_steps
from towers.layers import sharded, variables
from towers.partition.call import Gradients
from towers.partition.trace import Trace

# To start a sum over fewer numbers takes longer than to add them, so they are joined.
_MANY = 2**16
State = Sequence[tuple[tf.Variable, tf.Tensor]]


class StoppedStep(Exception):
    """A step of training that was stopped, as it is not finite; see `undo`.

    Attributes:
        step: Its number, counted from 1 by the optimizer.
        data: Its batch; of towers that do not wait for one another, a local batch.
        tower: Index of that tower, `None` if the batch is that of all.
        skipped: How many were skipped just before it, their gradients being infinite at
            a larger loss scale.
        blamed: Indices of the towers whose gradients are not finite, if that is known.
        state: What else the step may have changed: variables, each with its value from
            before.
    """

    def __init__(self, step: int, data: Any, skipped: int = 0):
        super().__init__(f"Step {step} is not finite.")
        self.step, self.data, self.skipped = step, data, skipped
        self.tower: int | None = None
        self.blamed: tuple[int, ...] = ()
        self.state: list[tuple[tf.Variable, tf.Tensor]] = []

    def undo(self) -> None:
        """Gives back what the step changed before it was stopped."""
        for variable, value in self.state:
            variable.assign(value)


class Guard:
    """Stops the first step whose loss or gradient is not finite."""

    def __init__(self) -> None:
        self._stopped: StoppedStep | None = None
        self._armed = True
        # The last step that was skipped, and how often.
        self._skipped = 0, 0

    @contextlib.contextmanager
    def disarmed(self) -> Iterator[None]:
        """Inside, nothing is stopped: steps are only tried, and undone."""
        self._armed = False
        try:
            yield
        finally:
            self._armed = True

    @contextlib.contextmanager
    def raises(self) -> Iterator[None]:
        """Inside, a step that is stopped ends in a `StoppedStep`."""
        self._stopped = None
        try:
            yield
        except tf.errors.OutOfRangeError:
            if self._stopped is None:
                raise
            raise self._stopped from None

    @contextlib.contextmanager
    def before(
        self,
        data: Callable[[], Any],
        loss: tf.Tensor,
        gradients: Sequence[Sequence[reduce.Gradient]],
        optimizer: keras.optimizers.Optimizer | None,
        packed: Sequence[reduce.Packed] = (),
        of_towers: Sequence[Sequence[reduce.Gradient | None]] = (),
        done: tf.Tensor | None = None,
        state: Sequence[tuple[tf.Variable, tf.Tensor]] = (),
    ) -> Iterator[tf.Tensor]:
        """Inside, nothing happens in a step that is stopped.

        What computes the step raises a `tf.errors.OutOfRangeError` then. Yields a
        boolean that is computed only if the step is not stopped.

        Args:
            data: Returns the whole batch: a nest of tensors.
            loss: Its loss, a scalar.
            gradients: Its gradient for each trainable variable, scaled: lists of what
                is on one device, which together have all.
            optimizer: What is to apply them.
            packed: How they have travelled, where that is what to look at.
            of_towers: The gradients of each tower, of which those that are not finite
                are named.
            done: How many steps were done before this one. By default the optimizer
                tells.
            state: What else the step may change: variables, each with its value from
                before.
        """
        buffered = {i for sent in packed for i in sent.places}
        others = [
            [g for i, g in enumerate(of_device) if g is not None and i not in buffered]
            for of_device in gradients
        ]
        with tf.name_scope("check_numerics"):
            parts = []
            with tf.device(HOST):
                good = finite_loss = tf.math.is_finite(loss)
            for joined in map(_joined, filter(None, others)):
                of_device = sum_is_finite(joined)
                with tf.device(HOST):
                    good &= of_device
                parts += joined
            for buffers_of_towers in (
                buffers for sent in packed for buffers in sent.parts
            ):
                of_buffers = sums_are_finite(buffers_of_towers)
                with tf.device(HOST):
                    good &= of_buffers
            parts += [total for sent in packed for total in sent.sums]
            skips = finite_loss & _may_overflow(optimizer)
            blamed = [[g for g in tower if g is not None] for tower in of_towers]
            stop = functools.partial(
                self._stop, skips, data, optimizer, done, blamed, state
            )

            def look_closer():
                return tf.cond(finite([loss, *parts]), lambda: tf.constant(True), stop)

            with tf.device(HOST):
                checked = tf.cond(good, lambda: tf.constant(True), look_closer)
        with tf.control_dependencies([checked]):
            yield checked

    def set_tower(self, tower: int) -> None:
        """Sets the tower on which a step was stopped, unless it is known."""
        if self._stopped is not None and self._stopped.tower is None:
            self._stopped.tower = tower

    def _stop(self, skips, data, optimizer, done, blamed, state):
        """Hands over what the graph knows of a step that is not finite."""
        data, parts = data(), [*map(_joined, blamed)]
        fine = tf.stack([finite(part) if part else True for part in parts] or [True])
        some = tf.nest.map_structure(lambda tensor: tensor is not None, data)
        tensors = [tensor for tensor in tf.nest.flatten(data) if tensor is not None]
        changed = [variable for variable, _ in state]
        catch = functools.partial(self._catch, optimizer, some, changed)
        with tf.device(HOST):
            # Less than 0: the optimizer knows.
            done = -1 if done is None else done
            values = [value for _, value in state]
            given = [skips, done, fine, *values, *tensors]
            goes_on = tf.py_function(catch, given, tf.bool)
            return tf.ensure_shape(goes_on, [])

    def _catch(self, optimizer, some, changed, skips, done, fine, *tensors):
        """Keeps what the graph hands over, and stops the step, or lets it go on."""
        if not self._armed:
            return True
        if done < 0:
            done = 0 if optimizer is None else optimizer.iterations
        step = int(done) + 1
        # A step that is skipped does not count.
        skipped = self._skipped[1] if self._skipped[0] == step else 0
        if skips:
            self._skipped = step, skipped + 1
            return True
        if self._stopped is None:
            values, left = tensors[: len(changed)], iter(tensors[len(changed) :])
            data = tf.nest.map_structure(lambda one: next(left) if one else None, some)
            self._stopped = StoppedStep(step, data, skipped)
            self._stopped.blamed = tuple(map(int, np.flatnonzero(~fine.numpy())))
            self._stopped.state = [*zip(changed, values, strict=True)]
        # The one error that TensorFlow takes for an end, and does not warn of.
        raise StopIteration("A step is not finite.")


def _joined(gradients):
    """Joins gradients into fewer tensors, each where it is."""
    parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    small = collections.defaultdict(list)
    large = []
    for part in parts:
        few = (part.shape.num_elements() or _MANY) < _MANY
        (small[part.device] if few else large).append(part)
    joined = []
    for device, together in small.items():
        with tf.device(device):
            joined += packing.pack(together)
    return joined + large


def sum_is_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Tells whether the sum of all numbers is finite: one pass over each tensor.

    If it is, each of them is; if not, it may be that only the sum overflows. The
    tensors are of floating types, and are summed where they are.
    """
    wide = tf.float64 if any(t.dtype == tf.float64 for t in tensors) else tf.float32
    sums = []
    for tensor in tensors:
        with tf.device(tensor.device):
            sums.append(tf.reduce_sum(tf.cast(tensor, wide)))
    with tf.device(tensors[0].device):
        return tf.math.is_finite(tf.add_n(sums))


def sums_are_finite(towers: Sequence[tf.Tensor]) -> tf.Tensor:
    """Tells whether the sum over the towers is finite for each number of a buffer.

    If it is said to be, it is: no sum is larger than the square root of their number
    times all squares. If not, it may be that only these overflow.
    """
    dtype = towers[0].dtype
    halves = []
    for buffer in towers:
        with tf.device(buffer.device):
            # This one reads once, and writes nothing but half of the sum of squares.
            halves.append(tf.nn.l2_loss(_wide(buffer)))
    with tf.device(HOST):
        total = tf.add_n(halves)
        limit = float(dtype.max) * float(dtype.max) / (2 * len(towers))
        # Neither infinity nor what is not a number is less than that.
        return total < min(limit, float(total.dtype.max))


def finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Tells whether each number is finite: two passes over each tensor, where it is."""
    of_tensors = []
    for tensor in tensors:
        with tf.device(tensor.device):
            of_tensors.append(tf.reduce_all(tf.math.is_finite(tensor)))
    return tf.reduce_all(of_tensors)


def _wide(tensor):
    return tensor if tensor.dtype == tf.float64 else tf.cast(tensor, tf.float32)


def _may_overflow(optimizer):
    """Tells whether gradients may be infinite as they are scaled: that is no fault."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return tf.constant(False)
    # It is halved at each such step; one that is not finite by itself remains so.
    return optimizer.scale_loss(tf.ones([])) > 1


# A step of training as the guard looks at it, for `check_numerics`.
#
# What the guard asks for is of the model and of its batch: how many steps were done,
# what the step may change before an optimizer does, which optimizer takes the
# gradients.


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
    guard: Guard | None,
    model: keras.Model,
    whole_batch: Callable[[], Any],
    done: tf.Tensor | None,
    state: State = (),
) -> GuardedStep | None:
    """Returns a step of training as the guard looks at it; `None` without a guard.

    Args:
        guard: The guard, if there is one.
        model: The model that the step trains.
        whole_batch: Returns the batch, also where this host is given some rows of it.
        done: What `steps_before` has returned as the step began.
        state: What `state_before` has returned then.
    """
    if guard is None:
        return None
    own = has_own_steps(model)
    if own:
        every = variables.optimizers(model).values()
        scaled = keras.optimizers.LossScaleOptimizer
        optimizer = next((one for one in every if isinstance(one, scaled)), None)
    else:
        optimizer = model.optimizer
    return GuardedStep(guard, whole_batch, optimizer, own, done, state)


def steps_before(guard: Guard | None, model: keras.Model) -> tf.Tensor | None:
    """Returns how many steps were done, to be read as one begins.

    Optimizers take turns in it. `None` if there is no guard, or the guard asks the
    model's optimizer.
    """
    every = variables.optimizers(model).values()
    if guard is None or not every or not has_own_steps(model):
        return None
    counts = [tf.cast(tf.identity(one.iterations), tf.int64) for one in every]
    return tf.reduce_max(counts)


def state_before(
    guard: Guard | None, model: keras.Model, trace: Trace | None = None
) -> State:
    """Reads what a step of Keras's changes before the optimizer does.

    Args:
        guard: The guard, if there is one.
        model: The model that the step trains.
        trace: The step; without it, all that a step might change is read.

    Returns:
        Variables, each with its value; none if nothing stops the step.
    """
    if guard is None or has_own_steps(model):
        return []
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
