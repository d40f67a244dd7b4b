"""What a model is to give for an example."""

import dataclasses
import math
from typing import Literal

import numpy as np
import tensorflow as tf

from towers.input_pipeline.choices import IGNORED

TargetKind = Literal["class", "numbers", "labels", "mask", "tags", "tokens"]

# Models compute with float32, where anything larger is infinite.
LARGEST = float(np.finfo(np.float32).max)
_OF_CLASSES = ("class", "mask", "tags")
_OF_FLOATS = ("numbers", "labels")


@dataclasses.dataclass(frozen=True)
class Target:
    """What a model is to give for an example of a source.

    Attributes:
        kind: ``class``: one of several classes, int64 []. ``numbers``: float32 [size].
            ``labels``: which of several labels hold, float32 [size] of 0 and 1.
            ``mask``: a class for each pixel, int64 [H, W]; 255 is a pixel without one,
            which counts in no loss and no metric. ``tags``: a class for each token,
            int64 [T], -1 for padding. ``tokens``: the next token at each position,
            int64 [T], 0 for padding.
        size: number of classes, numbers, labels or tokens in the vocabulary.
        names: one for each of them, or None.
    """

    kind: TargetKind
    size: int
    names: tuple[str, ...] | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 where the target is no class."""
        return self.size if self.kind in _OF_CLASSES else 0

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes; None where the target is no class."""
        return self.names if self.kind in _OF_CLASSES else None

    @property
    def dtype(self) -> type:
        """NumPy's type of its values."""
        return np.float32 if self.kind in _OF_FLOATS else np.int64

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of what rows of a table have: () of a class, (size,) of numbers."""
        return (self.size,) if self.kind in _OF_FLOATS else ()

    @property
    def expected(self) -> str:
        """What each value is to be, a phrase."""
        if self.kind == "numbers":
            return "a number"
        if self.kind == "labels":
            return "0 or 1"
        if self.kind == "mask":
            return f"0 to {self.size - 1}, or {IGNORED} to ignore a pixel"
        return f"0 to {self.size - 1}"

    def weights(self, y: tf.Tensor) -> tf.Tensor | None:
        """Sample weights of a batch: 0 where a token or pixel has no class, else 1.

        None where every example has a target.
        """
        if self.kind == "tags":
            return tf.cast(y >= 0, tf.float32)
        return tf.cast(y != IGNORED, tf.float32) if self.kind == "mask" else None

    def is_good(self, y: np.ndarray) -> np.ndarray:
        """Tells of each value whether it can be learnt from.

        Args:
            y: values, an array or a tensor; so is what is returned.
        """
        if self.kind == "numbers":
            return abs(y) <= LARGEST  # of NaN, that is false
        if self.kind == "labels":
            return (y == 0) | (y == 1)
        least = -1 if self.kind == "tags" else 0
        good = (y >= least) & (y < self.size)
        return good | (y == IGNORED) if self.kind == "mask" else good

    def fault(self, y: np.ndarray, field: str) -> str:
        """Says what is wrong with one example's values, a phrase; empty if nothing.

        Args:
            y: of the example.
            field: what its record calls them.
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


def expected_number(value: float) -> str:
    """Says what is expected in the place of a number that cannot be used, a phrase."""
    most = f" of at most {LARGEST:.2g}, which float32 holds"
    return f"a number{most * math.isfinite(value)}"
