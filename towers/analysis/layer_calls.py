"""Remembers the layers that made the tensors of a graph, and their inputs."""

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

# What users write into Keras's classes, and what lets the examples of a batch meet.
_READ = (
    keras.Model,
    keras.layers.CutMix,
    keras.layers.Equalization,
    keras.layers.FlaxLayer,
    keras.layers.JaxLayer,
    keras.layers.Lambda,
    keras.layers.MelSpectrogram,
    keras.layers.MixUp,
    keras.layers.TFSMLayer,
    keras.layers.TorchModuleWrapper,
)
# Attributes with functions that a layer applies.
_ACTIVATIONS = "activation", "recurrent_activation"
# Of these activations, the last axis is one.
_OVER_AN_AXIS = "glu", "log_softmax", "softmax", "sparsemax"
# Of a matrix, they take the rows for the positions of one sequence.
_OF_SEQUENCES = (
    keras.layers.Attention,
    keras.layers.AdditiveAttention,
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
)
# Arguments that name axes of the inputs.
_AXES = "axis", "axes", "attention_axes"


class LayerCall(NamedTuple):
    """The call of a layer that made a tensor.

    Attributes:
        inputs: The tensors that it was called with.
        packed: Whether the tensor is part of a ragged or sparse one.
        trusted: Whether the layer is known to treat each example by itself.
        layer: The layer, or the loss.
        around: The calls of outer layers that have returned the same tensor.
    """

    inputs: Sequence[tf.Tensor]
    packed: bool
    trusted: bool
    layer: keras.layers.Layer
    around: "list[LayerCall]"


@contextlib.contextmanager
def recorded_layers() -> Iterator[dict[Any, LayerCall]]:
    """A context that records the inputs and outputs of layers.

    Yields:
        A dictionary from the key of each returned tensor to the call that made it.
    """
    calls = {}

    def record(original, layer, *args, **kwargs):
        outputs = original(layer, *args, **kwargs)
        # A layer takes the masks of its inputs, too.
        given = tf.nest.flatten([args, kwargs])
        masks = [tag(tensor, MASK) for tensor in given]
        inputs = [part for _, part in parts([given, masks])]
        known = {key(tensor) for tensor in inputs}
        apart = not any(map(_is_synchronized, layers_of(layer)))
        trusted = apart and is_trusted(layer, inputs)
        made = outputs
        if trusted and not {key(part) for _, part in parts(outputs)} & known:
            # A layer that passes its input through has not made its logits.
            made = [outputs, _logits(outputs)]
        for packed, output in parts(made):
            # A tensor that is passed through keeps its call. Of nested unknown layers,
            # the innermost one tells most.
            if key(output) in known:
                continue
            call = LayerCall(inputs, packed, trusted, layer, [])
            inner = calls.get(key(output))
            if inner is None or call.trusted:
                # The parts of a known layer need not be known.
                calls[key(output)] = call
            else:
                inner.around.append(call)
        return outputs

    with patched(LAYER_CALL, record):
        yield calls


def _is_synchronized(layer):
    return getattr(layer, "synchronized", False)


def _logits(outputs):
    """Returns the inputs of sigmoids and softmaxes, which a loss takes instead."""
    return [*map(logits_of, tf.nest.flatten(outputs))]


def key(tensor: tf.Tensor) -> tuple[int, str]:
    """Returns a key for a tensor: its name is unique in one graph only."""
    return id(tensor.graph), tensor.name


def parts(nest: Any) -> Iterator[tuple[bool, tf.Tensor]]:
    """Yields the tensors of a nest, and (with True) components of packed tensors."""
    for leaf in tf.nest.flatten(nest):
        packed = isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
        for part in tf.nest.flatten(leaf, expand_composites=True):
            if tf.is_symbolic_tensor(part):
                yield packed, part


# Tells of which layers it is known that they treat each example by itself.
#
# Of Keras's own it is known by measurement: tests/towers/analysis/test_layers.py calls
# each of them with a batch and with its parts; docs/layers.md is the table of results.
# All other layers are read operation by operation; see `dependence.py`.


def is_trusted(layer: keras.layers.Layer, inputs: Sequence[tf.Tensor] = ()) -> bool:
    """Whether a layer and its parts are known to treat each example by itself.

    Args:
        layer: The layer.
        inputs: The tensors that it is called with, one row an example; none if they
            are not known.
    """
    if is_own(layer):
        return True
    # A mask has fewer axes than what it belongs to.
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
    """Whether each tower computes a layer with its own rows, whatever that does."""
    return getattr(layer, "takes_rows_for_batch", False)


def _is_apart(activation, ranks):
    """Whether an activation is Keras's, and by none but its last axis."""
    if activation is None or isinstance(activation, keras.layers.Layer):
        return True  # as a part of the layer, it is looked at by itself
    keras_own = (getattr(activation, "__module__", None) or "").startswith("keras.")
    name = getattr(activation, "__name__", "")
    return keras_own and not (name in _OVER_AN_AXIS and {1, None} & {*ranks})


def _cells(layer):
    """Yields the cells of a recurrent layer, which need not be layers."""
    cell = getattr(layer, "cell", None)
    return [*([] if cell is None else [cell]), *getattr(layer, "cells", ())]


def _is_as_long_as_the_longest(layer):
    if not isinstance(layer, keras.layers.TextVectorization):
        return False
    config = layer.get_config()
    padded = config["output_mode"] == "int" and not config["ragged"]
    return padded and config["output_sequence_length"] is None


def _fits(layer, ranks):
    """Whether the inputs have the examples' axis where the layer expects it."""
    if isinstance(layer, _OF_SEQUENCES):
        return None not in ranks and all(rank > 2 for rank in ranks)
    if "image_preprocessing" in type(layer).__module__:
        # It takes three axes for those of one picture.
        return all(rank == 4 for rank in ranks)
    return True


def _keeps_rows_apart(layer, ranks):
    """Whether no argument of the layer names the examples' axis."""
    if isinstance(layer, keras.layers.EinsumDense):
        return _is_over_rows(layer.equation)
    names = _axis_arguments(type(layer))
    if not names:
        return True
    config = layer.get_config()
    axes = [axis for name in names for axis in tf.nest.flatten(config.get(name))]
    return not any(_is_first(axis, ranks) for axis in axes if axis is not None)


def _is_over_rows(equation):
    """Whether the first letter of the inputs is the outputs', and not the kernel's."""
    terms, outputs = equation.replace(" ", "").split("->")
    inputs, kernel = terms.split(",")
    if "..." in equation:
        return inputs.startswith("...") and outputs.startswith("...")
    return inputs[0] == outputs[0] and inputs[0] not in inputs[1:] + kernel


@functools.cache
def _axis_arguments(kind: type) -> tuple[str, ...]:
    given = inspect.signature(kind.__init__).parameters
    return tuple(name for name in _AXES if name in given)


def _is_first(axis: Any, ranks):
    if axis >= 0:
        return axis == 0
    if not ranks:
        # Of an inner layer: the last axis is another than the first, most often.
        return axis != -1
    return any(rank is None or axis % max(rank, 1) == 0 for rank in ranks)
