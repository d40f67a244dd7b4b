"""The guard stops a training step whose loss or gradient is not finite, and raises.

The graph has one sum over the gradients that are about to be applied, and a branch on
it. As the sum of finite numbers may overflow, the branch checks each number. Where
gradients are sent packed, each tower sums the squares of those that it sends: one
kernel for each buffer, beside the reduction, and only scalars are sent to the host.
`numerics` then searches for the tower, and the tensor in it, that caused the stop.

The check runs before home applies the gradients. A step may have several optimizers:
updates before the check stay. Gradients that home computes itself are not checked.
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

# Smaller tensors are joined: starting a sum over one takes longer than computing it.
_MANY = 2**16
State = Sequence[tuple[tf.Variable, tf.Tensor]]


class StoppedStep(Exception):
    """A training step was stopped, as its loss or gradient is not finite; see `undo`.

    Attributes:
        step: Number of the step, counted from 1 by the optimizer.
        data: Batch of the step; with asynchronous training, a local batch.
        tower: Index of the tower of the local batch, `None` for a global batch.
        skipped: Number of steps that were skipped just before, as their gradients were
            infinite at a larger loss scale.
        blamed: Indices of the towers whose gradients are not finite, if known.
        state: Other variables that the step may have changed, each with its value from
            before.
    """

    def __init__(self, step: int, data: Any, skipped: int = 0):
        super().__init__(f"Step {step} is not finite.")
        self.step, self.data, self.skipped = step, data, skipped
        self.tower: int | None = None
        self.blamed: tuple[int, ...] = ()
        self.state: list[tuple[tf.Variable, tf.Tensor]] = []

    def undo(self) -> None:
        """Restores the variables that the step changed before it was stopped."""
        for variable, value in self.state:
            variable.assign(value)


class Guard:
    """Stops the first training step whose loss or gradient is not finite."""

    def __init__(self) -> None:
        self._stopped: StoppedStep | None = None
        self._armed = True
        # The last step that was skipped, and the number of times.
        self._skipped = 0, 0

    @contextlib.contextmanager
    def disarmed(self) -> Iterator[None]:
        """Inside, no step is stopped: the caller tries steps, and undoes them."""
        self._armed = False
        try:
            yield
        finally:
            self._armed = True

    @contextlib.contextmanager
    def raises(self) -> Iterator[None]:
        """Inside, a stopped step raises `StoppedStep`."""
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
        """Inside, no operation of a stopped step runs.

        A stopped step raises a `tf.errors.OutOfRangeError`. Yields a boolean that is
        computed only if the step is not stopped.

        Args:
            data: Returns the global batch: a nest of tensors.
            loss: Loss of the batch, a scalar.
            gradients: Scaled gradients of the trainable variables: a list for each
                device, which together have all gradients.
            optimizer: The optimizer that is to apply the gradients.
            packed: The packed buffers of these gradients, to check in their place.
            of_towers: The gradients of each tower, to name the towers whose gradients
                are not finite.
            done: Number of steps done before this one. By default, the optimizer's
                iterations.
            state: Other variables that the step may change, each with its value from
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
        """Sets the tower of a stopped step, unless it is set."""
        if self._stopped is not None and self._stopped.tower is None:
            self._stopped.tower = tower

    def _stop(self, skips, data, optimizer, done, blamed, state):
        """Passes the tensors of a step that is not finite to `_catch`."""
        data, parts = data(), [*map(_joined, blamed)]
        fine = tf.stack([finite(part) if part else True for part in parts] or [True])
        some = tf.nest.map_structure(lambda tensor: tensor is not None, data)
        tensors = [tensor for tensor in tf.nest.flatten(data) if tensor is not None]
        changed = [variable for variable, _ in state]
        catch = functools.partial(self._catch, optimizer, some, changed)
        with tf.device(HOST):
            # Less than 0: `_catch` reads the optimizer's iterations.
            done = -1 if done is None else done
            values = [value for _, value in state]
            inputs = [skips, done, fine, *values, *tensors]
            goes_on = tf.py_function(catch, inputs, tf.bool)
            return tf.ensure_shape(goes_on, [])

    def _catch(self, optimizer, some, changed, skips, done, fine, *tensors):
        """Records a step that is not finite, and stops it unless it may continue."""
        if not self._armed:
            return True
        if done < 0:
            done = 0 if optimizer is None else optimizer.iterations
        step = int(done) + 1
        # The optimizer does not count a skipped step.
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
        # TensorFlow takes this error alone for the end of data, without a warning.
        raise StopIteration("A step is not finite.")


def _joined(gradients):
    """Packs small gradients into fewer tensors, on the device of each."""
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
    """Returns whether the sum of all numbers is finite: one pass over each tensor.

    If it is, each number is; if not, the sum alone may have overflowed. The tensors are
    of floating types, and each is summed on its device.
    """
    wide = tf.float64 if any(t.dtype == tf.float64 for t in tensors) else tf.float32
    sums = []
    for tensor in tensors:
        with tf.device(tensor.device):
            sums.append(tf.reduce_sum(tf.cast(tensor, wide)))
    with tf.device(tensors[0].device):
        return tf.math.is_finite(tf.add_n(sums))


def sums_are_finite(towers: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns whether the sum over towers is finite for each number of a buffer.

    If True, all sums are finite: no sum is larger than the square root of the number of
    towers times all squares. If False, the squares alone may have overflowed.
    """
    dtype = towers[0].dtype
    halves = []
    for buffer in towers:
        with tf.device(buffer.device):
            # `l2_loss` reads the buffer once and writes one number, half the squares.
            halves.append(tf.nn.l2_loss(_wide(buffer)))
    with tf.device(HOST):
        total = tf.add_n(halves)
        limit = float(dtype.max) * float(dtype.max) / (2 * len(towers))
        # Both infinity and NaN compare as False.
        return total < min(limit, float(total.dtype.max))


def finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns whether each number is finite: two passes over each tensor."""
    of_tensors = []
    for tensor in tensors:
        with tf.device(tensor.device):
            of_tensors.append(tf.reduce_all(tf.math.is_finite(tensor)))
    return tf.reduce_all(of_tensors)


def _wide(tensor):
    return tensor if tensor.dtype == tf.float64 else tf.cast(tensor, tf.float32)


def _may_overflow(optimizer):
    """Returns whether loss scaling may make gradients infinite, which is no fault."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return tf.constant(False)
    # The scale is halved at each such step; a faulty step remains not finite.
    return optimizer.scale_loss(tf.ones([])) > 1


# A training step as the guard sees it.
#
# The guard asks the model and its batch for three things: the number of steps done, the
# variables that change before an optimizer applies gradients, and that optimizer.


@dataclasses.dataclass(frozen=True)
class GuardedStep:
    """A training step that stops before it uses a gradient that is not finite.

    Attributes:
        guard: Stops the step.
        whole_batch: Returns the global batch, also if this host reads only its rows.
        optimizer: The optimizer whose loss scale may make gradients infinite; `None` if
            there is none.
        own: Whether the model defines its own steps. Then its loss is not known, and
            the guard names the towers whose gradients are not finite; for Keras's own
            step, `numerics` searches for the cause.
        done: Number of steps done before; `None` to read the optimizer's iterations.
        state: Variables to restore if the step is stopped; see `Guard.before`.
    """

    guard: Guard
    whole_batch: Callable[[], Any]
    optimizer: keras.optimizers.Optimizer | None
    own: bool
    done: tf.Tensor | None = None
    state: State = ()

    @property
    def reads_losses(self) -> bool:
        """Whether the guard checks the losses, too."""
        return not self.own

    def before(
        self, gradients: Gradients
    ) -> contextlib.AbstractContextManager[tf.Tensor]:
        """Returns the context in which gradients are used; see `Guard.before`."""
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
    """Returns a training step as the guard sees it; `None` without a guard.

    Args:
        guard: The guard, if there is one.
        model: The model that the step trains.
        whole_batch: Returns the global batch, also if this host reads only its rows.
        done: The result of `steps_before` at the start of the step.
        state: The result of `state_before` at the start of the step.
    """
    if guard is None:
        return None
    own = has_own_steps(model)
    if own:
        scaled = keras.optimizers.LossScaleOptimizer
        candidates = variables.optimizers(model).values()
        optimizer = next((o for o in candidates if isinstance(o, scaled)), None)
    else:
        optimizer = model.optimizer
    return GuardedStep(guard, whole_batch, optimizer, own, done, state)


def steps_before(guard: Guard | None, model: keras.Model) -> tf.Tensor | None:
    """Returns the number of steps done; call it at the start of a step.

    It is the largest count of all optimizers, which may take turns. Returns `None`
    without a guard, or if the guard reads the iterations of the model's optimizer.
    """
    optimizers_of_model = variables.optimizers(model).values()
    if guard is None or not optimizers_of_model or not has_own_steps(model):
        return None
    counts = [
        tf.cast(tf.identity(optimizer.iterations), tf.int64)
        for optimizer in optimizers_of_model
    ]
    return tf.reduce_max(counts)


def state_before(
    guard: Guard | None, model: keras.Model, trace: Trace | None = None
) -> State:
    """Reads the variables that Keras's own step changes before the optimizer does.

    Args:
        guard: The guard, if there is one.
        model: The model that the step trains.
        trace: The traced step; without it, all variables that a step might change are
            read.

    Returns:
        Variables, each with its value; empty if nothing can stop the step.
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
    """Returns the TensorFlow variables of Keras variables: all shards of a cut one."""
    return [value for variable in every for value in sharded.places(variable)]
