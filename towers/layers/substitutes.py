"""Keras's numbers by TensorFlow's fused kernels, where Keras 3 goes op by op.

Each op is a pass over memory. A batch's moments are several over the activations:
`FusedBatchNormV3` (cuDNN's on a GPU) needs one, forward and backward. A step of SGD
with momentum is several over the parameters: `ResourceApplyKerasMomentum` is one.
Adam's kernel is not used: it computes 1 - beta_2 in float32, which is 5e-5 off.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.devices.names import is_gpu
from towers.keras_adapter.graphs import is_vectorized, made_in
from towers.keras_adapter.layers import (
    ARGMAX,
    BATCH_NORMALIZATION_CALL,
    EMBEDDING_CALL,
    embedding_table,
    is_keras_own,
    layers_of,
    renormalizes,
    stateless_scope_here,
)
from towers.keras_adapter.optimizers import (
    ADAGRAD_UPDATE_STEP,
    ADAM_UPDATE_STEP,
    APPLY_GRADIENTS,
    SGD_UPDATE_STEP,
    SUM_OVER_REPLICAS,
    accumulator,
    iterations_variable,
    learning_rate_variable,
    moments,
    slot_index,
)
from towers.keras_adapter.patching import patched
from towers.keras_adapter.variables import read_once, value_behind
from towers.layers import sharded

# cuDNN accepts no smaller one.
_LEAST_EPSILON = 1.001e-5
# There are kernels for these, on CPUs and GPUs; statistics are float32 in all of them.
_IMAGES = tf.float32, tf.float16, tf.bfloat16


@contextlib.contextmanager
def batch_normalization() -> Iterator[None]:
    """Inside, Keras's BatchNormalization layers use the fused kernel where it fits.

    It fits where images are normalised in training: by the last axis, with float32
    variables, without mask, renormalisation or synchronisation. Images of 16 bits are
    normalised in float32, as Keras does it. Elsewhere, and in subclasses, the layer is
    Keras's own.
    """
    with patched(BATCH_NORMALIZATION_CALL, _call):
        yield


@contextlib.contextmanager
def updates() -> Iterator[None]:
    """Inside, an update does once what is the same for all variables.

    Keras's optimizers read the step count and the learning rate for each variable, and
    compute with them. Where they are read once, TensorFlow sees that it is all the
    same, and computes it once. A subclass that has an `update_step` of its own might
    assign them, and reads for itself. Adam's are traced once: they are half of its 34
    operations for a variable, of which the first step would have to get rid.

    There are no replicas to add gradients of, which Keras would send through one
    operation, on one device.

    Keras's SGD with momentum updates a variable in one kernel. It fits float32 and
    dense gradients. Keras's Adagrad takes the root of all of a table for a sparse
    gradient, where its rows are enough. Elsewhere, and in subclasses, the optimizer is
    Keras's own.
    """
    shared: dict[Any, list[Any]] = {}
    with (
        patched(APPLY_GRADIENTS, functools.partial(_apply_gradients, shared)),
        patched(SUM_OVER_REPLICAS, _as_they_are),
        patched(ADAM_UPDATE_STEP, functools.partial(_adam_step, shared)),
        patched(SGD_UPDATE_STEP, _update_step),
        patched(ADAGRAD_UPDATE_STEP, _adagrad_step),
    ):
        yield


@contextlib.contextmanager
def argmax() -> Iterator[None]:
    """Inside, Keras's argmax tells zeros apart by operations that GPUs have.

    Keras takes -0.0 for less than 0.0. It reads the sign from the bits, as integers,
    which TensorFlow compares on the host: a GPU would send all outputs there.
    """
    with patched(ARGMAX, _argmax):
        yield


def _argmax(keras_argmax, x, axis=None, keepdims=False):
    x = tf.convert_to_tensor(x)
    if not x.dtype.is_floating or x.shape.rank in (0, None):
        return keras_argmax(x, axis=axis, keepdims=keepdims)
    if x.dtype.size < 4:
        x = tf.cast(x, tf.float32)
    negative_zero = tf.logical_and(tf.equal(x, 0), tf.less(tf.math.reciprocal(x), 0))
    x = tf.where(negative_zero, -np.finfo(x.dtype.as_numpy_dtype).tiny, x)
    if axis is not None:
        found = tf.argmax(x, axis, output_type=tf.int32)
        return tf.expand_dims(found, axis) if keepdims else found
    found = tf.argmax(tf.reshape(x, [-1]), output_type=tf.int32)
    return tf.reshape(found, [1] * x.shape.rank) if keepdims else found


def _call(keras_call, layer, inputs, training=None, mask=None):
    # Towers run as replicas where they talk to others, of this host or another.
    replica = tf.distribute.has_strategy()
    if training and layer.synchronized and mask is not None and replica:
        # Keras would leave the other towers out.
        raise ValueError(
            f"The layer '{layer.name}' has synchronized=True and gets a mask, with "
            "which Keras normalises each local batch by itself; use "
            "synchronized=False, or remove the mask."
        )
    if not (training and layer.trainable and mask is None and _fits(layer, inputs)):
        return keras_call(layer, inputs, training=training, mask=mask)
    mean, variance = layer.moving_mean.value, layer.moving_variance.value
    gamma = layer.gamma.value if layer.scale else tf.ones_like(mean)
    beta = layer.beta.value if layer.center else tf.zeros_like(mean)
    outputs, batch_mean, batch_variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=inputs,
        scale=gamma,
        offset=beta,
        mean=[],
        variance=[],
        epsilon=layer.epsilon,
        is_training=True,
    )
    # The kernel returns the unbiased variance; Keras's is the biased one.
    channels, size = inputs.shape[-1], inputs.shape.num_elements()
    if size is None:
        size = tf.cast(tf.size(inputs), tf.float32)
    batch_variance *= 1 - channels / size
    keep = layer.momentum
    layer.moving_mean.assign(mean * keep + batch_mean * (1 - keep))
    layer.moving_variance.assign(variance * keep + batch_variance * (1 - keep))
    return outputs


def _fits(layer: keras.layers.BatchNormalization, inputs: Any) -> bool:
    return (
        type(layer) is keras.layers.BatchNormalization
        and isinstance(inputs, tf.Tensor)
        and inputs.dtype in _IMAGES
        and inputs.dtype == layer.compute_dtype
        and layer.variable_dtype == "float32"
        and inputs.shape.rank == 4
        and layer.axis in (-1, 3)
        and layer.epsilon >= _LEAST_EPSILON
        and not renormalizes(layer)
        and not layer.synchronized
    )


def _apply_gradients(shared, keras_apply_gradients, optimizer, gradients, variables):
    # What was computed of the step count is that of one update.
    shared.clear()
    scalars = []
    if is_keras_own(type(optimizer).update_step):
        scalars = [iterations_variable(optimizer), learning_rate_variable(optimizer)]
    with read_once([s.value for s in scalars if isinstance(s, keras.Variable)]):
        sharded.by_device(keras_apply_gradients, optimizer, gradients, variables)


def _as_they_are(keras_sum, optimizer, gradients_and_variables):
    del keras_sum, optimizer
    return gradients_and_variables


def _update_step(keras_update_step, optimizer, gradient, variable, learning_rate):
    rate = tf.cast(learning_rate, tf.float32)
    if not (
        type(optimizer) is keras.optimizers.SGD
        and optimizer.momentum
        and isinstance(gradient, tf.Tensor)
        and variable.dtype == tf.float32
        # Keras's operations broadcast.
        and gradient.shape == variable.shape
        and rate.shape.rank == 0
    ):
        return keras_update_step(optimizer, gradient, variable, learning_rate)
    momentum = optimizer.momentums[slot_index(optimizer, variable)]
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=momentum.value.handle,
        lr=rate,
        grad=tf.cast(gradient, tf.float32),
        momentum=optimizer.momentum,
        use_nesterov=optimizer.nesterov,
        # Each of Keras's own operations locks the variable, too.
        use_locking=True,
    )


def _adam_step(shared, keras_update_step, optimizer, gradient, variable, learning_rate):
    if not (
        type(optimizer) in (keras.optimizers.Adam, keras.optimizers.AdamW)
        and not optimizer.amsgrad
        and isinstance(gradient, tf.Tensor)
        and not tf.executing_eagerly()
        and variable.dtype == gradient.dtype
        # Keras's operations broadcast.
        and gradient.shape == variable.shape
    ):
        return keras_update_step(optimizer, gradient, variable, learning_rate)
    # Branches, and devices that have shards, each have theirs.
    graph, device = tf.compat.v1.get_default_graph(), variable.device
    of_step = graph, device, optimizer, id(learning_rate), gradient.dtype
    if of_step not in shared:
        made = _of_adam_step(optimizer, gradient.dtype, learning_rate)
        # The rate stays, so that no other one gets its `id`.
        shared[of_step] = [*made, learning_rate]
    alpha, rate_1, rate_2, epsilon, _ = shared[of_step]
    mean, squares = (each.value for each in moments(optimizer, variable))
    # As Keras does, in the same order.
    mean.assign_add((gradient - mean) * rate_1, read_value=False)
    squares.assign_add((tf.square(gradient) - squares) * rate_2, read_value=False)
    change = mean * alpha / (tf.sqrt(squares) + epsilon)
    variable.assign_sub(change, read_value=False)


def _of_adam_step(optimizer, dtype, learning_rate):
    """What Adam's change of each variable takes that does not depend on it."""
    cast, dtype = keras.ops.cast, dtype.name
    step = cast(optimizer.iterations + 1, dtype)
    power_1 = keras.ops.power(cast(optimizer.beta_1, dtype), step)
    power_2 = keras.ops.power(cast(optimizer.beta_2, dtype), step)
    alpha = cast(learning_rate, dtype) * keras.ops.sqrt(1 - power_2) / (1 - power_1)
    rates = 1 - optimizer.beta_1, 1 - optimizer.beta_2
    return [alpha, *(tf.constant(n, dtype) for n in (*rates, optimizer.epsilon))]


def _adagrad_step(keras_update_step, optimizer, gradient, variable, learning_rate):
    if not (
        type(optimizer) is keras.optimizers.Adagrad
        and isinstance(gradient, tf.IndexedSlices)
        and variable.dtype == gradient.dtype
    ):
        return keras_update_step(optimizer, gradient, variable, learning_rate)
    values, rows = gradient.values, gradient.indices
    squares = accumulator(optimizer, variable).value
    # As Keras does, each duplicate by itself, and then all with the sum of squares.
    squares.scatter_add(tf.IndexedSlices(tf.square(values), rows))
    root = tf.sqrt(tf.gather(squares, rows) + optimizer.epsilon)
    change = tf.cast(learning_rate, values.dtype) * values / root
    variable.scatter_sub(tf.IndexedSlices(change, rows))


# Embeddings that stay at home: towers fetch the rows that they need.
#
# A tower gets the values of variables. For an embedding that would be the whole table
# in each step: TensorFlow copies a table that is updated row by row whenever it is
# read, and a tower on another device needs a copy. So, while a step is traced, Keras's
# `Embedding` looks up its rows in the variable itself, on the device that has it, or in
# its shards, on theirs.


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
