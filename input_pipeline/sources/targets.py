"""Describes the targets of models for examples."""

import dataclasses
import math
from typing import Literal

import numpy as np
import tensorflow as tf

from towers.input_pipeline.choices import IGNORED

TargetKind = Literal["class", "numbers", "labels", "mask", "tags", "tokens"]

# Models compute with float32, where larger numbers are infinite.
LARGEST = float(np.finfo(np.float32).max)
_OF_CLASSES = ("class", "mask", "tags")
_OF_FLOATS = ("numbers", "labels")


@dataclasses.dataclass(frozen=True)
class Target:
    """The target of a model for an example of a source.

    Attributes:
        kind: ``class``: one of several classes, int64 []. ``numbers``: float32 [size].
            ``labels``: which of several labels hold, float32 [size] of 0 and 1.
            ``mask``: a class for each pixel, int64 [H, W]; 255 is a pixel without one,
            which counts in no loss and no metric. ``tags``: a class for each token,
            int64 [T], -1 for padding. ``tokens``: the next token at each position,
            int64 [T], 0 for padding.
        size: number of classes, numbers, labels or tokens in the vocabulary.
        names: a name for each of them, or None.
    """

    kind: TargetKind
    size: int
    names: tuple[str, ...] | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 if the target is no class."""
        return self.size if self.kind in _OF_CLASSES else 0

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes; None if the target is no class."""
        return self.names if self.kind in _OF_CLASSES else None

    @property
    def dtype(self) -> type:
        """NumPy's type of the values."""
        return np.float32 if self.kind in _OF_FLOATS else np.int64

    @property
    def compact_dtype(self) -> type:
        """The smallest type that holds the values of good records."""
        if self.kind == "numbers":
            return np.float32
        most = {"mask": max(self.size - 1, IGNORED), "labels": 1}
        least = -1 if self.kind == "tags" else 0
        return smallest_dtype(least, most.get(self.kind, self.size - 1))

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row's value in a table: () for a class, (size,) for numbers."""
        return (self.size,) if self.kind in _OF_FLOATS else ()

    @property
    def expected(self) -> str:
        """The expected values, as a phrase."""
        if self.kind == "numbers":
            return "a number"
        if self.kind == "labels":
            return "0 or 1"
        if self.kind == "mask":
            return f"0 to {self.size - 1}, or {IGNORED} to ignore a pixel"
        return f"0 to {self.size - 1}"

    def weights(self, y: tf.Tensor) -> tf.Tensor | None:
        """Returns sample weights of a batch: 0 for a token or pixel without class.

        Other weights are 1. Returns None if every example has a target.
        """
        if self.kind == "tags":
            return tf.cast(y >= 0, tf.float32)
        return tf.cast(y != IGNORED, tf.float32) if self.kind == "mask" else None

    def is_good(self, y: np.ndarray) -> np.ndarray:
        """Tells which values can be learnt from.

        Args:
            y: values, an array or a tensor; the result has the same type.
        """
        if self.kind == "numbers":
            return abs(y) <= LARGEST  # False for NaN
        if self.kind == "labels":
            return (y == 0) | (y == 1)
        least = -1 if self.kind == "tags" else 0
        good = (y >= least) & (y < self.size)
        return good | (y == IGNORED) if self.kind == "mask" else good

    def fault(self, y: np.ndarray, field: str) -> str:
        """Describes the fault of one example's values in a phrase; empty if none.

        Args:
            y: the values of the example.
            field: the name of the values in its record.
        """
        bad = np.flatnonzero(~self.is_good(y))
        if not len(bad):
            return ""
        value = np.ravel(y)[bad[0]]
        if self.kind == "class" and self.size == math.inf:
            return (
                f"{field} {value} is negative, expected a whole number from 0: number "
                "the classes so"
            )
        if self.kind == "class":
            return f"{field} {value} is outside [0, {self.size})"
        if self.kind in _OF_FLOATS and self.names:
            field = self.names[bad[0]]
        if self.kind == "numbers":
            return f"{field} is {value:g}, expected {expected_number(value)}"
        return f"{field} is {value:g}, expected {self.expected}"


def smallest_dtype(least: float, most: float) -> type:
    """Returns the smallest integer type of NumPy's for numbers in [least, most].

    >>> smallest_dtype(0, 255).__name__, smallest_dtype(-1, 200).__name__
    ('uint8', 'int16')
    """
    if not math.isfinite(most):
        return np.int64
    ends = np.min_scalar_type(int(least)), np.min_scalar_type(int(most))
    return np.promote_types(*ends).type


def expected_number(value: float) -> str:
    """Describes the expected replacement of an unusable number in a phrase."""
    most = f" of at most {LARGEST:.2g}, which float32 holds"
    return f"a number{most * math.isfinite(value)}"
