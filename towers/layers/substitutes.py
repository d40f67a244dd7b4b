"""Replaces operations of Keras 3 while a step is traced, with the same results.

Some become TensorFlow's fused kernels, some become operations that GPUs have, look-ups
of an `Embedding` read the rows that they need instead of the whole table, and gradients
leave out what is known of shapes.

Each operation is a pass over memory. The moments of a batch need several passes over
the activations: `FusedBatchNormV3` (cuDNN's on a GPU) needs one, forward and backward.
A step of SGD with momentum needs several passes over the parameters:
`ResourceApplyKerasMomentum` needs one. Adam's kernel is not used: it computes
1 - beta_2 in float32, with an error of 5e-5.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.devices.names import is_gpu
from towers.keras_adapter.graphs import (
    BROADCAST_AXES,
    GRADIENT_FUNCTION,
    is_vectorized,
    made_in,
)
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

# The smallest epsilon that cuDNN accepts.
_LEAST_EPSILON = 1.001e-5
# Types that kernels for CPUs and GPUs exist for; statistics are float32 in all of them.
_IMAGES = tf.float32, tf.float16, tf.bfloat16


@contextlib.contextmanager
def batch_normalization() -> Iterator[None]:
    """Makes BatchNormalization layers use the fused kernel where possible.

    The kernel applies to images in training: normalized over the last axis, with
    float32 variables, without mask, renormalization or synchronization. Images of 16
    bits are normalized in float32, as in Keras. In all other cases, and in subclasses,
    Keras's own code runs.
    """
    with patched(BATCH_NORMALIZATION_CALL, _call):
        yield


@contextlib.contextmanager
def updates() -> Iterator[None]:
    """Makes updates compute only once what all variables share.

    Keras's optimizers read the step count and the learning rate for each variable, and
    compute with the values. If these are read once, TensorFlow recognizes equal
    computations, and runs one of them. A subclass with an `update_step` of its own
    might assign these variables, and still reads them itself. Adam's shared
    computations are traced once: they are half of its 34 operations for a variable,
    which the first step would have to merge.

    There are no replicas to add gradients of, which Keras would send through one
    operation, on one device.

    Keras's SGD with momentum updates a variable in one kernel, for float32 and dense
    gradients. Keras's Adagrad takes the root of a full table for a sparse gradient,
    where the gradient's rows suffice. In all other cases, and in subclasses, Keras's
    own code runs.
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
    """Makes Keras's argmax compare zeros by operations that GPUs have.

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
        index = tf.argmax(x, axis, output_type=tf.int32)
        return tf.expand_dims(index, axis) if keepdims else index
    index = tf.argmax(tf.reshape(x, [-1]), output_type=tf.int32)
    return tf.reshape(index, [1] * x.shape.rank) if keepdims else index


def _call(keras_call, layer, inputs, training=None, mask=None):
    # Towers run as replicas if they communicate, on this host or with others.
    replica = tf.distribute.has_strategy()
    if training and layer.synchronized and mask is not None and replica:
        # Keras would ignore the other towers.
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
    # Shared values hold for one update.
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
        # Keras's operations would broadcast.
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
        # Keras's own operations lock the variable as well.
        use_locking=True,
    )


def _adam_step(shared, keras_update_step, optimizer, gradient, variable, learning_rate):
    if not (
        type(optimizer) in (keras.optimizers.Adam, keras.optimizers.AdamW)
        and not optimizer.amsgrad
        and isinstance(gradient, tf.Tensor)
        and not tf.executing_eagerly()
        and variable.dtype == gradient.dtype
        # Keras's operations would broadcast.
        and gradient.shape == variable.shape
    ):
        return keras_update_step(optimizer, gradient, variable, learning_rate)
    # Each branch, and each device with shards, has its own.
    graph, device = tf.compat.v1.get_default_graph(), variable.device
    cache_key = graph, device, optimizer, id(learning_rate), gradient.dtype
    if cache_key not in shared:
        factors = _of_adam_step(optimizer, gradient.dtype, learning_rate)
        # The list keeps the learning rate alive, so that its `id` is not reused.
        shared[cache_key] = [*factors, learning_rate]
    alpha, rate_1, rate_2, epsilon, _ = shared[cache_key]
    mean, squares = (slot.value for slot in moments(optimizer, variable))
    # In the order of Keras's operations.
    mean.assign_add((gradient - mean) * rate_1, read_value=False)
    squares.assign_add((tf.square(gradient) - squares) * rate_2, read_value=False)
    change = mean * alpha / (tf.sqrt(squares) + epsilon)
    variable.assign_sub(change, read_value=False)


def _of_adam_step(optimizer, dtype, learning_rate):
    """Returns the factors of Adam's update that do not depend on the variable."""
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
    # As in Keras, duplicates are added one by one before the root is taken.
    squares.scatter_add(tf.IndexedSlices(tf.square(values), rows))
    root = tf.sqrt(tf.gather(squares, rows) + optimizer.epsilon)
    change = tf.cast(learning_rate, values.dtype) * values / root
    variable.scatter_sub(tf.IndexedSlices(change, rows))


@contextlib.contextmanager
def gradients(rows_of: Callable[[tf.Tensor], int | None]) -> Iterator[None]:
    """Makes gradients leave out arithmetic of shapes where tensors have the same rows.

    A step is traced with an unknown number of rows. TensorFlow then cannot tell that
    the inputs of a sum or a product have the same rows. In each step, its gradients
    compute the axes over which an input was broadcast, sum over these axes, which are
    none, and reshape. That is a third of the operations of a transformer, which are
    traced, copied for each tower, optimized, and run. The values are the same without.

    Args:
        rows_of: Returns how many rows a tensor has per example, along its first axis;
            `None` if unknown.
    """
    with (
        patched(BROADCAST_AXES, functools.partial(_broadcast_axes, rows_of)),
        patched(GRADIENT_FUNCTION, functools.partial(_gradient_function, rows_of)),
    ):
        yield


def _have_same_rows(rows_of, x, y):
    """Checks whether two tensors of the same rank have the same rows."""
    if x.shape.rank is None or not x.shape.rank == y.shape.rank != 0:
        return False
    rows = rows_of(x)
    return rows is not None and rows == rows_of(y)


def _broadcast_axes(rows_of, tf_axes, x, y, grad=None):
    """Returns the axes to sum gradients over; see `BROADCAST_AXES`."""
    if not _have_same_rows(rows_of, x, y):
        return tf_axes(x, y, grad)
    pairs = [*enumerate(zip(x.shape, y.shape, strict=True))][1:]
    if any(None in sizes and 1 not in sizes for _, sizes in pairs):
        # An unknown size may be 1.
        return tf_axes(x, y, grad)
    of_x = [axis for axis, (size, other) in pairs if size == 1 != other]
    of_y = [axis for axis, (size, other) in pairs if other == 1 != size]
    return tuple(
        (tf.shape(tensor) if axes else None, axes, bool(axes))
        for tensor, axes in ((x, of_x), (y, of_y))
    )


def _gradient_function(rows_of, tf_lookup, registry, kind):
    """Returns the function that computes the gradient of a kind of operation."""
    of_kind = tf_lookup(registry, kind)
    if kind == "Mean":
        return functools.partial(_of_mean, of_kind, tf_lookup(registry, "Sum"))
    if kind in ("BatchMatMulV2", "BatchMatMulV3"):
        plain = tf_lookup(registry, "BatchMatMul")
        return functools.partial(_of_product, rows_of, of_kind, plain)
    return of_kind


def _of_mean(tf_of_mean, tf_of_sum, op, grad):
    """Returns the gradient of a mean, which is over a known number of values."""
    shape, axes = op.inputs[0].shape, tf.get_static_value(op.inputs[1])
    if shape.rank is None or axes is None:
        return tf_of_mean(op, grad)
    sizes = [shape[int(axis)] for axis in np.reshape(axes, [-1])]
    if None in sizes:
        return tf_of_mean(op, grad)
    of_sum, _ = tf_of_sum(op, grad)
    return of_sum / tf.constant(math.prod(sizes), of_sum.dtype), None


def _of_product(rows_of, tf_of_product, tf_of_plain, op, grad):
    """Returns the gradients of a product of matrices, which broadcasts nothing."""
    x, y = op.inputs
    if _have_same_rows(rows_of, x, y) and x.shape.rank > 2:
        batch_axes = zip(x.shape[1:-2], y.shape[1:-2], strict=True)
        if all(size == other is not None for size, other in batch_axes):
            return tf_of_plain(op, grad)
    return tf_of_product(op, grad)


# Embeddings that stay at home: towers look up only the rows that they need.
#
# A tower gets the values of variables. For an embedding, this would be the whole table
# in each step: TensorFlow copies a table that is updated row by row whenever it is
# read, and a tower on another device needs a copy. While a step is traced, Keras's
# `Embedding` therefore looks up its rows in the variable itself, on the device of the
# variable, or in its shards, on their devices.


def tables(model: keras.Model) -> set[int]:
    """Finds the tables of a built model's plain Embedding layers.

    Returns the `id`s of the variables whose rows these layers are known to look up.
    """
    return {
        id(embedding_table(layer))
        for layer in layers_of(model)
        if _is_plain(layer) and embedding_table(layer).trainable
    }


@contextlib.contextmanager
def in_variables() -> Iterator[dict[str, tf.Variable]]:
    """Makes Embedding layers look up rows in the variable without reading it.

    Yields the table of each operation of the graph that looks up rows, or computes
    their indices, by its name. Look-ups in shards are not included.
    """
    lookups, graph = {}, tf.compat.v1.get_default_graph()
    with patched(EMBEDDING_CALL, functools.partial(_look_up, graph, lookups)):
        yield lookups


def _look_up(graph, lookups, keras_call, layer, inputs):
    # In a stateless scope, the variable may have a value from outside.
    own_value = stateless_scope_here() is None
    if not (own_value and _is_plain(layer) and isinstance(inputs, tf.Tensor)):
        return keras_call(layer, inputs)
    table = value_behind(embedding_table(layer))
    if (cut := sharded.of(embedding_table(layer))) is not None:
        flat = tf.reshape(not_negative(inputs, table), [-1])
        if cut.axis == 0 and is_vectorized():
            looked_up = cut.look_up_alike(flat)
        else:
            looked_up = cut.join(flat, [rows for rows, _ in cut.look_up(flat)])
        shape = [*keras.ops.shape(inputs), table.shape[1]]
        return keras.ops.cast(tf.reshape(looked_up, shape), layer.compute_dtype)
    with made_in(graph) as created:
        rows = tf.gather(table, not_negative(inputs, table))
    lookups.update((op.name, table) for op in created)
    return keras.ops.cast(rows, layer.compute_dtype)


def not_negative(ids: tf.Tensor, table: tf.Variable) -> tf.Tensor:
    """Returns row indices of a table from 0; negative ones count from the end.

    The result is int32 or int64.
    """
    # On GPUs, TensorFlow computes int32 in host memory.
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
