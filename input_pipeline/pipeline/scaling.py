"""Columns of numbers, scaled by what they are in the training data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.base import Source
from towers.input_pipeline.sources.targets import LARGEST

_AT_ONCE = 4096
# Below that part of the mean, what differs is how float64 rounds sums.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What makes columns of numbers have mean 0 and standard deviation 1.

    Attributes:
        names: of the columns.
        mean: of each.
        std: standard deviation of each; 1 of a column that is constant.
    """

    names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Any) -> Any:
        """Scales a batch.

        Args:
            x: numbers [..., F], a tensor or an array, as exact as they are known; or a
                dict of which that is ``dense``.

        Returns:
            The same, scaled: float32.
        """
        if isinstance(x, Mapping):
            return {**x, "dense": self(x["dense"])}
        # In float32, near numbers far from 0 would be one before the mean is taken off.
        x = tf.cast(x, tf.float64)
        return tf.cast((x - np.float64(self.mean)) / np.float64(self.std), tf.float32)

    def to_json(self) -> dict[str, Any]:
        """What ``from_json`` reads; the numbers are kept exactly."""
        return {
            "names": [*self.names],
            "mean": [*self.mean],
            "std": [*self.std],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Sequence[Any]]) -> Self:
        """Makes one of what ``to_json`` returned.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        scaling = cls(
            tuple(map(str, found["names"])),
            tuple(map(float, found["mean"])),
            tuple(map(float, found["std"])),
        )
        if not len(scaling.names) == len(scaling.mean) == len(scaling.std):
            raise ValueError(f"received {dict(found)}: expected lists of one length")
        return scaling


def as_float32(x: Any) -> Any:
    """Makes float32 of rows of numbers, in which models compute.

    Args:
        x: a batch of examples of any kind; only float64 is changed.
    """
    if isinstance(x, Mapping):
        return {name: as_float32(column) for name, column in x.items()}
    return tf.cast(x, tf.float32) if x.dtype == tf.float64 else x


@tf.autograph.experimental.do_not_convert
def measure_scaling(source: Source, split: str = "train") -> Scaling:
    """Measures mean and standard deviation of columns, in one pass over a split.

    What float32 cannot hold is left out of it: whoever trains on it says so.

    Args:
        source: of rows of numbers, prepared.
        split: the training data.

    Raises:
        ValueError: the source has no rows of numbers.
    """
    if source.input_kind not in ("row", "columns"):
        raise ValueError(
            f"{source.name} has no rows of numbers to scale: expected a table"
        )

    def parse(_, records):
        x, _ = source.parse(records)
        return x["dense"] if isinstance(x, Mapping) else x

    names = _names(source)
    size = len(names)
    count, mean, squares = np.zeros([3, size])
    with tf.device("/CPU:0"):
        batches = source.batches(split, _AT_ONCE).map(parse, tf.data.AUTOTUNE)
        for rows in batches.prefetch(tf.data.AUTOTUNE).as_numpy_iterator():
            # Chan et al. 1979: exact where squares of large numbers would cancel.
            good = np.abs(rows) <= LARGEST
            rows = np.where(good, rows, 0).astype(np.float64)
            more = good.sum(axis=0)
            of_these = rows.sum(axis=0) / np.maximum(more, 1)
            apart = (np.where(good, rows - of_these, 0) ** 2).sum(axis=0)
            total = np.maximum(count + more, 1)
            step = of_these - mean
            squares += apart + step**2 * count * more / total
            mean += step * more / total
            count += more
    std = np.sqrt(squares / np.maximum(count, 1))
    std = np.where(std > _ROUNDING * np.abs(mean), std, 1)
    return Scaling(names, tuple(mean.tolist()), tuple(std.tolist()))


def _names(source: Source) -> tuple[str, ...]:
    """The columns' names; an array has none, and they are numbered."""
    (size,) = source.image_shape
    names = tuple(source.image_fields)
    return names if len(names) == size else tuple(map(str, range(size)))


@tf.autograph.experimental.do_not_convert
def columns_merged_by_float32(
    source: Source, scaled: bool, split: str = "train"
) -> tuple[list[str], list[str]]:
    """Finds columns most of whose values are one in float32, such as Unix seconds.

    It looks at the first rows.

    Args:
        source: prepared.
        scaled: whether the numbers of an example are scaled before they are float32.
        split: the training data.

    Returns:
        Names of the columns to learn from, and of those to predict.
    """
    of_rows = source.input_kind in ("row", "columns") and source.image_shape[0] > 0
    has_rows, has_targets = of_rows and not scaled, source.target.kind == "numbers"
    examples, targets = [], []
    if not has_rows and not has_targets:
        return examples, targets
    with tf.device("/CPU:0"):
        _, records = next(iter(source.batches(split, _AT_ONCE)))
        x, y = source.parse(records)
    if has_rows:
        rows = x["dense"] if isinstance(x, Mapping) else x
        examples = _merged(_names(source), rows)
    if has_targets:
        size = source.target.size
        names = source.target.names or tuple(map(str, range(size)))
        targets = _merged(names, tf.reshape(y, [-1, size]))
    return examples, targets


def _merged(names: Sequence[str], rows: tf.Tensor) -> list[str]:
    return [
        name
        for name, column in zip(names, rows.numpy().T, strict=True)
        # To round decimals takes seconds in a wide table, so few columns come to it.
        if _is_merged(column) and _is_merged(_without_rounding(column))
    ]


def _is_merged(column: np.ndarray) -> bool:
    with np.errstate(over="ignore"):  # such a number is a bad record's
        merged = np.unique(column.astype(np.float32))
    return len(merged) <= len(np.unique(column)) / 2


def _without_rounding(column: np.ndarray) -> np.ndarray:
    """Rounds numbers to 12 digits, as sums of decimals differ in later ones."""
    return np.array([float(f"{value:.12g}") for value in column])
