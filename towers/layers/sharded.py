"""Sharded variables: one variable to Keras, in shards on several devices.

A `ShardedVariable` stands behind a `keras.Variable` in place of its `tf.Variable`:
`cut` puts it there, and behind the optimizer slots of the variable. A read returns the
full value, in host memory; an assignment gives each shard its part. Files and
checkpoints are therefore the same as without shards. The name and the idea are those of
TensorFlow's `ShardedVariable`, which Keras does not accept.

The user's own optimizer is applied to shards (`apply`): each shard is a variable with a
gradient of its own. While a device's shards are updated, they stand behind the
`keras.Variable`s, as do those of their slots. Each operation therefore runs on the
device of the shard. This is correct for elementwise optimizers, which `why_not_cut`
checks, and for norms of gradients, which are computed over all shards.

    cut(table, ["/device:CPU:0", "/device:CPU:1"], axis=0)
    with slots_like_variables():
        optimizer.build(variables)           # slots are created in shards
    gradients = [first, second, of_bias]     # one for each of `targets([table, bias])`
    apply(optimizer, gradients, [table, bias])

New `tf.Variable`s stand behind the `keras.Variable`s after `cut`: earlier traces refer
to the old ones.

A tape differentiates with respect to the shards of a table: the gradient's rows go
straight to their device. A gradient that the user sees is joined, and split again for
the optimizer (`gradient`).
"""

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.devices.names import HOST
from towers.keras_adapter import optimizers
from towers.keras_adapter.layers import is_keras_own
from towers.keras_adapter.optimizers import ADD_SLOT
from towers.keras_adapter.patching import patched
from towers.keras_adapter.variables import (
    put_behind,
    swapped_values,
    take_identity,
    value_behind,
    variable_like,
)

# The name scope of operations that join the full value of shards in a graph.
WHOLE_SCOPE = "whole_of_shards"


class ShardedVariable:
    """A value in shards on several devices, behind a `keras.Variable`.

    Attributes:
        shards: A `tf.Variable` for each device, in order.
        shape: The shape of the full value.
        axis: The sharded axis: 0 for rows, 1 for columns, `None` for ranges of the
            flattened value, each a shard of rank 1.
        ends: The end of each shard on the axis, or in the flattened value.
        elsewhere: Whether other hosts update shards, too, whose gradients have a
            substitute here; see `sharded.targets`.
        across_hosts: Whether several hosts have shards, as in a `SpreadVariable`.
        stands_in: Whether a step is traced with a `stand_in` in its place.
        updated_once: Whether each of several hosts applies the optimizer once a step,
            not once for each of its copies of other variables.
    """

    elsewhere = across_hosts = stands_in = updated_once = False

    def __init__(
        self, shards: Sequence[tf.Variable], shape: Sequence[int], axis: int | None
    ):
        self.shards, self.axis = tuple(shards), axis
        self.shape = tf.TensorShape(shape)
        sizes = [shard.shape[axis or 0] for shard in self.shards]
        self.ends = tuple(itertools.accumulate(sizes))
        first = self.shards[0]
        self.dtype, self.name, self.trainable = first.dtype, first.name, first.trainable
        # The optimizer identifies the variable and each shard by the same key.
        take_identity(self, first)

    @property
    def updated(self) -> Sequence[tf.Variable]:
        """The shards that this host updates."""
        return self.shards

    @property
    def starts(self) -> tuple[int, ...]:
        """The start of each shard; see `ends`."""
        return (0, *self.ends[:-1])

    @property
    def device(self) -> str:
        """The device of the first shard."""
        return self.shards[0].device

    @property
    def _shared_name(self) -> str:
        # TensorFlow's checkpoints ask for this name, and Keras for that of its value.
        return self.name.partition(":")[0]

    def split(self, value: Any) -> list[Any]:
        """Splits a full value, or a gradient, by shards, on its own device.

        Args:
            value: An array, a tensor, or `tf.IndexedSlices`. The slices of a shard have
                row indices, or flat indices, relative to the shard.
        """
        if isinstance(value, tf.IndexedSlices):
            return self._split_rows(value)
        if self.axis is None:
            value = value.reshape(-1) if _is_array(value) else tf.reshape(value, [-1])
        bounds = zip(self.starts, self.ends, strict=True)
        columns = (slice(None),) * (self.axis or 0)
        return [value[(*columns, slice(start, end))] for start, end in bounds]

    def _split_rows(self, gradient):
        # Duplicate indices are kept, as optimizers square each row by itself.
        values, indices = gradient.values, gradient.indices
        if self.axis is None:
            row = math.prod(self.shape[1:])
            indices = indices[:, tf.newaxis] * row + tf.range(row, dtype=indices.dtype)
            values, indices = tf.reshape(values, [-1]), tf.reshape(indices, [-1])
        if self.axis == 1:
            return [
                _slices(part, indices, shard)
                for part, shard in zip(self.split(values), self.shards, strict=True)
            ]
        owners, count = self.owners(indices), len(self.shards)
        values = tf.dynamic_partition(values, owners, count)
        indices = tf.dynamic_partition(indices, owners, count)
        return [
            _slices(*part_of_shard, shard)
            for *part_of_shard, shard in zip(
                values,
                (
                    owned - start
                    for owned, start in zip(indices, self.starts, strict=True)
                ),
                self.shards,
                strict=True,
            )
        ]

    def whole_gradient(self, parts: Sequence[Any]) -> Any:
        """Joins gradients of the shards to a gradient of the full value.

        Args:
            parts: The result of `gradients_of` for a gradient, or the sum of several
                such results.
        """
        if self.axis is None or not isinstance(parts[0], tf.IndexedSlices):
            joined = tf.concat([*map(tf.convert_to_tensor, parts)], self.axis or 0)
            return joined if self.axis is not None else tf.reshape(joined, self.shape)
        values = tf.concat([part.values for part in parts], self.axis)
        indices = parts[0].indices
        if self.axis == 0:
            starts = zip(parts, self.starts, strict=True)
            indices = tf.concat([part.indices + start for part, start in starts], 0)
        shape = tf.constant(self.shape.as_list(), indices.dtype)
        return tf.IndexedSlices(values, indices, shape)

    def gradients_of(self, gradient: Any) -> list[Any]:
        """Splits a gradient of the full value for each of `sharded.targets`."""
        return self.split(gradient)

    def alike(self, shards: Sequence[tf.Variable], like: Any) -> "ShardedVariable":
        """Returns a variable that is sharded and updated as this one is.

        Args:
            shards: The shards of the result: one for each of `updated`.
            like: A variable that has the name and type of the result.
        """
        del like
        return ShardedVariable(shards, self.shape, self.axis)

    def look_up(self, ids: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Looks up rows on the devices of the shards.

        Args:
            ids: A vector of row indices, from 0.

        Returns:
            For each shard, its rows, or its columns of all rows, and the row indices
            relative to the shard. `join` joins the rows.
        """
        ids_of_shards = [ids] * len(self.shards)
        if self.axis == 0 and len(self.shards) > 1:
            ids_of_shards = tf.dynamic_partition(
                ids, self.owners(ids), len(self.shards)
            )
        results = []
        for shard, local_ids, start in zip(
            self.shards, ids_of_shards, self.starts, strict=True
        ):
            with tf.device(shard.device):
                local_ids = (
                    local_ids - start
                    if self.axis == 0 and start
                    else tf.identity(local_ids)
                )
                results.append((tf.gather(shard, local_ids), local_ids))
        return results

    def join(self, ids: tf.Tensor, rows: Sequence[tf.Tensor]) -> tf.Tensor:
        """Joins looked-up rows in the order of their ids, on the current device.

        Args:
            ids: The argument of `look_up`.
            rows: The rows that `look_up` returned.
        """
        if len(rows) == 1:
            return rows[0]
        if self.axis == 1:
            return tf.concat(rows, axis=1)
        positions = tf.range(tf.size(ids))
        return tf.dynamic_stitch(
            tf.dynamic_partition(positions, self.owners(ids), len(self.shards)), rows
        )

    def look_up_alike(self, ids: tf.Tensor) -> tf.Tensor:
        """Looks up rows without shapes that depend on the ids.

        Each shard looks up one row for each id, and the owner's row is selected.

        Args:
            ids: A vector of row indices, from 0.
        """
        owners, last, rows = self.owners(ids), len(self.shards) - 1, None
        for i, (shard, start, end) in enumerate(
            zip(self.shards, self.starts, self.ends, strict=True)
        ):
            with tf.device(shard.device):
                local_ids = ids - start
                # An id out of range must remain an error.
                local_ids = tf.maximum(local_ids, 0) if i > 0 else local_ids
                local_ids = (
                    tf.minimum(local_ids, end - start - 1) if i < last else local_ids
                )
                shard_rows = tf.gather(shard, local_ids)
            rows = (
                shard_rows
                if i == 0
                else tf.where((owners == i)[:, None], shard_rows, rows)
            )
        return rows

    def owners(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns, in int32, the index of the shard that owns each row."""
        beyond = [tf.cast(rows >= end, tf.int32) for end in self.ends[:-1]]
        return functools.reduce(tf.add, beyond or [tf.zeros_like(rows, tf.int32)])

    def assign(self, value: Any, **_: Any) -> None:
        """Assigns each shard its part of a full value."""
        _change(self, "assign", value)

    def assign_add(self, value: Any) -> None:
        """Adds a value, which may be sharded alike, to the shards."""
        self.assign(_whole(self) + _whole(value))

    def assign_sub(self, value: Any) -> None:
        """Subtracts a value, which may be sharded alike, from the shards."""
        self.assign(_whole(self) - _whole(value))

    def numpy(self) -> np.ndarray:
        """Returns the full value."""
        value = np.concatenate([shard.numpy() for shard in self.shards], self.axis or 0)
        return value.reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy().astype(dtype or self.dtype.as_numpy_dtype, copy=False)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        # The full value may not fit on the device that reads it.
        with tf.device(HOST), tf.name_scope(WHOLE_SCOPE):
            value = self.joined([*map(tf.convert_to_tensor, self.shards)])
            return tf.cast(value, dtype or self.dtype)

    def joined(self, values: Sequence[Any]) -> tf.Tensor:
        """Joins the values of all shards, on the current device."""
        joined = values[0]
        if len(values) > 1:
            joined = tf.concat([*values], axis=self.axis or 0)
        return tf.reshape(joined, self.shape) if self.axis is None else joined

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": tf.convert_to_tensor(self)}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self.assign(restored["VARIABLE_VALUE"])


def _slices(values, places, shard):
    shape = tf.constant(shard.shape.as_list(), places.dtype)
    return tf.IndexedSlices(values, places, shape)


def _change(variable, name, value):
    """Calls a method of each shard with its part of a full value, on its device."""
    with tf.device(HOST):
        parts = variable.split(value)
    for shard, part in zip(variable.shards, parts, strict=True):
        with tf.device(shard.device):
            getattr(shard, name)(part)


# Methods by which Keras changes rows.
for _name in ("scatter_add", "scatter_sub", "scatter_update"):
    setattr(ShardedVariable, _name, functools.partialmethod(_change, _name))


def _operator(name):
    def of_value(self, *others):
        return getattr(tf.convert_to_tensor(self), name)(*others)

    return of_value


# Operators that Keras's own variables compute from `value`.
for _name in ("__getitem__", "__neg__", "__abs__", "__mul__", "__add__", "__sub__"):
    setattr(ShardedVariable, _name, _operator(_name))


def _whole(value):
    """Returns a value in host memory."""
    with tf.device(HOST):
        return tf.convert_to_tensor(value)


def _is_array(value):
    return isinstance(value, np.ndarray)


# Methods that a user's optimizer may override: they see one variable at a time, or no
# gradient.
_OF_ONE_VARIABLE = {"build", "from_config", "get_config", "update_step", "variables"}


def of(variable: keras.Variable) -> ShardedVariable | None:
    """Returns the sharded variable behind a variable, if any."""
    if isinstance(variable, tf.Variable):
        # The variable of a training loop without Keras's layers.
        return None
    value = value_behind(variable)
    return value if isinstance(value, ShardedVariable) else None


def places(variable: keras.Variable) -> list[tf.Variable]:
    """Returns the `tf.Variable`s behind a variable: one, or the shards."""
    if isinstance(variable, tf.Variable):
        # The variable of a training loop without Keras's layers.
        return [variable]
    sharded = of(variable)
    return [value_behind(variable)] if sharded is None else [*sharded.shards]


def updated_places(variable: keras.Variable) -> Sequence[tf.Variable]:
    """Returns those of `places` that this host updates."""
    parts = of(variable)
    return places(variable) if parts is None else parts.updated


def across_hosts(variable: keras.Variable) -> bool:
    """Checks whether several hosts have shards of a variable."""
    parts = of(variable)
    return parts is not None and parts.across_hosts


def updated_by_hosts(variables: Sequence[keras.Variable]) -> dict[int, Any]:
    """Returns sharded variables that other hosts update, too, by their indices."""
    numbered = enumerate(map(of, variables))
    return {i: parts for i, parts in numbered if parts is not None and parts.elsewhere}


def stand_ins(variables: Sequence[keras.Variable]) -> dict[int, ShardedVariable]:
    """Returns the sharded variables that a step reads by stand-ins.

    The keys are the `id`s of the stand-ins' handles.
    """
    parts = [part for part in map(of, variables) if part is not None and part.stands_in]
    return {id(part.stand_in.handle): part for part in parts}


@contextlib.contextmanager
def standing_in(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Puts the stand-ins behind variables that have one, within the context."""
    chosen = [v for v in variables if (parts := of(v)) is not None and parts.stands_in]
    with swapped_values(chosen, [of(variable).stand_in for variable in chosen]):
        yield


def cut(
    variable: keras.Variable,
    devices: Sequence[str],
    axis: int | None,
    sizes: Sequence[int] = (),
) -> None:
    """Shards a variable, or a slot of an optimizer.

    The value is read on the host, and only the shards go to devices.

    Args:
        variable: A variable that has a value.
        devices: The devices of the shards, in order. A variable with fewer rows, or
            columns, has that many shards.
        axis: See `ShardedVariable`.
        sizes: How many rows, columns or elements each shard has; by default equally
            many.
    """
    old = value_behind(variable)
    value = old.numpy()
    size = value.size if axis is None else value.shape[axis]
    parts = np.array_split(
        value.reshape(-1) if axis is None else value,
        [*itertools.accumulate(sizes)][:-1] if sizes else min(len(devices), size),
        axis=axis or 0,
    )
    shards = [
        variable_like(part, device, old)
        for part, device in zip(parts, devices, strict=False)
    ]
    put_behind(variable, ShardedVariable(shards, value.shape, axis))


def join(variable: keras.Variable, device: str) -> None:
    """Puts the full value of a sharded variable in a `tf.Variable` on a device."""
    cut_up = value_behind(variable)
    put_behind(variable, variable_like(cut_up.numpy(), device, cut_up))


def join_slots(
    optimizer: keras.optimizers.Optimizer, home_of: Callable[[keras.Variable], str]
) -> None:
    """Joins sharded slots of variables that are not sharded themselves."""
    for leaf in optimizers.updating(optimizer):
        known = optimizers.known_variables(leaf)
        for variable, slots in zip(known, optimizers.slots(leaf), strict=True):
            for slot in slots if of(variable) is None else ():
                if of(slot) is not None:
                    join(slot, home_of(slot))


@contextlib.contextmanager
def slots_like_variables() -> Iterator[None]:
    """Creates the slots of sharded variables in shards, if an optimizer is built.

    Each shard is created on the device of the variable's shard. The full slot never
    exists.
    """
    with patched(ADD_SLOT, _add_slot):
        yield


def _add_slot(keras_add, optimizer, reference_variable, name=None, initializer="zeros"):
    # Some of Keras's optimizers pass it by name.
    reference = reference_variable
    sharded = isinstance(reference, keras.Variable) and of(reference)
    if not sharded:
        return keras_add(optimizer, reference, name=name, initializer=initializer)
    # This host may update no shard.
    first, *others = sharded.updated or sharded.shards[:1]
    # Keras creates the first shard, with the name of the full slot.
    with swapped_values([reference], [first]), tf.device(first.device):
        slot = keras_add(optimizer, reference, name=name, initializer=initializer)
    first_slot, fill = value_behind(slot), keras.initializers.get(initializer)
    shards = [first_slot] if sharded.updated else []
    for shard in others:
        make = functools.partial(fill, shard.shape, dtype=slot.dtype)
        shards.append(variable_like(make, shard.device, first_slot))
    put_behind(slot, sharded.alike(shards, first_slot))
    return slot


def targets(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Returns the variables, each repeated for every gradient that it has.

    A sharded variable is repeated for each shard, in order, and once more if other
    hosts have shards, too. Until gradients are summed over hosts, this last entry has
    the gradient of the full variable; afterwards, the norm of the shards updated
    elsewhere.
    """
    return [variable for variable in variables for _ in range(_count(variable))]


def _count(variable):
    sharded = of(variable)
    return 1 if sharded is None else len(sharded.updated) + sharded.elsewhere


def devices(variables: Sequence[keras.Variable]) -> dict[int, str]:
    """Maps the index of each target that is a shard to the device of the shard."""
    device_of, i = {}, 0
    for variable in variables:
        if (sharded := of(variable)) is not None:
            shard_devices = [shard.device for shard in sharded.updated]
            shard_devices += [HOST] * sharded.elsewhere
            device_of |= enumerate(shard_devices, start=i)
        i += _count(variable)
    return device_of


def expand(variables: Sequence[keras.Variable], gradients: Sequence[Any]) -> list[Any]:
    """Splits gradients of full variables into those of `targets`."""
    expanded = []
    for variable, gradient in zip(variables, gradients, strict=True):
        sharded = of(variable)
        if sharded is None or gradient is None:
            expanded += [gradient] * _count(variable)
        else:
            expanded += sharded.gradients_of(gradient)
    return expanded


def whole(variables: Sequence[keras.Variable], gradients: Sequence[Any]) -> list[Any]:
    """Joins gradients of `targets` to those of full variables; see `expand`."""
    rest, joined = iter(gradients), []
    for variable in variables:
        parts = [next(rest) for _ in range(_count(variable))]
        sharded = of(variable)
        if sharded is None or parts[-1] is None:
            joined.append(parts[-1])
        else:
            joined.append(sharded.whole_gradient(parts))
    return joined


def gradient(
    taken: Callable[..., Any],
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    *others: Any,
    **options: Any,
) -> Any:
    """Computes a gradient for variables of which some are sharded.

    Args:
        taken: Computes the gradient for variables without shards.
        tape: The tape.
        target: The tensors to differentiate.
        sources: A nest of variables and tensors to differentiate for.
        *others: Further arguments of `taken`.
        **options: Further options of `taken`.
    """
    flat = tf.nest.flatten(sources)
    cuts = [*map(_cut_of, flat)]
    if not any(cuts):
        return taken(tape, target, sources, *others, **options)
    parts = [
        [source] if cut is None else [*cut.shards]
        for source, cut in zip(flat, cuts, strict=True)
    ]
    shard_gradients = taken(tape, target, parts, *others, **options)
    joined = [
        of_source[0]
        if cut is None
        else None
        if None in of_source
        else cut.whole_gradient(of_source)
        for of_source, cut in zip(shard_gradients, cuts, strict=True)
    ]
    return tf.nest.pack_sequence_as(sources, joined)


def _cut_of(source):
    if isinstance(source, ShardedVariable):
        # The value behind a variable, which a user gets as its `value`.
        return source
    return of(source) if isinstance(source, keras.Variable) else None


def sources_of(sources: Sequence[Any]) -> Iterator[Any]:
    """Yields the sources of a gradient, with shards in place of sharded variables."""
    for source in sources:
        cut = _cut_of(source)
        yield from [source] if cut is None else cut.shards


def norm(gradient: tf.Tensor | tf.IndexedSlices | None) -> tf.Tensor | None:
    """Returns the substitute for a shard's gradient elsewhere: its norm, a scalar.

    The norm is finite if the gradient is, as values are divided by the largest before
    they are squared.
    """
    if gradient is None:
        return None
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    with tf.device(values.device):
        values = tf.cast(values, tf.float32)
        largest = tf.maximum(tf.reduce_max(tf.abs(values)), 1e-30)
        return largest * tf.norm(values / largest)


def apply(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
) -> None:
    """Applies an optimizer to variables of which some are sharded.

    Call this within `substitutes.updates()`, which makes Keras call `by_device`.

    Args:
        optimizer: The user's optimizer, built with these variables.
        gradients: One for each of `targets`: dense, sparse or `None`. For a shard that
            is updated elsewhere, the gradient's `norm`.
        variables: Trainable variables.
    """
    gradients, variables = each_missing_once(gradients, targets(variables))
    with optimizers.taking(optimizer, len(gradients)):
        optimizer.apply(gradients, variables)


def each_missing_once(
    gradients: Sequence[Any], variables: Sequence[keras.Variable]
) -> tuple[list[Any], list[keras.Variable]]:
    """Keeps a single `None` for each variable without a gradient, not one a shard.

    Keras warns of these variables by name.

    Args:
        gradients: One for each of `targets`.
        variables: The targets.

    Returns:
        The remaining gradients, and their variables.
    """
    pairs = [*zip(gradients, variables, strict=True)]
    has_gradient = {
        id(variable) for gradient, variable in pairs if gradient is not None
    }
    remaining, missing = [], set()
    for gradient, variable in pairs:
        if id(variable) in has_gradient or id(variable) not in missing:
            remaining.append((gradient, variable))
        missing.add(id(variable))
    return [gradient for gradient, _ in remaining], [
        variable for _, variable in remaining
    ]


def by_device(
    keras_apply_gradients: Callable[..., None],
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
) -> None:
    """Replaces Keras's `_backend_apply_gradients`, which it calls for each device.

    Variables without shards come first, then the first shard of each variable, and so
    on.
    """
    if all(of(variable) is None for variable in variables):
        keras_apply_gradients(optimizer, gradients, variables)
        return
    groups = collections.defaultdict(list)
    for i, (variable, k) in enumerate(_numbered(variables)):
        group = None
        if (sharded := of(variable)) is not None:
            shards = sharded.updated[k : k + 1]
            if not shards or not shards[0].shape.num_elements():
                continue  # The shard is updated elsewhere, or has no rows.
            group = k, shards[0].device
        groups[group].append(i)
    with _clipped(optimizer, gradients, variables) as gradients:
        groups = {
            group: members
            for group, members in groups.items()
            # The substitute for a gradient elsewhere is a norm, a scalar.
            if group is None or gradients[members[0]].shape.rank > 0
        }
        scalars = optimizers.scalars(optimizer)
        before = [tf.identity(scalar.value) for scalar in scalars]
        for number, (group, members) in enumerate(groups.items()):
            if number > 0:
                # Each group changes these alike, such as Nadam's product of momentums.
                for scalar, value in zip(scalars, before, strict=True):
                    scalar.assign(value)
            members = [gradients[i] for i in members], [variables[i] for i in members]
            with (
                _shards_behind(optimizer, members[1], group),
                optimizers.only_for(optimizer, members[1]),
            ):
                keras_apply_gradients(optimizer, *members)
    _average_idle(optimizer, {*map(id, variables)})


@contextlib.contextmanager
def _clipped(optimizer, gradients, variables):
    """Clips by the norm of all gradients, not of each device's, within the context.

    Yields the gradients to apply.
    """
    accumulates, norm = bool(optimizer.gradient_accumulation_steps), None
    if optimizer.global_clipnorm:
        norm_of = _norm_of_accumulated if accumulates else _norm_of_these
        norm = _of_first_host(norm_of(optimizer, gradients, variables), variables)
    if not accumulates:
        about = optimizer, gradients, variables, norm
        with optimizers.gradients_clipped(*about) as clipped:
            yield clipped
    elif norm is not None:
        # Keras clips the accumulated gradients.
        with patched(optimizers.GLOBAL_NORM, lambda *_: norm):
            yield gradients
    else:
        yield gradients


def _of_first_host(norm, variables):
    """Returns the norm of the first host, if hosts update shards.

    Each host adds in another order. With norms of their own, variables that all hosts
    update would diverge in their last bits.
    """
    sharded = updated_by_hosts(variables).values()
    hosts = next((parts.hosts for parts in sharded if parts.updated_once), None)
    if hosts is None:
        return norm
    with tf.device(HOST):
        return hosts.broadcast([norm], "norm of all gradients")[0]


def _norm_of_these(optimizer, gradients, variables):
    """Returns the norm of all gradients."""
    del optimizer, variables
    return tf.linalg.global_norm(gradients)


def _norm_of_accumulated(optimizer, gradients, variables):
    """Returns the norm of accumulated gradients, including the new ones."""
    squares = []
    for gradient, (variable, k) in zip(gradients, _numbered(variables), strict=True):
        sums, steps = optimizers.accumulated(optimizer, variable)
        shard = updated_places(sums)[k]
        with tf.device(shard.device):
            squares.append(tf.reduce_sum(tf.square((gradient + shard) / steps)))
    with tf.device(HOST):
        return tf.sqrt(tf.add_n(squares))


def _numbered(targets):
    """Yields each target with the index of its shard; see `targets`."""
    seen = collections.Counter()
    for variable in targets:
        yield variable, seen[id(variable)]
        seen[id(variable)] += 1


def _average_idle(optimizer, updated):
    """Updates the averages of variables without a gradient, which do not change.

    Keras averages all variables together; here each device averages those it updates.
    """
    for variable in optimizers.known_variables(optimizer):
        average = optimizers.average(optimizer, variable)
        if average is None or id(variable) in updated:
            continue
        shards = places(average), updated_places(variable)
        for average_shard, shard in zip(*shards, strict=True):
            with tf.device(average_shard.device):
                average_shard.assign(shard)


@contextlib.contextmanager
def _shards_behind(optimizer, variables, place):
    """Puts a device's shards behind variables and their slots, within the context."""
    if place is None:
        yield
        return
    index, device = place
    slots = [optimizers.slots_of(optimizer, v, of_any_shape=True) for v in variables]
    swapped = [*variables, *(s for s in itertools.chain(*slots) if of(s) is not None)]
    values = [of(variable).updated[index] for variable in swapped]
    with tf.device(device), swapped_values(swapped, values):
        yield


def why_not_cut(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Returns why an optimizer cannot update shards, in words, or `None`."""
    for leaf in optimizers.updating(optimizer):
        if not optimizers.is_elementwise(leaf):
            return f"{type(leaf).__name__}, which looks at whole variables"
        if clips_accumulated(leaf):
            return "an optimizer that clips the norm of gradients that it accumulates"
    return None


def clips_accumulated(optimizer: keras.optimizers.Optimizer) -> bool:
    """Checks whether an optimizer clips norms of gradients that it has accumulated."""
    leaves = optimizers.updating(optimizer)
    return any(
        leaf.gradient_accumulation_steps and (leaf.clipnorm or leaf.global_clipnorm)
        for leaf in leaves
    )


def why_not_distributed(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Returns why no device can update some variables alone, in words, or `None`.

    A user's optimizer may use all variables at once.
    """
    for leaf in optimizers.updating(optimizer):
        name = type(leaf).__name__
        if is_keras_own(type(leaf)):
            continue
        others = [m for m in optimizers.overridden(leaf) if m not in _OF_ONE_VARIABLE]
        if others:
            return (
                f"optimizer '{name}' has a `{others[0]}` of its own, which may look at "
                "all variables at once"
            )
        known = {id(slot) for of_one in optimizers.slots(leaf) for slot in of_one}
        known |= {id(optimizers.iterations_variable(leaf))}
        known |= {id(optimizers.learning_rate_variable(leaf))}
        for variable in optimizers.all_variables(leaf):
            if id(variable) not in known:
                return (
                    f"optimizer '{name}' has a variable '{variable.name}', and it is "
                    "unknown to which of the model's variables it belongs"
                )
    return None
