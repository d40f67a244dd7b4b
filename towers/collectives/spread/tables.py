"""Embedding tables whose rows several hosts divide.

A host has a range of rows, divided over its own devices, and their optimizer slots. In
each step, hosts send the owners the indices of the rows that they look up, each row
once, and receive the rows (`fetch`); towers look up in the received rows. The gradients
of rows are sent to the owners, with all duplicates, as optimizers square each of them
separately (`give`).

A step that is traced as on one device reads a stand-in without a value for the whole
table (`stand_in`). The partitioned call has hosts exchange rows where the step looks up
rows (`look_up`), and gathers whole tables where the step reads one.

A tower cannot take part in a collective: towers run in parallel, and hosts may have
different numbers of towers. So look-ups are a separate phase, in which home joins the
indices of this host's towers, and sends each tower its rows. If all hosts look up the
same rows, all ask for them.
"""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.collectives.spread.variable import Part, SpreadVariable
from towers.collectives.world import World
from towers.devices.names import HOST
from towers.keras_adapter import optimizers
from towers.keras_adapter.variables import (
    bytes_of,
    put_behind,
    value_behind,
    variable_like,
    without_value,
)
from towers.layers import sharded, tables
from towers.layers.sharded import ShardedVariable


class SpreadTable(SpreadVariable):
    """The value of an embedding table of which each host has some rows.

    The list of its gradients has one for each shard of this host, and one more that
    stands in for all other shards: the gradient of the whole table until the towers'
    sum, and then the norm of the gradients that other hosts apply.

    Attributes:
        ends: The end of the rows of each host.
        start: The first row of this host.
        own_rows: The rows of this host.
    """

    elsewhere = stands_in = True
    gathered_by_use = False

    def __init__(self, *arguments: Any):
        """Takes the arguments of `SpreadVariable`; the parts of each host are rows."""
        super().__init__(*arguments)
        width, first = self.shape[1], self.hosts.index
        self.ends = np.array([of_host[-1].stop // width for of_host in self.parts])
        self.start = self.parts[first][0].start // width
        own = int(self.ends[first]) - self.start
        self.own_rows = ShardedVariable(self.shards, [own, width], 0)

    def is_given(self, gradient: Any) -> bool:
        """Returns whether `give` sends a gradient to owners: always."""
        del gradient
        return True

    @staticmethod
    def give(
        hosts: World, tables: Sequence["SpreadTable"], gradients: Sequence[Any]
    ) -> list[list[Any]]:
        """Sends gradients of tables to the hosts that own the rows; see `give`."""
        return give(hosts, tables, gradients)

    @property
    def ids_type(self) -> tf.DType:
        """The type in which indices of rows are sent."""
        return tf.int32 if self.shape[0] < 2**31 else tf.int64

    @functools.cached_property
    def stand_in(self) -> tf.Variable:
        """A variable without a value, which the trace of a step reads instead."""
        return without_value(self, HOST)

    def gradients_of(self, gradient: Any) -> list[Any]:
        """Returns `None` for each shard, then the gradient; see `ShardedVariable`."""
        return [None] * len(self.shards) + [gradient]

    def whole_gradient(self, parts: Sequence[Any]) -> Any:
        """Returns the gradient of the whole table; see `ShardedVariable`."""
        return parts[-1]

    def parts_of(self, gradient: tf.Tensor | tf.IndexedSlices) -> list[Any]:
        """Cuts a sum that all hosts have into the gradients of this host's shards.

        Returns:
            The gradients, and the norm of the gradients that other hosts apply.
        """
        last = self.start + self.own_rows.shape[0]
        if isinstance(gradient, tf.IndexedSlices):
            ids = gradient.indices
            own = (ids >= self.start) & (ids < last)
            values, ids = (tf.boolean_mask(t, own) for t in (gradient.values, ids))
            own_gradient = tf.IndexedSlices(
                values, ids - self.start, gradient.dense_shape
            )
            others = tf.boolean_mask(gradient.values, ~own)
        else:
            own_gradient = gradient[self.start : last]
            others = tf.concat([gradient[: self.start], gradient[last:]], 0)
        # Appends a zero, as the maximum of an empty tensor is not finite.
        others = tf.concat([tf.reshape(others, [-1]), tf.zeros([1], others.dtype)], 0)
        return [*self.own_rows.split(own_gradient), sharded.norm(others)]

    def owners(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns, in int32, the index of the host that owns each row."""
        ends = tf.constant(self.ends[:-1], rows.dtype)
        return tf.searchsorted(ends, rows, side="right")

    def look_up_own(self, ids: tf.Tensor) -> tf.Tensor:
        """Looks up rows that this host has."""
        ids = ids - self.start
        rows = self.own_rows.look_up(ids)
        return self.own_rows.join(ids, [part for part, _ in rows])


def refusal(plan: Any, way: str) -> str | None:
    """Returns why the hosts of a `Plan` divide no tables; `None` if they may."""
    if plan.hosts.count > 1 and way == "columns":
        return "with columns, each look-up would ask all hosts"
    if plan.hosts.count > 1 and not plan.pipeline.alone:
        return "with stages or micro-batches, hosts look up their own rows only"
    return None


def divide(
    model: keras.Model,
    plan: Any,
    way: str,
    optimizer: keras.optimizers.Optimizer | None = None,
) -> list[keras.Variable]:
    """Divides tables of a built model, and their slots, among the towers of all hosts.

    With "rows" all tables are divided; with "auto" only tables that are larger than the
    share of all variables that one device would have. All hosts call it together, and
    use the first host's values.

    Args:
        model: The model.
        plan: The `Plan`.
        way: One of `tables.WAYS`, but for "none".
        optimizer: The optimizer that has slots of the tables, if any.

    Returns:
        The divided tables; empty with one host.
    """
    hosts, towers = plan.hosts, plan.replicas_by_host
    if hosts.count == 1 or refusal(plan, way) is not None:
        return []
    least, chosen = 0, tables.of(model)
    if way == "auto":
        least = sum(map(bytes_of, model.variables)) / sum(towers)
        least = max(least, tables.SMALL_BYTES)
    chosen = [table for table in chosen if bytes_of(table) > least]
    devices = [tower.device for tower in plan.replicas]
    for table in chosen:
        slots = optimizers.slots_of(optimizer, table) if optimizer else ()
        parts = _rows(table.shape, towers)
        for variable in [table, *slots]:
            if not _lies_there(variable, parts[hosts.index], devices):
                _spread(variable, parts, hosts, devices)
    return chosen


def _rows(shape, towers):
    """Returns, for each host, the parts of its towers; sizes differ by one row."""
    (rows, width), count = shape, sum(towers)
    ends = iter([-(-rows * k // count) for k in range(1, count + 1)])
    start, parts = 0, []
    for k, of_host in enumerate(towers):
        parts.append([])
        for _ in range(of_host):
            end = next(ends)
            part = Part(k, start * width, end * width, (end - start, width))
            parts[-1].append(part)
            start = end
    return parts


def _lies_there(variable, parts, devices):
    value = value_behind(variable)
    if not isinstance(value, SpreadVariable) or len(value.shards) != len(parts):
        return False
    return all(
        tuple(shard.shape) == part.shape and shard.device.endswith(device)
        for shard, part, device in zip(value.shards, parts, devices, strict=True)
    )


def _spread(variable, parts, hosts, devices):
    old = value_behind(variable)
    value = old.numpy()
    if not isinstance(old, SpreadVariable):
        (value,) = hosts.broadcast([tf.constant(value)], "values of tables")
        value = value.numpy()
    flat, own_parts = value.reshape(-1), parts[hosts.index]
    shards = [
        variable_like(flat[part.start : part.stop].reshape(part.shape), device, old)
        for part, device in zip(own_parts, devices, strict=True)
    ]
    put_behind(variable, SpreadTable(shards, value.shape, parts, hosts, old))


def fetch(
    hosts: World,
    spread: Sequence[SpreadTable],
    ids: Sequence[Sequence[tf.Tensor]],
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Fetches rows from the hosts that own them; all hosts call it together.

    Args:
        hosts: The hosts.
        spread: The tables.
        ids: For each table, vectors of the indices of rows to look up.

    Returns:
        For each table, the unique indices in order, and their rows.
    """
    with tf.device(HOST), tf.name_scope("fetch"):
        unique, parts, rows = [], [], []
        for table, of_table in zip(spread, ids, strict=True):
            wanted = [tf.cast(indices, table.ids_type) for indices in of_table]
            unique.append(tf.sort(tf.unique(tf.concat(wanted, 0)).y))
            owners = table.owners(unique[-1])
            parts.append(tf.dynamic_partition(unique[-1], owners, hosts.count))
        parts = [*zip(*parts, strict=True)]
        asked = hosts.all_to_all(parts, "rows that are looked up")
        for table, of_hosts in zip(spread, zip(*asked, strict=True), strict=True):
            own_rows = table.look_up_own(tf.concat(of_hosts, 0))
            rows.append(tf.split(own_rows, [*map(tf.size, of_hosts)]))
        sent = [*zip(*rows, strict=True)]
        received = hosts.all_to_all(sent, "rows of tables")
        joined = [tf.concat(of_hosts, 0) for of_hosts in zip(*received, strict=True)]
        return [*zip(unique, joined, strict=True)]


def look_up(
    hosts: World,
    spread: Sequence[SpreadTable],
    ids: Sequence[Sequence[tf.Tensor]],
) -> list[list[tf.Tensor]]:
    """Looks up rows on any host; all hosts call it together.

    Args:
        hosts: The hosts.
        spread: The tables; one may occur more than once.
        ids: For each table, tensors of indices of rows, of any shape.

    Returns:
        For each tensor of indices, a row for each index.
    """
    unique = [*{id(table): table for table in spread}.values()]
    with tf.device(HOST):
        wanted = [
            [
                tf.reshape(tf.cast(indices, table.ids_type), [-1])
                for other, of_other in zip(spread, ids, strict=True)
                for indices in (of_other if other is table else ())
            ]
            for table in unique
        ]
        fetched = dict(zip(map(id, unique), fetch(hosts, unique, wanted), strict=True))
        return [
            [_rows_of(*fetched[id(table)], indices) for indices in of_table]
            for table, of_table in zip(spread, ids, strict=True)
        ]


def _rows_of(numbers, rows, ids):
    """Gathers rows for indices from the rows that were fetched."""
    flat = tf.reshape(tf.cast(ids, numbers.dtype), [-1])
    gathered = tf.gather(rows, tf.searchsorted(numbers, flat))
    shape = tf.concat([tf.shape(ids), [rows.shape[1]]], 0)
    return tf.ensure_shape(tf.reshape(gathered, shape), [*ids.shape, rows.shape[1]])


def give(
    hosts: World, spread: Sequence[SpreadTable], gradients: Sequence[Any]
) -> list[list[Any]]:
    """Sends gradients to the hosts that own the rows; all hosts call it together.

    Args:
        hosts: The hosts.
        spread: The tables.
        gradients: This host's gradient of each whole table, dense or sparse.

    Returns:
        For each table, the sums over hosts for this host's shards, and the norm of the
        sums for all other shards. Duplicate rows stay separate, those of the first host
        first.
    """
    sparse = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
    with tf.device(HOST), tf.name_scope("give"):
        sums = {
            i: _give_dense(hosts, table, gradients[i])
            for i, table in enumerate(spread)
            if i not in sparse
        }
        if sparse:
            of_sparse = [
                [of_tables[i] for i in sparse] for of_tables in (spread, gradients)
            ]
            sums |= dict(zip(sparse, _give_rows(hosts, *of_sparse), strict=True))
    return [sums[i] for i in range(len(spread))]


def _give_rows(hosts, spread, gradients):
    """Sends sparse gradients to the hosts that own the rows; see `give`."""
    parts, squares = [], []
    for table, gradient in zip(spread, gradients, strict=True):
        values = tf.ensure_shape(gradient.values, [None, table.shape[1]])
        ids = tf.cast(gradient.indices, table.ids_type)
        owners = table.owners(ids)
        parts += [tf.dynamic_partition(t, owners, hosts.count) for t in (ids, values)]
        of_rows = tf.reduce_sum(tf.square(tf.cast(values, tf.float64)), 1)
        squares.append(tf.math.unsorted_segment_sum(of_rows, owners, hosts.count))
    # All hosts receive all squares, as the norm is that of all gradients.
    parts.append([tf.stack(squares)] * hosts.count)
    received = hosts.all_to_all([*zip(*parts, strict=True)], "gradients of rows")
    *received, squares = zip(*received, strict=True)
    others = np.delete(np.arange(hosts.count), hosts.index)
    norms = tf.sqrt(tf.reduce_sum(tf.gather(tf.add_n(squares), others, axis=1), 1))
    # A finite norm has to stay finite in float32.
    most = tf.minimum(norms, float(tf.float32.max))
    norms = tf.cast(tf.where(tf.math.is_finite(norms), most, norms), tf.float32)
    rows, norms = [tf.concat(r, 0) for r in received], tf.unstack(norms, len(spread))
    sums = []
    for k, table in enumerate(spread):
        row_ids, values = rows[2 * k : 2 * k + 2]
        shape = tf.constant(table.own_rows.shape.as_list(), row_ids.dtype)
        own = tf.IndexedSlices(values, row_ids - table.start, shape)
        sums.append([*table.own_rows.split(own), norms[k]])
    return sums


def _give_dense(hosts, table, gradient):
    """Sends a dense gradient to the hosts that own the rows; see `give`."""
    gradient = tf.ensure_shape(gradient, table.shape)
    starts = [0, *table.ends[:-1]]
    parts = [
        [tf.reshape(gradient[start:end], [-1])]
        for start, end in zip(starts, table.ends, strict=True)
    ]
    (own,) = hosts.reduce_scatter(parts, "gradients of tables")
    own = tf.reshape(own, table.own_rows.shape)
    norms = hosts.stack(sharded.norm(own), "norms of gradients")
    others = tf.concat([norms[: hosts.index], norms[hosts.index + 1 :]], 0)
    return [*table.own_rows.split(own), sharded.norm(others)]
