"""The sharded variable: what stands behind a `keras.Variable`, in parts on devices.

See `sharded.py`, which makes and updates them.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.devices.names import HOST
from towers.keras_adapter.variables import take_identity

# The scope of what puts a whole value together in a graph.
WHOLE_SCOPE = "whole_of_shards"


class ShardedVariable:
    """What stands behind a `keras.Variable`: its value in shards, on several devices.

    Attributes:
        shards: A `tf.Variable` for each device, in order.
        shape: That of the whole value.
        axis: How it is cut: 0 into rows, 1 into columns, `None` into ranges of the
            flattened value, each a shard of rank 1.
        ends: Where each shard ends on that axis, or in the flattened value.
        elsewhere: Whether other hosts update shards of it, too, whose gradients
            something stands in for here; see `sharded.targets`.
        across_hosts: Whether several hosts have shards of it; it is a `SpreadVariable`.
        stands_in: Whether a step is traced with a `stand_in` in its place.
        updated_once: Whether each host of several applies the optimizer once in a step,
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
        # An optimizer knows the variable, and each shard, by the same.
        take_identity(self, first)

    @property
    def updated(self) -> Sequence[tf.Variable]:
        """The shards that this host updates."""
        return self.shards

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
                rows as the shard counts them, or flat numbers.
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
        if self.axis is None:
            row = math.prod(self.shape[1:])
            places = places[:, tf.newaxis] * row + tf.range(row, dtype=places.dtype)
            values, places = tf.reshape(values, [-1]), tf.reshape(places, [-1])
        if self.axis == 1:
            return [
                _slices(part, places, shard)
                for part, shard in zip(self.split(values), self.shards, strict=True)
            ]
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

    def whole_gradient(self, parts: Sequence[Any]) -> Any:
        """Makes a gradient of the whole value of the shards', where it is called.

        Args:
            parts: What `gradients_of` returns of a gradient, or of several that were
                added.
        """
        if self.axis is None or not isinstance(parts[0], tf.IndexedSlices):
            whole = tf.concat([*map(tf.convert_to_tensor, parts)], self.axis or 0)
            return whole if self.axis is not None else tf.reshape(whole, self.shape)
        values = tf.concat([part.values for part in parts], self.axis)
        places = parts[0].indices
        if self.axis == 0:
            starts = zip(parts, self.starts, strict=True)
            places = tf.concat([part.indices + start for part, start in starts], 0)
        shape = tf.constant(self.shape.as_list(), places.dtype)
        return tf.IndexedSlices(values, places, shape)

    def gradients_of(self, gradient: Any) -> list[Any]:
        """Makes of a gradient of the whole value one for each of `sharded.targets`."""
        return self.split(gradient)

    def alike(self, shards: Sequence[tf.Variable], like: Any) -> "ShardedVariable":
        """Returns a variable that is cut as this one is, and updated with it.

        Args:
            shards: Its shards: one for each of `updated`.
            like: A variable that has its name and type.
        """
        del like
        return ShardedVariable(shards, self.shape, self.axis)

    def look_up(self, ids: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Looks up rows where the shards lie.

        Args:
            ids: A vector of numbers of rows, from 0.

        Returns:
            For each shard, the rows that it has, or its columns of all rows, and their
            numbers as it counts them. `join` puts them together.
        """
        each = [ids] * len(self.shards)
        if self.axis == 0 and len(self.shards) > 1:
            each = tf.dynamic_partition(ids, self.owners(ids), len(self.shards))
        found = []
        for shard, mine, start in zip(self.shards, each, self.starts, strict=True):
            with tf.device(shard.device):
                mine = mine - start if self.axis == 0 and start else tf.identity(mine)
                found.append((tf.gather(shard, mine), mine))
        return found

    def join(self, ids: tf.Tensor, rows: Sequence[tf.Tensor]) -> tf.Tensor:
        """Puts rows that were looked up in the order of their ids, where it is called.

        Args:
            ids: What `look_up` was given.
            rows: What it has found.
        """
        if len(rows) == 1:
            return rows[0]
        if self.axis == 1:
            return tf.concat(rows, axis=1)
        places = tf.range(tf.size(ids))
        return tf.dynamic_stitch(
            tf.dynamic_partition(places, self.owners(ids), len(self.shards)), rows
        )

    def look_up_alike(self, ids: tf.Tensor) -> tf.Tensor:
        """Looks up rows, where no shape may depend on the ids.

        So each shard looks up a row for each id, and that of the owner is taken.

        Args:
            ids: A vector of numbers of rows, from 0.
        """
        owners, last, rows = self.owners(ids), len(self.shards) - 1, None
        for i, (shard, start, end) in enumerate(
            zip(self.shards, self.starts, self.ends, strict=True)
        ):
            with tf.device(shard.device):
                own = ids - start
                # An id that no shard has is still an error.
                own = tf.maximum(own, 0) if i > 0 else own
                own = tf.minimum(own, end - start - 1) if i < last else own
                found = tf.gather(shard, own)
            rows = found if i == 0 else tf.where((owners == i)[:, None], found, rows)
        return rows

    def owners(self, rows: tf.Tensor) -> tf.Tensor:
        """Tells, in int32, which shard has each row."""
        beyond = [tf.cast(rows >= end, tf.int32) for end in self.ends[:-1]]
        return functools.reduce(tf.add, beyond or [tf.zeros_like(rows, tf.int32)])

    def assign(self, value: Any, **_: Any) -> None:
        """Gives each shard its part of a whole value."""
        _change(self, "assign", value)

    def assign_add(self, value: Any) -> None:
        """Adds to each shard its part of a value, which may be cut alike."""
        self.assign(_whole(self) + _whole(value))

    def assign_sub(self, value: Any) -> None:
        """Takes from each shard its part of a value."""
        self.assign(_whole(self) - _whole(value))

    def numpy(self) -> np.ndarray:
        """Returns the whole value."""
        whole = np.concatenate([each.numpy() for each in self.shards], self.axis or 0)
        return whole.reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy().astype(dtype or self.dtype.as_numpy_dtype, copy=False)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        # The whole value may not fit where it is wanted.
        with tf.device(HOST), tf.name_scope(WHOLE_SCOPE):
            whole = self.joined([*map(tf.convert_to_tensor, self.shards)])
            return tf.cast(whole, dtype or self.dtype)

    def joined(self, values: Sequence[Any]) -> tf.Tensor:
        """Puts the values of all shards together, where it is called."""
        whole = values[0]
        if len(values) > 1:
            whole = tf.concat([*values], axis=self.axis or 0)
        return tf.reshape(whole, self.shape) if self.axis is None else whole

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": tf.convert_to_tensor(self)}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> None:
        self.assign(restored["VARIABLE_VALUE"])


def _slices(values, places, shard):
    shape = tf.constant(shard.shape.as_list(), places.dtype)
    return tf.IndexedSlices(values, places, shape)


def _change(variable, name, value):
    """Changes each shard by its part of a whole value, where it lies."""
    with tf.device(HOST):
        parts = variable.split(value)
    for shard, part in zip(variable.shards, parts, strict=True):
        with tf.device(shard.device):
            getattr(shard, name)(part)


# By which Keras changes rows.
for _name in ("scatter_add", "scatter_sub", "scatter_update"):
    setattr(ShardedVariable, _name, functools.partialmethod(_change, _name))


def _operator(name):
    def of_value(self, *others):
        return getattr(tf.convert_to_tensor(self), name)(*others)

    return of_value


# Keras's own have `value` compute these.
for _name in ("__getitem__", "__neg__", "__abs__", "__mul__", "__add__", "__sub__"):
    setattr(ShardedVariable, _name, _operator(_name))


def _whole(value):
    """A value in the host's memory."""
    with tf.device(HOST):
        return tf.convert_to_tensor(value)


def _is_array(value):
    return isinstance(value, np.ndarray)
