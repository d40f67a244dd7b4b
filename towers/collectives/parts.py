"""Takes values and gradients apart, as a variable is cut, and puts values together."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Part:
    """What an owner has of a variable.

    Attributes:
        owner: Index of the owner.
        start: The first of its numbers, as if the variable was flat.
        stop: The one behind the last.
        shape: The shape of the part: the variable's if it is whole, with fewer rows if
            it is cut between rows, and else flat.
        whole: Whether it is the whole variable.
    """

    owner: int
    start: int
    stop: int
    shape: tuple[int, ...]
    whole: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether it consists of rows, if the variable is cut."""
        return len(self.shape) > 1


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
