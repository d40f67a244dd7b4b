"""Stores rows in memory, and notes which rows are filled."""

from typing import Any

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.base import Source


class Store:
    """Rows of examples and their targets.

    They are variables of TensorFlow. Any number of threads may write and read rows in
    place. Only written rows take memory.

    Args:
        source: the source of the examples.
        image_shape: shape of decoded images, or of rows; None for encoded images.
        size: number of rows.
    """

    def __init__(self, source: Source, image_shape: tuple[int, ...] | None, size: int):
        specs = _specs(source, image_shape)
        # On the CPU, where tf.data runs.
        with tf.init_scope(), tf.device("/CPU:0"):
            self._parts = tf.nest.map_structure(
                lambda spec: _empty([size, *spec.shape], spec.dtype), specs
            )
        self._is_there = constant(np.zeros(size, bool))

    def is_filled(self, rows: tf.Tensor) -> tf.Tensor:
        """Tells which rows are filled."""
        return tf.gather(self._is_there, rows)

    def x(self, rows: tf.Tensor) -> Any:
        """Returns the examples of filled rows."""
        return tf.nest.map_structure(lambda part: tf.gather(part, rows), self._parts[0])

    def y(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the targets of filled rows."""
        return tf.gather(self._parts[1], rows)

    def nothing(self) -> tuple[Any, tf.Tensor]:
        """Returns a placeholder for an unneeded example, and for its target."""
        return tf.nest.map_structure(
            lambda part: tf.zeros(part.shape[1:], part.dtype), self._parts
        )

    def as_kept(self, x: Any, y: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """Casts an example and its target, or several, to the types of the store."""
        return tf.nest.map_structure(
            lambda part, value: tf.cast(value, part.dtype), self._parts, (x, y)
        )

    def put(self, rows: tf.Tensor, x: Any, y: tf.Tensor) -> tf.Operation:
        """Writes examples and targets, and then marks their rows as filled."""
        parts, values = map(tf.nest.flatten, (self._parts, self.as_kept(x, y)))
        written = [
            _scatter(part, rows, value)
            for part, value in zip(parts, values, strict=True)
        ]
        with tf.control_dependencies(written):
            return _scatter(self._is_there, rows, tf.ones_like(rows, tf.bool))


def constant(array: np.ndarray) -> tf.Variable:
    """Returns a variable, as graphs would have a copy of a tensor."""
    with tf.init_scope(), tf.device("/CPU:0"):
        return tf.Variable(array, trainable=False)


def _specs(source: Source, image_shape: tuple[int, ...] | None) -> tuple[Any, Any]:
    """Returns types and shapes of an example and of its target."""
    split = next(iter(source.splits))
    parsed = source.batches(split, 1).map(lambda _, records: source.parse(records))
    x, y = tf.nest.map_structure(
        lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), parsed.element_spec
    )
    if source.input_kind == "image":
        encoded = tf.TensorSpec([], tf.string)
        x = encoded if image_shape is None else tf.TensorSpec(image_shape, tf.uint8)
    target = source.target
    if target.kind != "mask":
        y = tf.TensorSpec(target.row_shape, target.dtype)
    elif image_shape is not None:
        y = tf.TensorSpec(image_shape[:2], tf.uint8)
    return x, y


def _empty(shape: list[int], dtype: tf.DType) -> tf.Variable:
    """Returns a variable that touches no page of memory, except for strings."""
    return tf.Variable(
        lambda: tf.raw_ops.Empty(shape=shape, dtype=dtype, init=dtype == tf.string),
        trainable=False,
    )


def _scatter(variable: tf.Variable, rows: tf.Tensor, values: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.ResourceScatterUpdate(
        resource=variable.handle, indices=rows, updates=values
    )
