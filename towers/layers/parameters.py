"""Parameters in parts: each device keeps, and updates, a part of every large variable.

The part is as large on each device, and so are its gradient and its optimizer slots.
Towers gather the whole value from all devices: for each use, forward and backward, and
let go of it afterwards, as stage 3 of ZeRO (Rajbhandari et al. 2020) and PyTorch's FSDP
(Zhao et al. 2023) do; or once in a step, as ZeRO's second stage does.

A step is traced with stand-ins for these parameters (`sharded.standing_in`), so that
the trace is that of one device. `partition/gathers.py` gathers values in place of what
the stand-ins have. The gradients of all towers are added where a part lives, and the
user's optimizer updates the part there (`sharded.apply`).
"""

import functools
import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from towers.devices.names import HOST
from towers.keras_adapter import optimizers
from towers.keras_adapter.variables import (
    bytes_of,
    put_behind,
    value_behind,
    without_value,
)
from towers.layers import sharded
from towers.layers.sharded import ShardedVariable

MIN_BYTES = 2**14
"""Smaller variables stay whole, and travel together in one buffer."""


class ShardedParameter(ShardedVariable):
    """A trainable variable in parts, which towers gather when they need all of it.

    Attributes:
        gathered_by_use: Whether a tower gathers it for each use, not once in a step.
    """

    stands_in = True
    gathered_by_use = True

    @functools.cached_property
    def stand_in(self) -> tf.Variable:
        """The variable that a step is traced with: it has the shape, and no value."""
        return without_value(self, HOST)


def of(variables: Sequence[keras.Variable]) -> list[ShardedParameter]:
    """Returns the sharded parameters behind some variables."""
    return [
        parameter
        for parameter in map(sharded.of, variables)
        if isinstance(parameter, ShardedParameter)
    ]


def choose(variables: Sequence[keras.Variable], min_bytes: int) -> list[keras.Variable]:
    """Returns those of some trainable variables that are to be sharded.

    Those with fewer than `min_bytes` bytes are left out, and so are those with a
    constraint, which takes the whole value, and those that gradients overwrite.
    """
    return [
        variable
        for variable in variables
        if bytes_of(variable) >= max(min_bytes, 1)
        and variable.constraint is None
        and not variable.overwrite_with_gradient
    ]


def axis_of(variable: keras.Variable) -> int | None:
    """Returns how a variable is cut; see `ShardedVariable`.

    A matrix is cut into rows, as an optimizer may get a gradient of some rows only. All
    else is cut into ranges of the flattened value.
    """
    return 0 if len(variable.shape) == 2 else None


def sizes(variable: keras.Variable, count: int) -> list[int]:
    """Returns how many rows, or numbers, each of `count` parts of a variable has.

    The first ones have one more, if they are not as large. None is empty, so there may
    be fewer of them.
    """
    whole = variable.shape[0] if axis_of(variable) == 0 else math.prod(variable.shape)
    count = min(count, whole)
    return [whole // count + (k < whole % count) for k in range(count)]


def cut(
    variables: Sequence[keras.Variable],
    devices: Sequence[str],
    optimizer: keras.optimizers.Optimizer | None,
) -> None:
    """Divides variables, and the slots that they have, evenly among devices."""
    for variable in variables:
        axis, count = axis_of(variable), len(sizes(variable, len(devices)))
        _put(variable, devices[:count], axis)
        for slot in optimizers.slots_of(optimizer, variable) if optimizer else ():
            _cut(slot, devices[:count], axis)


def distribute(
    variables: Sequence[keras.Variable],
    devices: Sequence[str],
    optimizer: keras.optimizers.Optimizer | None,
) -> None:
    """Puts each variable, with its slots, on one device, which has the whole value.

    Optimizers that look at whole variables, such as Muon, need that.
    """
    for variable, k in least_loaded(variables, len(devices)):
        _put(variable, [devices[k]], whole_axis(variable))
        # The shape of a slot may be another one.
        for slot in optimizers.slots_of(optimizer, variable, True) if optimizer else ():
            _cut(slot, [devices[k]], whole_axis(slot))


def whole_axis(variable: keras.Variable) -> int | None:
    """Returns the axis of a single shard that is a whole variable."""
    return 0 if len(variable.shape) else None


def least_loaded(
    variables: Sequence[keras.Variable], count: int
) -> list[tuple[keras.Variable, int]]:
    """Returns variables, the largest first, each with one of `count` owners.

    Each goes to the owner that has the fewest bytes so far (Graham 1969).
    """
    loads, owned = [0] * count, []
    for variable in sorted(variables, key=bytes_of, reverse=True):
        owner = loads.index(min(loads))
        loads[owner] += bytes_of(variable)
        owned.append((variable, owner))
    return owned


def _put(variable, devices, axis):
    """Has a variable be a parameter with a shard on each device, if it is not."""
    _cut(variable, devices, axis)
    parts = value_behind(variable)
    if type(parts) is not ShardedParameter:
        put_behind(variable, ShardedParameter(parts.shards, parts.shape, axis))


def _cut(variable, devices, axis):
    """Cuts a variable, or a slot, into a shard for each device, if it is not."""
    if not lies_there(sharded.of(variable), devices, axis):
        sharded.cut(variable, devices, axis)


def lies_there(
    parts: ShardedVariable | None, devices: Sequence[str], axis: int | None
) -> bool:
    """Tells whether a variable is cut along an axis, with a shard on each device."""
    return (
        parts is not None
        and parts.axis == axis
        and len(parts.shards) == len(devices)
        and all(
            shard.device.endswith(device)
            for shard, device in zip(parts.shards, devices, strict=True)
        )
    )
