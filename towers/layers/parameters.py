"""Fully sharded parameters: each device keeps a part of every large variable.

The part is as large on each device, and so are its gradient and its optimizer slots. A
tower gathers a parameter from all devices when an operation needs the whole value,
forward and backward, and lets go of it afterwards. That is stage 3 of ZeRO (Rajbhandari
et al. 2020), and PyTorch's FSDP (Zhao et al. 2023).

A step is traced with stand-ins for these parameters (`standing_in`), so that the trace
is that of one device. `partition/gathers.py` puts a gather in the place of each read.
The gradients of all towers are added where a part lives, and the user's optimizer
updates the part there (`sharded.apply`).
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from towers.devices.names import HOST
from towers.keras_adapter import optimizers
from towers.keras_adapter.variables import (
    bytes_of,
    put_behind,
    swapped_values,
    value_behind,
    without_value,
)
from towers.layers import sharded
from towers.layers.sharded_variable import ShardedVariable

MIN_BYTES = 2**14
"""Smaller variables stay whole, and travel together in one buffer."""


class ShardedParameter(ShardedVariable):
    """A trainable variable in parts, which towers gather when they need all of it."""

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


@contextlib.contextmanager
def standing_in(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Inside, the stand-in is behind each of some variables that is sharded."""
    chosen = [v for v in variables if isinstance(sharded.of(v), ShardedParameter)]
    stand_ins = [sharded.of(variable).stand_in for variable in chosen]
    with swapped_values(chosen, stand_ins):
        yield


def choose(model: keras.Model, min_bytes: int) -> list[keras.Variable]:
    """Returns the variables of a built model that are to be sharded.

    Those with fewer than `min_bytes` bytes are left out, and so are those with a
    constraint, which takes the whole value, and those that gradients overwrite.
    """
    return [
        variable
        for variable in model.trainable_variables
        if bytes_of(variable) >= max(min_bytes, 1)
        and variable.constraint is None
        and not variable.overwrite_with_gradient
    ]


def cut(
    variables: Sequence[keras.Variable],
    devices: Sequence[str],
    optimizer: keras.optimizers.Optimizer | None,
) -> None:
    """Divides variables, and the slots that they have, evenly among devices.

    A matrix is cut into rows, as an optimizer may get a gradient of some rows only. All
    else is cut into ranges of the flattened value.
    """
    for variable in variables:
        axis = 0 if len(variable.shape) == 2 else None
        count = min(len(devices), variable.shape[0] if axis == 0 else _size(variable))
        _put(variable, devices[:count], axis, optimizer)


def distribute(
    variables: Sequence[keras.Variable],
    devices: Sequence[str],
    optimizer: keras.optimizers.Optimizer | None,
) -> None:
    """Puts each variable, with its slots, on one device, which has the whole value.

    Optimizers that look at whole variables, such as Muon, need that. The largest
    variable comes first, and each goes to the device that has the fewest bytes so far.
    """
    loads = dict.fromkeys(devices, 0)
    for variable in sorted(variables, key=bytes_of, reverse=True):
        device = min(loads, key=loads.get)
        loads[device] += bytes_of(variable)
        _put(variable, [device], 0 if len(variable.shape) else None, optimizer)


def _put(variable, devices, axis, optimizer):
    """Cuts a variable and its slots into a shard for each device, if they are not."""
    if not _lies_there(sharded.of(variable), devices, axis):
        sharded.cut(variable, devices, axis)
    parts = value_behind(variable)
    if not isinstance(parts, ShardedParameter):
        put_behind(variable, ShardedParameter(parts.shards, parts.shape, axis))
    for slot in optimizers.slots_of(optimizer, variable) if optimizer else ():
        if not _lies_there(sharded.of(slot), devices, axis):
            sharded.cut(slot, devices, axis)


def _lies_there(parts, devices, axis):
    return (
        parts is not None
        and parts.axis == axis
        and len(parts.shards) == len(devices)
        and all(
            shard.device.endswith(device)
            for shard, device in zip(parts.shards, devices, strict=True)
        )
    )


def _size(variable):
    return math.prod(variable.shape)
