"""Parameters whose parts, and the optimizer's slots for them, hosts update separately.

Each host has all parts of a parameter on its own devices: towers gather the value
without communication between hosts. The gradient of a part is sent to the host that
updates the part, and the updated part is sent back to all hosts (`share`), as in the
first stage of ZeRO (Rajbhandari et al. 2020).
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.collectives.spread.variable import Part, SpreadVariable
from towers.collectives.world import World
from towers.devices.names import HOST
from towers.keras_adapter import optimizers
from towers.keras_adapter.variables import (
    put_behind,
    value_behind,
    variable_like,
)
from towers.layers import parameters, sharded
from towers.layers.parameters import ShardedParameter


class SpreadParameter(ShardedParameter):
    """A parameter whose parts are on each host; each host updates some of them.

    Attributes:
        parts: The parts that each host updates, in order.
        hosts: The hosts.
    """

    elsewhere = updated_once = True

    def __init__(
        self,
        shards: Sequence[tf.Variable],
        shape: Sequence[int],
        axis: int | None,
        parts: Sequence[Sequence[Part]],
        hosts: World,
    ):
        """Takes the shards of all parts; see `ShardedVariable` for other arguments."""
        super().__init__(shards, shape, axis)
        self.parts, self.hosts = parts, hosts
        ends = [*itertools.accumulate(map(len, parts), initial=0)]
        self._updated = slice(ends[hosts.index], ends[hosts.index + 1])

    @property
    def updated(self) -> Sequence[tf.Variable]:
        """The shards that this host updates; see `ShardedVariable`."""
        return self.shards[self._updated]

    def alike(self, shards: Sequence[tf.Variable], like: Any) -> SpreadVariable:
        """Makes a slot of the same parts; see `ShardedVariable`."""
        return SpreadVariable(shards, self.shape, self.parts, self.hosts, like)

    def gradients_of(self, gradient: Any) -> list[Any]:
        """Returns `None` for each part, then the gradient; see `ShardedVariable`."""
        return [None] * len(self.updated) + [gradient]

    def whole_gradient(self, parts: Sequence[Any]) -> Any:
        """Returns the gradient of the whole parameter; see `ShardedVariable`."""
        return parts[-1]

    def is_given(self, gradient: Any) -> bool:
        """Returns whether `give` sends a gradient to owners, instead of all-reduce.

        Sparse gradients are all-reduced, as their rows may belong to any host.
        """
        return isinstance(gradient, tf.Tensor)

    @staticmethod
    def give(
        hosts: World, spread: Sequence["SpreadParameter"], gradients: Sequence[Any]
    ) -> list[list[Any]]:
        """Sends gradients to the hosts that update the parts; see `give`."""
        return give(hosts, spread, gradients)

    def parts_of(self, gradient: tf.Tensor | tf.IndexedSlices) -> list[Any]:
        """Cuts a sum that all hosts have into the gradients of this host's parts.

        Returns:
            The gradients, and the norm of the gradients that other hosts apply.
        """
        gradients = self.split(gradient)
        own, others = gradients[self._updated], [*gradients]
        del others[self._updated]
        return [*own, _norm_of(others)]


def _norm_of(gradients):
    """Returns the norm of several gradients, dense or sparse; see `sharded.norm`."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    flat = [tf.cast(tf.reshape(value, [-1]), tf.float32) for value in values]
    # Appends a zero, as the maximum of an empty tensor is not finite.
    return sharded.norm(tf.concat([*flat, tf.zeros([1])], 0))


def cut(
    variables: Sequence[keras.Variable],
    devices: Sequence[str],
    replicas: Sequence[int],
    hosts: World,
    optimizer: keras.optimizers.Optimizer | None,
) -> None:
    """Divides variables, and their slots, evenly among the towers of all hosts.

    All hosts call it together.

    Args:
        variables: The variables.
        devices: The device of each of this host's towers.
        replicas: Number of towers of each host.
        hosts: The hosts.
        optimizer: The optimizer that has slots of the variables, if any.
    """
    for variable in variables:
        axis = parameters.axis_of(variable)
        row = math.prod(variable.shape[1:]) if axis == 0 else 1
        ends = itertools.accumulate(
            parameters.sizes(variable, sum(replicas)), initial=0
        )
        parts = [
            Part(k, start * row, end * row, _shape(variable, axis, end - start))
            for k, (start, end) in enumerate(itertools.pairwise(ends))
        ]
        _put(variable, axis, _by_host(parts, replicas), devices, hosts, optimizer)


def distribute(
    variables: Sequence[keras.Variable],
    devices: Sequence[str],
    replicas: Sequence[int],
    hosts: World,
    optimizer: keras.optimizers.Optimizer | None,
) -> None:
    """Assigns each variable to one tower of all hosts; see `parameters.distribute`."""
    for variable, owner in parameters.least_loaded(variables, sum(replicas)):
        axis, size = parameters.whole_axis(variable), math.prod(variable.shape)
        shape = tuple(variable.shape) or (1,)
        parts = _by_host([Part(owner, 0, size, shape)], replicas)
        _put(variable, axis, parts, devices, hosts, optimizer)


def _shape(variable, axis, size):
    return (size, *variable.shape[1:]) if axis == 0 else (size,)


def _by_host(parts, replicas):
    """Groups parts by the hosts of the towers that own them."""
    ends = itertools.pairwise(itertools.accumulate(replicas, initial=0))
    return [[part for part in parts if a <= part.owner < b] for a, b in ends]


def _put(variable, axis, parts, devices, hosts, optimizer):
    """Cuts a variable and its slots, unless they are cut that way already."""
    first = sum(1 for _ in itertools.chain(*parts[: hosts.index]))
    all_parts = [*itertools.chain(*parts)]
    # Parts that other hosts update are on this host's devices in turn.
    owned = [devices[(k - first) % len(devices)] for k in range(len(all_parts))]
    old, slots = value_behind(variable), ()
    if not (
        isinstance(old, SpreadParameter)
        and (old.parts, old.hosts) == (parts, hosts)
        and parameters.lies_there(old, owned, axis)
    ):
        sharded.cut(variable, owned, axis, sizes=[part.shape[0] for part in all_parts])
        cuts = value_behind(variable)
        new = SpreadParameter(cuts.shards, cuts.shape, axis, parts, hosts)
        put_behind(variable, new)
    if optimizer is not None:
        # A slot of another shape is placed only if the variable is in one part.
        slots = optimizers.slots_of(optimizer, variable, len(all_parts) == 1)
    for slot in slots:
        _put_slot(slot, value_behind(variable))


def _put_slot(slot, parameter):
    """Gives each host the parts of a slot that it updates, unless it has them."""
    old, hosts, parts = value_behind(slot), parameter.hosts, parameter.parts
    devices = [shard.device for shard in parameter.updated]
    if slot.shape != parameter.shape:
        shape = tuple(slot.shape) or (1,)
        parts = [
            [Part(part.owner, 0, math.prod(shape), shape) for part in of_host]
            for of_host in parts
        ]
    if (
        isinstance(old, SpreadVariable)
        and (old.parts, old.hosts) == (parts, hosts)
        and [shard.device for shard in old.shards] == devices
    ):
        return
    value = old.numpy()
    if not isinstance(old, SpreadVariable):
        # A host that has just joined may lack earlier values.
        (value,) = hosts.broadcast([tf.constant(value)], "optimizer state")
        value = value.numpy()
    flat = value.reshape(-1)
    shards = [
        variable_like(flat[part.start : part.stop].reshape(part.shape), device, old)
        for part, device in zip(parts[hosts.index], devices, strict=True)
    ]
    put_behind(slot, SpreadVariable(shards, value.shape, parts, hosts, old))


def give(
    hosts: World,
    spread: Sequence[SpreadParameter],
    gradients: Sequence[tf.Tensor],
) -> list[list[tf.Tensor]]:
    """Sends gradients to the hosts that update the parts; all hosts call it together.

    Args:
        hosts: The hosts.
        spread: The parameters.
        gradients: This host's whole, dense gradient of each parameter.

    Returns:
        For each parameter, the sums over hosts for the parts that this host updates,
        and the norm of the sums for all other parts.
    """
    with tf.device(HOST), tf.name_scope("give"):
        sent = [[] for _ in range(hosts.count)]
        for parameter, gradient in zip(spread, gradients, strict=True):
            values = iter(parameter.split(gradient))
            for of_host, parts in zip(sent, parameter.parts, strict=True):
                of_host += itertools.islice(values, len(parts))
        received = iter(hosts.reduce_scatter(sent, "parts of gradients"))
        sums = [
            [
                tf.reshape(next(received), part.shape)
                for part in parameter.parts[hosts.index]
            ]
            for parameter in spread
        ]
        own = [_norm_of(parts) for parts in sums]
        norms = hosts.stack(tf.stack(own), "norms of gradients")
        others = tf.concat([norms[: hosts.index], norms[hosts.index + 1 :]], 0)
        return [[*parts, sharded.norm(others[:, k])] for k, parts in enumerate(sums)]


def share(hosts: World, changed: Sequence[SpreadParameter]) -> None:
    """Sends the parts that each host has updated to all; all hosts call it together.

    Args:
        hosts: The hosts.
        changed: The parameters that were updated.
    """
    like = [
        [
            tf.TensorSpec(part.shape, parameter.dtype)
            for parameter in changed
            for part in parameter.parts[k]
        ]
        for k in range(hosts.count)
    ]
    with tf.device(HOST):
        own = [
            tf.convert_to_tensor(shard)
            for parameter in changed
            for shard in parameter.updated
        ]
        received = [*map(iter, hosts.gather_parts(own, like, "updated parameters"))]
    for parameter in changed:
        values = [
            next(of_host)
            for of_host, parts in zip(received, parameter.parts, strict=True)
            for _ in parts
        ]
        own = {*map(id, parameter.updated)}
        for shard, value in zip(parameter.shards, values, strict=True):
            if id(shard) not in own:
                with tf.device(shard.device):
                    shard.assign(value)
