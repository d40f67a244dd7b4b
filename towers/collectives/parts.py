"""Takes values and gradients apart, as a variable is cut, and puts values together."""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towers.collectives.partition import Part


def part_of(value: tf.Tensor | tf.IndexedSlices, part: Part) -> Any:
    """Takes a part of a variable's value, or of its gradient."""
    if part.whole:
        return value
    first, end = part.start, part.stop
    if part.has_rows:
        row = math.prod(part.shape[1:])
        first, end = first // row, end // row
    elif not isinstance(value, tf.IndexedSlices):
        value = tf.reshape(value, [-1])
    if not isinstance(value, tf.IndexedSlices):
        return value[first:end]
    # Duplicates stay apart, as optimizers square each by itself.
    values, places = value.values, value.indices
    if not part.has_rows:
        row = math.prod(values.shape[1:])
        places = places[:, tf.newaxis] * row + tf.range(row, dtype=places.dtype)
        values, places = tf.reshape(values, [-1]), tf.reshape(places, [-1])
    inside = (places >= first) & (places < end)
    return tf.IndexedSlices(
        tf.boolean_mask(values, inside),
        tf.boolean_mask(places, inside) - first,
        tf.constant(part.shape, places.dtype),
    )


def whole_of(parts: Sequence[tf.Tensor], shape: Sequence[int]) -> tf.Tensor:
    """Puts together what `part_of` has taken apart."""
    return parts[0] if len(parts) == 1 else tf.reshape(tf.concat(parts, 0), shape)
