"""Records the layer calls of a step, and finds layers that keep examples apart."""

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.keras_adapter.layers import (
    LAYER_CALL,
    MASK,
    layers_of,
    logits_of,
    tag,
)
from towers.keras_adapter.patching import patched

# Models and layers that run users' code, and layers that mix the examples of a batch.
# These are never trusted: their operations are read one by one.
_READ = (
    keras.Model,
    keras.layers.CutMix,
    keras.layers.Equalization,
    keras.layers.FlaxLayer,
    keras.layers.JaxLayer,
    keras.layers.Lambda,
    keras.layers.MelSpectrogram,
    keras.layers.MixUp,
    # Keras has it since 3.16.
    *filter(None, [getattr(keras.layers, "Mosaic", None)]),
    keras.layers.TFSMLayer,
    keras.layers.TorchModuleWrapper,
)
# Attributes that hold the activation functions of a layer.
_ACTIVATIONS = "activation", "recurrent_activation"
# Activations that normalize or split along the last axis.
_OVER_AN_AXIS = "glu", "log_softmax", "softmax", "sparsemax"
# Attention layers, which take the rows of a matrix for the positions of one sequence.
_OF_SEQUENCES = (
    keras.layers.Attention,
    keras.layers.AdditiveAttention,
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
)
# Constructor arguments that name axes of the inputs.
_AXES = "axis", "axes", "attention_axes"


class LayerCall(NamedTuple):
    """The layer call that made a tensor.

    Attributes:
        inputs: The input tensors of the call.
        packed: Whether the tensor is a component of a ragged or sparse tensor.
        trusted: Whether the layer is known to treat each example by itself.
        layer: The layer, or the loss.
        around: The calls of enclosing layers that returned the same tensor.
    """

    inputs: Sequence[tf.Tensor]
    packed: bool
    trusted: bool
    layer: keras.layers.Layer
    around: "list[LayerCall]"


@contextlib.contextmanager
def recorded_layers() -> Iterator[dict[Any, LayerCall]]:
    """Records the inputs and outputs of layer calls within a context.

    Yields:
        A dictionary from the key of each output tensor to the call that made it.
    """
    calls = {}

    def record(original, layer, *args, **kwargs):
        outputs = original(layer, *args, **kwargs)
        # The masks of the inputs are inputs, too.
        arguments = tf.nest.flatten([args, kwargs])
        masks = [tag(tensor, MASK) for tensor in arguments]
        inputs = [part for _, part in parts([arguments, masks])]
        known = {key(tensor) for tensor in inputs}
        unsynchronized = not any(map(_is_synchronized, layers_of(layer)))
        trusted = unsynchronized and is_trusted(layer, inputs)
        returned = outputs
        if trusted and not {key(part) for _, part in parts(outputs)} & known:
            # A layer that returns its input unchanged did not compute that tensor's
            # logits.
            returned = [outputs, _logits(outputs)]
        for packed, output in parts(returned):
            # A tensor that is returned unchanged keeps its call. Where untrusted layers
            # are nested, the innermost call says most.
            if key(output) in known:
                continue
            call = LayerCall(inputs, packed, trusted, layer, [])
            inner = calls.get(key(output))
            if inner is None or call.trusted:
                # A trusted layer vouches for its sublayers.
                calls[key(output)] = call
            else:
                inner.around.append(call)
        return outputs

    with patched(LAYER_CALL, record):
        yield calls


def _is_synchronized(layer):
    return getattr(layer, "synchronized", False)


def _logits(outputs):
    """Returns the inputs of output sigmoids and softmaxes, which losses may take."""
    return [*map(logits_of, tf.nest.flatten(outputs))]


def key(tensor: tf.Tensor) -> tuple[int, str]:
    """Returns the key of a tensor; tensor names are unique within one graph only."""
    return id(tensor.graph), tensor.name


def parts(nest: Any) -> Iterator[tuple[bool, tf.Tensor]]:
    """Yields (packed, tensor) for each symbolic tensor or component in a nest."""
    for leaf in tf.nest.flatten(nest):
        packed = isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
        for part in tf.nest.flatten(leaf, expand_composites=True):
            if tf.is_symbolic_tensor(part):
                yield packed, part


# Layers that treat each example by itself.
#
# For Keras's own layers, this is measured: tests/towers/analysis/test_layers.py calls
# each layer with a batch and with parts of that batch, and docs/trust/layers.md sums up
# the results. The operations of all other layers are read one by one; see
# `dependence.py`.


def is_trusted(layer: keras.layers.Layer, inputs: Sequence[tf.Tensor] = ()) -> bool:
    """Checks whether a layer and its sublayers treat each example by itself.

    Args:
        layer: The layer.
        inputs: The input tensors, with one row an example; empty if unknown.
    """
    if is_own(layer):
        return True
    # A mask has fewer axes than its tensor.
    ranks = [t.shape.rank for t in inputs if t.dtype != tf.bool]
    return (
        type(layer).__module__.startswith("keras.")
        and not isinstance(layer, _READ)
        and all(_is_apart(getattr(layer, name, None), ranks) for name in _ACTIVATIONS)
        and _fits(layer, ranks)
        and _keeps_rows_apart(layer, ranks)
        and not _is_as_long_as_the_longest(layer)
        and all(isinstance(cell, keras.layers.Layer) for cell in _cells(layer))
        and all(map(is_trusted, layers_of(layer, include_self=False, recursive=False)))
    )


def is_own(layer: keras.layers.Layer | None) -> bool:
    """Checks whether a layer takes each tower's rows for the batch, by declaration."""
    return getattr(layer, "takes_rows_for_batch", False)


def _is_apart(activation, ranks):
    """Checks whether an activation is Keras's, and keeps the examples apart."""
    if activation is None or isinstance(activation, keras.layers.Layer):
        return True  # checked as a sublayer
    keras_own = (getattr(activation, "__module__", None) or "").startswith("keras.")
    name = getattr(activation, "__name__", "")
    return keras_own and not (name in _OVER_AN_AXIS and {1, None} & {*ranks})


def _cells(layer):
    """Returns the cells of a recurrent layer, which need not be layers."""
    cell = getattr(layer, "cell", None)
    return [*([] if cell is None else [cell]), *getattr(layer, "cells", ())]


def _is_as_long_as_the_longest(layer):
    if not isinstance(layer, keras.layers.TextVectorization):
        return False
    config = layer.get_config()
    padded = config["output_mode"] == "int" and not config["ragged"]
    return padded and config["output_sequence_length"] is None


def _fits(layer, ranks):
    """Checks whether the inputs have the batch axis where the layer expects it."""
    if isinstance(layer, _OF_SEQUENCES):
        return None not in ranks and all(rank > 2 for rank in ranks)
    if "image_preprocessing" in type(layer).__module__:
        # These layers take a tensor of three axes for a single image.
        return all(rank == 4 for rank in ranks)
    return True


def _keeps_rows_apart(layer, ranks):
    """Checks that no argument of the layer names the batch axis."""
    if isinstance(layer, keras.layers.EinsumDense):
        return _is_over_rows(layer.equation)
    names = _axis_arguments(type(layer))
    if not names:
        return True
    config = layer.get_config()
    axes = [axis for name in names for axis in tf.nest.flatten(config.get(name))]
    return not any(_is_first(axis, ranks) for axis in axes if axis is not None)


def _is_over_rows(equation):
    """Checks whether an einsum keeps the first axis of its input as the batch axis."""
    terms, outputs = equation.replace(" ", "").split("->")
    inputs, kernel = terms.split(",")
    if "..." in equation:
        return inputs.startswith("...") and outputs.startswith("...")
    return inputs[0] == outputs[0] and inputs[0] not in inputs[1:] + kernel


@functools.cache
def _axis_arguments(kind: type) -> tuple[str, ...]:
    arguments = inspect.signature(kind.__init__).parameters
    return tuple(name for name in _AXES if name in arguments)


def _is_first(axis: Any, ranks):
    if axis >= 0:
        return axis == 0
    if not ranks:
        # The input ranks of an inner layer are unknown; a last axis is rarely the batch
        # axis.
        return axis != -1
    return any(rank is None or axis % max(rank, 1) == 0 for rank in ranks)
