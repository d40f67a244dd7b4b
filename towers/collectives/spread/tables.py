"""Embedding tables of which each of several hosts has some rows.

A host has the rows from one number to another, divided over its own devices, and their
optimizer slots. In each step, hosts tell the owners which rows they look up, each row
once, and get them (`fetch`); towers look up in these. The gradients of rows go to the
owners, with all duplicates, as optimizers square each by itself (`give`).

A step that is traced as on one device reads a stand-in for the whole table, which has
no value (`standing_in`). Whoever runs what was traced has hosts exchange rows where it
looks up some of these (`look_up`), and whole tables where it reads one.

A tower cannot take part in a collective: towers run side by side, more on one host than
on another. So look-ups are a phase of their own, in which home joins the numbers of
this host's towers, and hands each tower its rows. Where all hosts look up the same, all
ask for them.
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
    """What stands behind a table of which each host has some rows.

    Of its gradients, each host has those of its own shards, and behind them what stands
    in for all others: up to the towers' sum that is the gradient of the whole table,
    and then the norm of what the other hosts apply.

    Attributes:
        ends: Where the rows of each host end.
        own_rows: The rows of this host.
    """

    elsewhere = stands_in = True
    gathered_by_use = False

    def __init__(self, *arguments: Any):
        """Takes what `SpreadVariable` does; the parts of each host are rows."""
        super().__init__(*arguments)
        width, first = self.shape[1], self.hosts.index
        self.ends = np.array([of_host[-1].stop // width for of_host in self.parts])
        self.start = self.parts[first][0].start // width
        own = int(self.ends[first]) - self.start
        self.own_rows = ShardedVariable(self.shards, [own, width], 0)

    def is_given(self, gradient: Any) -> bool:
        """Tells whether hosts `give` a gradient, and do not add it for all."""
        del gradient
        return True

    @staticmethod
    def give(
        hosts: World, tables: Sequence["SpreadTable"], gradients: Sequence[Any]
    ) -> list[list[Any]]:
        """Gives gradients of tables to the hosts that have their rows; see `give`."""
        return give(hosts, tables, gradients)

    @property
    def ids_type(self) -> tf.DType:
        """The type in which numbers of its rows travel."""
        return tf.int32 if self.shape[0] < 2**31 else tf.int64

    @functools.cached_property
    def stand_in(self) -> tf.Variable:
        """What a step is traced with instead of the table: it has no value."""
        return without_value(self, HOST)

    def gradients_of(self, gradient: Any) -> list[Any]:
        """See `ShardedVariable`."""
        return [None] * len(self.shards) + [gradient]

    def whole_gradient(self, parts: Sequence[Any]) -> Any:
        """See `ShardedVariable`."""
        return parts[-1]

    def parts_of(self, gradient: tf.Tensor | tf.IndexedSlices) -> list[Any]:
        """Makes gradients of this host's shards of a sum that all hosts have.

        Returns:
            Those, and behind them the norm of what the other hosts apply.
        """
        last = self.start + self.own_rows.shape[0]
        if isinstance(gradient, tf.IndexedSlices):
            ids = gradient.indices
            own = (ids >= self.start) & (ids < last)
            values, ids = (tf.boolean_mask(t, own) for t in (gradient.values, ids))
            mine = tf.IndexedSlices(values, ids - self.start, gradient.dense_shape)
            others = tf.boolean_mask(gradient.values, ~own)
        else:
            mine = gradient[self.start : last]
            others = tf.concat([gradient[: self.start], gradient[last:]], 0)
        # The largest of nothing is no number.
        others = tf.concat([tf.reshape(others, [-1]), tf.zeros([1], others.dtype)], 0)
        return [*self.own_rows.split(mine), sharded.norm(others)]

    def look_up_own(self, ids: tf.Tensor) -> tf.Tensor:
        """Looks up rows of this host."""
        ids = ids - self.start
        rows = self.own_rows.look_up(ids)
        return self.own_rows.join(ids, [each for each, _ in rows])


def refusal(plan: Any, way: str) -> str | None:
    """Says, in words, why several hosts of a `Plan` divide no table, if they do not."""
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

    With "rows" these are all tables, and with "auto" those that are larger than what
    one device would have of all variables. All hosts call it together, and get the
    first host's values.

    Args:
        model: The model.
        plan: The `Plan`.
        way: One of `tables.WAYS`, but for "none".
        optimizer: What has slots of them, if anything has.

    Returns:
        The tables; none with one host.
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
    """For each host, the part of each of its towers: as many rows, or one more."""
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
    behind = value_behind(variable)
    if not isinstance(behind, SpreadVariable) or len(behind.shards) != len(parts):
        return False
    return all(
        tuple(shard.shape) == part.shape and shard.device.endswith(device)
        for shard, part, device in zip(behind.shards, parts, devices, strict=True)
    )


def _spread(variable, parts, hosts, devices):
    old = value_behind(variable)
    whole = old.numpy()
    if not isinstance(old, SpreadVariable):
        (whole,) = hosts.broadcast([tf.constant(whole)], "values of tables")
        whole = whole.numpy()
    flat, mine = whole.reshape(-1), parts[hosts.index]
    shards = [
        variable_like(flat[part.start : part.stop].reshape(part.shape), device, old)
        for part, device in zip(mine, devices, strict=True)
    ]
    put_behind(variable, SpreadTable(shards, whole.shape, parts, hosts, old))


def fetch(
    hosts: World,
    spread: Sequence[SpreadTable],
    ids: Sequence[Sequence[tf.Tensor]],
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Fetches rows from the hosts that have them; all hosts call it together.

    Args:
        hosts: The hosts.
        spread: The tables.
        ids: For each table, vectors of the numbers of rows that are looked up.

    Returns:
        For each table, the numbers, each once and in order, and their rows.
    """
    count = len(spread)

    def ask(*arrays):
        unique = [*map(np.unique, arrays)]
        parts = [
            np.split(each, np.searchsorted(each, table.ends[:-1]))
            for each, table in zip(unique, spread, strict=True)
        ]
        asked = _exchange(hosts, parts, "rows that are looked up")
        counts = [
            [[part.size for part in of_table] for of_table in each]
            for each in (parts, asked)
        ]
        joined = [np.concatenate(of_table) for of_table in asked]
        return [*unique, *joined, np.array(counts, np.int64)]

    def answer(counts, *arrays):
        mine, others = counts
        parts = [
            np.split(each, np.cumsum(of_table)[:-1])
            for each, of_table in zip(arrays, others, strict=True)
        ]
        sizes = mine.T * [table.shape[1] for table in spread]
        found = _exchange(hosts, parts, "rows of tables", sizes)
        return [*map(np.concatenate, found)]

    with tf.device(HOST), tf.name_scope("fetch"):
        wanted = [
            tf.concat([tf.cast(each, table.ids_type) for each in of_table], 0)
            for table, of_table in zip(spread, ids, strict=True)
        ]
        types = [table.ids_type for table in spread]
        *asked, counts = hosts.meet(ask, wanted, [*types, *types, tf.int64])
        for each in asked:
            each.set_shape([None])
        pairs = zip(spread, asked[count:], strict=True)
        rows = [table.look_up_own(each) for table, each in pairs]
        types = [table.dtype for table in spread]
        found = hosts.meet(answer, [counts, *rows], types)
        for each, table in zip(found, spread, strict=True):
            each.set_shape([None, table.shape[1]])
        return [*zip(asked[:count], found, strict=True)]


def look_up(
    hosts: World,
    spread: Sequence[SpreadTable],
    ids: Sequence[Sequence[tf.Tensor]],
) -> list[list[tf.Tensor]]:
    """Looks up rows, whichever host has them; all hosts call it together.

    Args:
        hosts: The hosts.
        spread: The tables; one may come more than once.
        ids: For each, tensors of numbers of rows, of any shape.

    Returns:
        For each of those tensors, a row for each number.
    """
    unique = [*{id(table): table for table in spread}.values()]
    with tf.device(HOST):
        wanted = [
            [
                tf.reshape(tf.cast(each, table.ids_type), [-1])
                for other, of_other in zip(spread, ids, strict=True)
                for each in (of_other if other is table else ())
            ]
            for table in unique
        ]
        fetched = dict(zip(map(id, unique), fetch(hosts, unique, wanted), strict=True))
        return [
            [_rows_of(*fetched[id(table)], each) for each in of_table]
            for table, of_table in zip(spread, ids, strict=True)
        ]


def _rows_of(numbers, rows, ids):
    """Rows for numbers of rows, of those that were fetched."""
    flat = tf.reshape(tf.cast(ids, numbers.dtype), [-1])
    found = tf.gather(rows, tf.searchsorted(numbers, flat))
    shape = tf.concat([tf.shape(ids), [rows.shape[1]]], 0)
    return tf.ensure_shape(tf.reshape(found, shape), [*ids.shape, rows.shape[1]])


def give(
    hosts: World, spread: Sequence[SpreadTable], gradients: Sequence[Any]
) -> list[list[Any]]:
    """Gives gradients to the hosts that have the rows; all hosts call it together.

    Args:
        hosts: The hosts.
        spread: The tables.
        gradients: This host's gradient of each whole table, dense or sparse.

    Returns:
        For each table, the sums over hosts: those of this host's shards, and the norm
        of all others. Duplicates of rows stay apart, those of the first host first.
    """
    sparse = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
    with tf.device(HOST), tf.name_scope("give"):
        found = {
            i: _give_dense(hosts, table, gradients[i])
            for i, table in enumerate(spread)
            if i not in sparse
        }
        if sparse:
            of_sparse = [[each[i] for i in sparse] for each in (spread, gradients)]
            found |= dict(zip(sparse, _give_rows(hosts, *of_sparse), strict=True))
    return [found[i] for i in range(len(spread))]


def _give_rows(hosts, spread, gradients):
    count = len(spread)

    def send(*arrays):
        parts, squares = [], []
        for table, ids, values in zip(
            spread, arrays[:count], arrays[count:], strict=True
        ):
            owners = np.searchsorted(table.ends, ids, side="right")
            places = [np.flatnonzero(owners == k) for k in range(hosts.count)]
            parts += [[each[mine] for mine in places] for each in (ids, values)]
            squares.append([*map(_square, parts[-1])])
        # All hear what each owner gets, as the norm is that of all gradients.
        parts.append([np.array(squares)] * hosts.count)
        *found, squares = _exchange(hosts, parts, "gradients of rows")
        others = np.delete(np.sum(squares, axis=0), hosts.index, axis=1)
        norms = np.sqrt(others.sum(axis=1))
        # A finite one has to stay finite.
        most = np.where(np.isfinite(norms), np.finfo(np.float32).max, np.inf)
        norms = np.minimum(norms, most).astype(np.float32)
        return [*map(np.concatenate, found), norms]

    inputs, types = [], []
    for table, gradient in zip(spread, gradients, strict=True):
        inputs.append(tf.cast(gradient.indices, table.ids_type))
        types += [table.ids_type, gradient.values.dtype]
    inputs += [gradient.values for gradient in gradients]
    *rows, norms = hosts.meet(send, inputs, [*types, tf.float32])
    norms = tf.unstack(tf.ensure_shape(norms, [count]))
    given = []
    for k, table in enumerate(spread):
        places, values = rows[2 * k : 2 * k + 2]
        places.set_shape([None])
        values.set_shape([None, table.shape[1]])
        shape = tf.constant(table.own_rows.shape.as_list(), places.dtype)
        mine = tf.IndexedSlices(values, places - table.start, shape)
        given.append([*table.own_rows.split(mine), norms[k]])
    return given


def _give_dense(hosts, table, gradient):
    gradient = tf.ensure_shape(gradient, table.shape)
    starts = [0, *table.ends[:-1]]
    parts = [
        [tf.reshape(gradient[start:end], [-1])]
        for start, end in zip(starts, table.ends, strict=True)
    ]
    (mine,) = hosts.reduce_scatter(parts, "gradients of tables")
    mine = tf.reshape(mine, table.own_rows.shape)
    norms = hosts.stack(sharded.norm(mine), "norms of gradients")
    others = tf.concat([norms[: hosts.index], norms[hosts.index + 1 :]], 0)
    return [*table.own_rows.split(mine), sharded.norm(others)]


def _exchange(hosts, parts, purpose, sizes=None):
    """Sends arrays to hosts; `sizes` is as for `World.all_to_all`.

    `parts` has for each array a list of what each host gets of it. Returns the same, of
    what each host has sent.
    """
    sent = [
        [np.ravel(part) for part in of_host] for of_host in zip(*parts, strict=True)
    ]
    received = hosts.all_to_all(sent, purpose, sizes)
    return [
        [
            each.reshape(-1, *part.shape[1:])
            for each, part in zip(of_array, like, strict=True)
        ]
        for of_array, like in zip(zip(*received, strict=True), parts, strict=True)
    ]


def _square(values):
    # A product would wake the threads of BLAS, for longer than it takes to add.
    return np.square(values.astype(np.float64)).sum()
