"""Remembers which layers made the tensors of a graph, and of what."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.analysis.trust import is_trusted
from towers.keras_adapter.layers import (
    LAYER_CALL,
    MASK,
    layers_of,
    logits_of,
    tag,
)
from towers.keras_adapter.patching import patched


class LayerCall(NamedTuple):
    """How a layer made a tensor.

    Attributes:
        inputs: The tensors that it was called with.
        packed: Whether the tensor is part of a ragged or sparse one.
        trusted: Whether the layer is known to treat each example by itself.
        layer: The layer, or the loss.
        around: The calls of layers around it that have returned the same tensor.
    """

    inputs: Sequence[tf.Tensor]
    packed: bool
    trusted: bool
    layer: keras.layers.Layer
    around: "list[LayerCall]"


@contextlib.contextmanager
def recorded_layers() -> Iterator[dict[Any, LayerCall]]:
    """Inside, remembers what layers made of what.

    Yields:
        For the key of each tensor that a layer returned, how it was made.
    """
    calls = {}

    def record(original, layer, *args, **kwargs):
        outputs = original(layer, *args, **kwargs)
        # A layer takes their masks, too.
        given = tf.nest.flatten([args, kwargs])
        masks = [tag(each, MASK) for each in given]
        inputs = [part for _, part in parts([given, masks])]
        known = {key(tensor) for tensor in inputs}
        apart = not any(map(_is_synchronized, layers_of(layer)))
        trusted = apart and is_trusted(layer, inputs)
        made = outputs
        if trusted and not {key(part) for _, part in parts(outputs)} & known:
            # What passes its input through has not made its logits.
            made = [outputs, _logits(outputs)]
        for packed, output in parts(made):
            # What is passed through stays what it was; of nested layers that are not
            # known, the innermost tells most.
            if key(output) in known:
                continue
            call = LayerCall(inputs, packed, trusted, layer, [])
            inner = calls.get(key(output))
            if inner is None or call.trusted:
                # Of a layer that is known, its parts need not be.
                calls[key(output)] = call
            else:
                inner.around.append(call)
        return outputs

    with patched(LAYER_CALL, record):
        yield calls


def _is_synchronized(layer):
    return getattr(layer, "synchronized", False)


def _logits(outputs):
    """Returns what sigmoids and softmaxes were made of, which a loss takes instead."""
    return [*map(logits_of, tf.nest.flatten(outputs))]


def key(tensor: tf.Tensor) -> tuple[int, str]:
    """Returns what names a tensor: its name is its own in one graph only."""
    return id(tensor.graph), tensor.name


def parts(nest: Any) -> Iterator[tuple[bool, tf.Tensor]]:
    """Yields the tensors of a nest; of ragged and sparse ones (True) the components."""
    for leaf in tf.nest.flatten(nest):
        packed = isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
        for part in tf.nest.flatten(leaf, expand_composites=True):
            if tf.is_symbolic_tensor(part):
                yield packed, part
