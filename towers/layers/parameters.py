"""Sharded parameters: each device keeps, and updates, a shard of every large variable.

The shards are equally large on each device, and so are their gradients and optimizer
slots. Towers gather the full value from all devices: for each use, forward and
backward, and free it afterwards, as stage 3 of ZeRO (Rajbhandari et al. 2020) and
PyTorch's FSDP (Zhao et al. 2023) do; or once a step, as stage 2 of ZeRO does.

A step is traced with stand-ins for these parameters (`sharded.standing_in`), so that
the trace is that of one device. `partition/gathers.py` gathers values in place of reads
of the stand-ins. The gradients of all towers are reduced on the device of the shard,
where the user's optimizer updates the shard (`sharded.apply`).
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
    """A trainable variable in shards, which towers gather to use the full value.

    Attributes:
        gathered_by_use: Whether a tower gathers the value for each use, not once a
            step.
    """

    stands_in = True
    gathered_by_use = True

    @functools.cached_property
    def stand_in(self) -> tf.Variable:
        """The variable that a step is traced with; it has the shape, but no value."""
        return without_value(self, HOST)


def of(variables: Sequence[keras.Variable]) -> list[ShardedParameter]:
    """Returns the sharded parameters behind some variables."""
    return [
        parameter
        for parameter in map(sharded.of, variables)
        if isinstance(parameter, ShardedParameter)
    ]


def choose(variables: Sequence[keras.Variable], min_bytes: int) -> list[keras.Variable]:
    """Selects the trainable variables to shard.

    Excluded are variables with fewer than `min_bytes` bytes, variables with a
    constraint, which takes the full value, and variables that gradients overwrite.
    """
    return [
        variable
        for variable in variables
        if bytes_of(variable) >= max(min_bytes, 1)
        and variable.constraint is None
        and not variable.overwrite_with_gradient
    ]


def axis_of(variable: keras.Variable) -> int | None:
    """Returns the axis along which a variable is sharded; see `ShardedVariable`.

    A matrix is sharded by rows, as an optimizer may get a gradient of some rows only.
    All other variables are sharded into ranges of the flattened value.
    """
    return 0 if len(variable.shape) == 2 else None


def sizes(variable: keras.Variable, count: int) -> list[int]:
    """Returns the number of rows, or elements, of each of `count` shards of a variable.

    If the sizes differ, the first shards have one more. No shard is empty, so there may
    be fewer than `count`.
    """
    size = variable.shape[0] if axis_of(variable) == 0 else math.prod(variable.shape)
    count = min(count, size)
    return [size // count + (k < size % count) for k in range(count)]


def cut(
    variables: Sequence[keras.Variable],
    devices: Sequence[str],
    optimizer: keras.optimizers.Optimizer | None,
) -> None:
    """Shards variables, and their slots, evenly over devices."""
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
    """Puts each variable, with its slots, in full on one of the devices.

    Optimizers that operate on full variables, such as Muon, need this.
    """
    for variable, k in least_loaded(variables, len(devices)):
        _put(variable, [devices[k]], whole_axis(variable))
        # A slot may have a shape of its own.
        for slot in optimizers.slots_of(optimizer, variable, True) if optimizer else ():
            _cut(slot, [devices[k]], whole_axis(slot))


def whole_axis(variable: keras.Variable) -> int | None:
    """Returns the axis of a single shard that holds a full variable."""
    return 0 if len(variable.shape) else None


def least_loaded(
    variables: Sequence[keras.Variable], count: int
) -> list[tuple[keras.Variable, int]]:
    """Returns variables, the largest first, each with one of `count` owners.

    Each variable goes to the owner with the fewest bytes so far (Graham 1969).
    """
    loads, owned = [0] * count, []
    for variable in sorted(variables, key=bytes_of, reverse=True):
        owner = loads.index(min(loads))
        loads[owner] += bytes_of(variable)
        owned.append((variable, owner))
    return owned


def _put(variable, devices, axis):
    """Makes a variable a sharded parameter on the devices, if it is not yet."""
    _cut(variable, devices, axis)
    parts = value_behind(variable)
    if type(parts) is not ShardedParameter:
        put_behind(variable, ShardedParameter(parts.shards, parts.shape, axis))


def _cut(variable, devices, axis):
    """Shards a variable or a slot over the devices, if it is not sharded alike."""
    if not lies_there(sharded.of(variable), devices, axis):
        sharded.cut(variable, devices, axis)


def lies_there(
    parts: ShardedVariable | None, devices: Sequence[str], axis: int | None
) -> bool:
    """Checks whether a variable is sharded along an axis, over the given devices."""
    return (
        parts is not None
        and parts.axis == axis
        and len(parts.shards) == len(devices)
        and all(
            shard.device.endswith(device)
            for shard, device in zip(parts.shards, devices, strict=True)
        )
    )
