"""Embeddings that stay at home: towers fetch the rows that they need.

A tower gets the values of variables. For an embedding that would be the whole table
in each step: TensorFlow copies a table that is updated row by row whenever it is
read, and a tower on another device needs a copy. So, while a step is traced,
Keras's `Embedding` looks up its rows in the variable itself, on the device that has it,
or in its shards, on theirs.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from towers.devices.names import is_gpu
from towers.keras_adapter.graphs import is_vectorized, made_in
from towers.keras_adapter.layers import (
    EMBEDDING_CALL,
    embedding_table,
    layers_of,
    stateless_scope_here,
)
from towers.keras_adapter.patching import patched
from towers.keras_adapter.variables import value_behind
from towers.layers import sharded


def tables(model: keras.Model) -> set[int]:
    """Finds the tables of a built model's plain Embedding layers.

    Returns the ids of the variables of which these, as far as is seen, look up rows.
    """
    return {
        id(embedding_table(layer))
        for layer in layers_of(model)
        if _is_plain(layer) and embedding_table(layer).trainable
    }


@contextlib.contextmanager
def in_variables() -> Iterator[dict[str, tf.Variable]]:
    """Inside, Embedding layers look up rows in the variable, and do not read it.

    Yields the table of each operation of the graph that looks up rows, or computes
    their numbers, by its name. Look-ups in shards are not in it.
    """
    lookups, graph = {}, tf.compat.v1.get_default_graph()
    with patched(EMBEDDING_CALL, functools.partial(_look_up, graph, lookups)):
        yield lookups


def _look_up(graph, lookups, keras_call, layer, inputs):
    # In a stateless scope, the variable has a value that is not its own.
    own_value = stateless_scope_here() is None
    if not (own_value and _is_plain(layer) and isinstance(inputs, tf.Tensor)):
        return keras_call(layer, inputs)
    table = value_behind(embedding_table(layer))
    if (cut := sharded.of(embedding_table(layer))) is not None:
        flat = tf.reshape(not_negative(inputs, table), [-1])
        if cut.axis == 0 and is_vectorized():
            found = cut.look_up_alike(flat)
        else:
            found = cut.join(flat, [rows for rows, _ in cut.look_up(flat)])
        shape = [*keras.ops.shape(inputs), table.shape[1]]
        return keras.ops.cast(tf.reshape(found, shape), layer.compute_dtype)
    with made_in(graph) as made:
        rows = tf.gather(table, not_negative(inputs, table))
    lookups.update((op.name, table) for op in made)
    return keras.ops.cast(rows, layer.compute_dtype)


def not_negative(ids: tf.Tensor, table: tf.Variable) -> tf.Tensor:
    """Returns indices of a table's rows as Keras reads them: from the end if negative.

    They are in int32, or int64, from 0.
    """
    # GPUs leave it to the host to compute in int32.
    if ids.dtype != tf.int64:
        ids = tf.cast(ids, tf.int64 if is_gpu(table.device) else tf.int32)
    return tf.where(ids < 0, ids + table.shape[0], ids)


def _is_plain(layer: Any) -> bool:
    return (
        type(layer) is keras.layers.Embedding
        and layer.built
        and not layer.lora_enabled
        and layer.quantization_mode is None
    )
