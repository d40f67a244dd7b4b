"""Sharded variables: one variable to Keras, in parts on several devices.

A `ShardedVariable` stands behind a `keras.Variable` in the place of its `tf.Variable`:
`cut` puts it there, also behind the slots that an optimizer has for the variable.
Whoever reads it gets the whole value, in the host's memory; whoever assigns it has each
shard get its part. So files and checkpoints are as always. The name and the idea are
those of TensorFlow's `ShardedVariable`, which Keras does not take.

The optimizer is the user's own, and is applied to shards (`apply`): each is a variable
of its own to it, with a gradient of its own. While a device's shards are updated, they
stand behind the `keras.Variable`s, as do those of their slots. So each operation runs
where the shard lies. That is right for optimizers that look at each number by itself,
which `refuse_others` checks, and for norms of gradients, which are those of all shards.

    cut(table, ["/device:CPU:0", "/device:CPU:1"], axis=0)
    with slots_like_variables():
        optimizer.build(variables)           # slots are created in shards
    gradients = [first, second, of_bias]     # of each of `targets([table, bias])`
    apply(optimizer, gradients, [table, bias])

New `tf.Variable`s stand behind the `keras.Variable`s after `cut`: what was traced
before refers to the old ones.
"""

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.devices import HOST
from towers.keras_adapter import optimizers
from towers.keras_adapter.optimizers import ADD_SLOT
from towers.keras_adapter.patching import patched
from towers.keras_adapter.variables import (
    put_behind,
    swapped_values,
    take_identity,
    value_behind,
)


class ShardedVariable:
    """What stands behind a `keras.Variable`: its value in shards, on several devices.

    Attributes:
        shards: A `tf.Variable` for each device, in order.
        shape: That of the whole value.
        axis: How it is cut: 0 into rows, 1 into columns, `None` into ranges of the
            flattened value, each a shard of rank 1.
        ends: Where each shard ends on that axis, or in the flattened value.
    """

    def __init__(
        self, shards: Sequence[tf.Variable], shape: Sequence[int], axis: int | None
    ):
        self.shards, self.axis = tuple(shards), axis
        self.shape = tf.TensorShape(shape)
        sizes = [shard.shape[axis or 0] for shard in self.shards]
        self.ends = tuple(itertools.accumulate(sizes))
        first = self.shards[0]
        self.dtype, self.name, self.trainable = first.dtype, first.name, first.trainable
        # An optimizer knows the variable, and each shard, by the same.
        take_identity(self, first)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each shard begins; see `ends`."""
        return (0, *self.ends[:-1])

    @property
    def device(self) -> str:
        """The device of the first shard."""
        return self.shards[0].device

    @property
    def _shared_name(self) -> str:
        # TensorFlow's checkpoints ask for it, and Keras for that of what is behind.
        return self.name.partition(":")[0]

    def split(self, value: Any) -> list[Any]:
        """Cuts a whole value, or a gradient, into those of the shards, where it is.

        Args:
            value: An array, a tensor, or `tf.IndexedSlices`, of which each shard's have
                rows as the shard counts them.
        """
        if isinstance(value, tf.IndexedSlices):
            return self._split_rows(value)
        if self.axis is None:
            value = value.reshape(-1) if _is_array(value) else tf.reshape(value, [-1])
        bounds = zip(self.starts, self.ends, strict=True)
        columns = (slice(None),) * (self.axis or 0)
        return [value[(*columns, slice(start, end))] for start, end in bounds]

    def _split_rows(self, gradient):
        # Duplicates stay apart, as optimizers square each by itself.
        values, places = gradient.values, gradient.indices
        if self.axis == 1:
            return [
                _slices(part, places, shard)
                for part, shard in zip(self.split(values), self.shards, strict=True)
            ]
        if self.axis is None:
            size = self.shape.num_elements() // self.shape[0]
            places = places[:, None] * size + tf.range(size, dtype=places.dtype)
            values, places = tf.reshape(values, [-1]), tf.reshape(places, [-1])
        owners, count = self.owners(places), len(self.shards)
        values = tf.dynamic_partition(values, owners, count)
        places = tf.dynamic_partition(places, owners, count)
        return [
            _slices(*mine, shard)
            for *mine, shard in zip(
                values,
                (each - start for each, start in zip(places, self.starts, strict=True)),
                self.shards,
                strict=True,
            )
        ]

    def owners(self, rows: tf.Tensor) -> tf.Tensor:
        """Tells, in int32, which shard has each row, or number of a flattened value."""
        owners = tf.zeros_like(rows, tf.int32)
        for end in self.ends[:-1]:
            owners += tf.cast(rows >= end, tf.int32)
        return owners

    def assign(self, value: Any, **_: Any) -> None:
        """Gives each shard its part of a whole value."""
        self._each(tf.Variable.assign, value)

    def assign_add(self, value: Any, **_: Any) -> None:
        """Adds to each shard its part of a whole value."""
        self._each(tf.Variable.assign_add, value)

    def assign_sub(self, value: Any, **_: Any) -> None:
        """Subtracts from each shard its part of a whole value."""
        self._each(tf.Variable.assign_sub, value)

    def scatter_add(self, rows: tf.IndexedSlices) -> None:
        """Adds to rows, each where it is."""
        self._each(tf.Variable.scatter_add, rows)

    def scatter_sub(self, rows: tf.IndexedSlices) -> None:
        """Subtracts from rows, each where it is."""
        self._each(tf.Variable.scatter_sub, rows)

    def scatter_update(self, rows: tf.IndexedSlices) -> None:
        """Assigns rows, each where it is."""
        self._each(tf.Variable.scatter_update, rows)

    def _each(self, change, value):
        """Changes each shard by its part of a whole value."""
        with tf.device(HOST):
            parts = self.split(value)
        for shard, part in zip(self.shards, parts, strict=True):
            with tf.device(shard.device):
                getattr(shard, change.__name__)(part)

    def numpy(self) -> np.ndarray:
        """Returns the whole value."""
        whole = np.concatenate([each.numpy() for each in self.shards], self.axis or 0)
        return whole.reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy().astype(dtype or self.dtype.as_numpy_dtype, copy=False)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        # The whole value may not fit where it is wanted.
        with tf.device(HOST):
            whole = tf.concat([*self.shards], axis=self.axis or 0)
            return tf.cast(tf.reshape(whole, self.shape), dtype or self.dtype)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": tf.convert_to_tensor(self)}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self.assign(restored["VARIABLE_VALUE"])


def _slices(values, places, shard):
    shape = tf.constant(shard.shape.as_list(), places.dtype)
    return tf.IndexedSlices(values, places, shape)


def _operator(name):
    def of_value(self, *others):
        return getattr(tf.convert_to_tensor(self), name)(*others)

    return of_value


# Keras's own have `value` compute these.
for _name in ("__getitem__", "__neg__", "__abs__", "__mul__", "__add__", "__sub__"):
    setattr(ShardedVariable, _name, _operator(_name))


def of(variable: keras.Variable) -> ShardedVariable | None:
    """Returns what a variable is made of, if it is cut."""
    found = value_behind(variable)
    return found if isinstance(found, ShardedVariable) else None


def places(variable: keras.Variable) -> list[tf.Variable]:
    """Returns the `tf.Variable`s behind a variable: one, or its shards."""
    sharded = of(variable)
    return [value_behind(variable)] if sharded is None else [*sharded.shards]


def cut(
    variable: keras.Variable,
    devices: Sequence[str],
    axis: int | None,
    optimizer: keras.optimizers.Optimizer | None = None,
) -> None:
    """Cuts a variable, and the slots that an optimizer has for it, into even shards.

    The value is read on the host, and only its parts go to devices.

    Args:
        variable: A variable that has a value.
        devices: Where the shards are to lie, in order. A variable with less rows, or
            columns, has so many shards.
        axis: See `ShardedVariable`.
        optimizer: The optimizer, if it may have slots already.
    """
    cuts = [variable]
    if optimizer is not None:
        cuts += optimizers.slots_of(optimizer, variable)
    for each in cuts:
        old = value_behind(each)
        whole = old.numpy()
        size = whole.size if axis is None else whole.shape[axis]
        parts = np.array_split(
            whole.reshape(-1) if axis is None else whole,
            min(len(devices), size),
            axis=axis or 0,
        )
        shards = [
            _shard(part, device, old)
            for part, device in zip(parts, devices, strict=False)
        ]
        put_behind(each, ShardedVariable(shards, whole.shape, axis))


def _shard(value, device, like):
    with tf.init_scope(), tf.device(device):
        name = like.name.partition(":")[0]
        shard = tf.Variable(
            value, trainable=like.trainable, name=name, dtype=like.dtype
        )
    take_identity(shard, like)
    return shard


@contextlib.contextmanager
def slots_like_variables() -> Iterator[None]:
    """Inside, an optimizer that is built creates the slots of cut variables in shards.

    Each shard is created where the variable's is. So a slot is nowhere whole.
    """
    with patched(ADD_SLOT, _add_slot):
        yield


def _add_slot(keras_add, optimizer, reference, name=None, initializer="zeros"):
    sharded = isinstance(reference, keras.Variable) and of(reference)
    if not sharded:
        return keras_add(optimizer, reference, name=name, initializer=initializer)
    first, *others = sharded.shards
    # Keras makes the first shard, with the name of the whole.
    with swapped_values([reference], [first]), tf.device(first.device):
        slot = keras_add(optimizer, reference, name=name, initializer=initializer)
    made, fill = value_behind(slot), keras.initializers.get(initializer)
    shards = [made]
    for shard in others:
        make = functools.partial(fill, shard.shape, dtype=slot.dtype)
        shards.append(_shard(make, shard.device, made))
    put_behind(slot, ShardedVariable(shards, sharded.shape, sharded.axis))
    return slot


def targets(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Returns what has a gradient of its own: each variable, a cut one for each shard.

    It stands there as many times, in the order of its shards.
    """
    return [variable for variable in variables for _ in places(variable)]


def expand(variables: Sequence[keras.Variable], gradients: Sequence[Any]) -> list[Any]:
    """Makes gradients of `targets` of those of whole variables."""
    expanded = []
    for variable, gradient in zip(variables, gradients, strict=True):
        sharded = of(variable)
        if sharded is None or gradient is None:
            expanded += [gradient] * len(places(variable))
        else:
            expanded += sharded.split(gradient)
    return expanded


def apply(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
) -> None:
    """Applies an optimizer to variables of which some are cut.

    Call it within `fused.updates()`, which has Keras call `by_device`.

    Args:
        optimizer: The user's, built with these variables.
        gradients: One for each of `targets`: dense, sparse or `None`.
        variables: Trainable variables.
    """
    optimizer.apply(gradients, targets(variables))


def by_device(
    keras_apply_gradients: Callable[..., None],
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
) -> None:
    """Stands in for Keras's `_backend_apply_gradients`, and calls it for each device.

    Whole variables come first, then the first shard of each variable, and so on.
    """
    groups, seen = collections.defaultdict(list), collections.Counter()
    for i, variable in enumerate(variables):
        place = None
        if (sharded := of(variable)) is not None:
            place = seen[id(variable)], sharded.shards[seen[id(variable)]].device
            seen[id(variable)] += 1
        groups[place].append(i)
    if not seen:
        keras_apply_gradients(optimizer, gradients, variables)
        return
    with optimizers.gradients_clipped(optimizer, gradients, variables) as gradients:
        for place, members in groups.items():
            mine = [gradients[i] for i in members], [variables[i] for i in members]
            with (
                _shards_behind(optimizer, mine[1], place),
                optimizers.only_for(optimizer, mine[1]),
            ):
                keras_apply_gradients(optimizer, *mine)


@contextlib.contextmanager
def _shards_behind(optimizer, variables, place):
    """Inside, variables and their slots are a device's shards of them."""
    if place is None:
        yield
        return
    index, device = place
    slots = [optimizers.slots_of(optimizer, variable) for variable in variables]
    swapped = [*variables, *itertools.chain(*slots)]
    values = [of(variable).shards[index] for variable in swapped]
    with tf.device(device), swapped_values(swapped, values):
        yield


def refuse_others(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Says, in words, why an optimizer cannot be applied to shards, if it cannot."""
    inner = optimizers.innermost(optimizer)
    if not optimizers.is_elementwise(inner):
        return f"{type(inner).__name__}, which looks at whole variables"
    if isinstance(inner, keras.optimizers.Nadam):
        return "Nadam, which counts how often it is applied, not the steps"
    if inner.gradient_accumulation_steps and (inner.clipnorm or inner.global_clipnorm):
        return "an optimizer that clips the norm of gradients that it accumulates"
    return None


def _is_array(value):
    return isinstance(value, np.ndarray)
