"""Columns of numbers, scaled by what they are in the training data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.base import Source

_AT_ONCE = 4096
# Below that part of the mean, what differs is how float32 rounds.
_ROUNDING = 1e-7


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
            x: float [..., F], a tensor or an array; or a dict of which that is
                ``dense``.

        Returns:
            The same, scaled: float32.
        """
        if isinstance(x, Mapping):
            return {**x, "dense": self(x["dense"])}
        x = tf.cast(x, tf.float32)
        mean, std = np.float32(self.mean), np.float32(self.std)
        return (x - mean) / std

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


@tf.autograph.experimental.do_not_convert
def measure_scaling(source: Source, split: str = "train") -> Scaling:
    """Measures mean and standard deviation of columns, in one pass over a split.

    What is no number is left out of it: whoever trains on it says so.

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

    (size,) = source.image_shape
    count, mean, squares = np.zeros([3, size])
    with tf.device("/CPU:0"):
        batches = source.batches(split, _AT_ONCE).map(parse, tf.data.AUTOTUNE)
        for rows in batches.prefetch(tf.data.AUTOTUNE).as_numpy_iterator():
            # Chan et al. 1979: exact where squares of large numbers would cancel.
            good = np.isfinite(rows)
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
    names = source.image_fields
    if len(names) != size:  # an array has no names
        names = map(str, range(size))
    return Scaling(tuple(names), tuple(mean.tolist()), tuple(std.tolist()))
