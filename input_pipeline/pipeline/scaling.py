"""Scales columns of numbers by their statistics in the training data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.base import Source
from towers.input_pipeline.sources.tables.moments import Moments

_AT_ONCE = 4096
# Below this fraction of the mean, differences come from float64's rounding of sums.
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Converts a table's columns of numbers to numbers that a model learns from.

    Attributes:
        names: the names of the columns.
        mean: the mean of each; 0 for columns that are not scaled.
        std: standard deviation of each; 1 for a column that is constant or not scaled.
        fill: the replacement of missing numbers in each. Empty: none is missing.
        marked: names of columns that get a further column, 0 or 1, which marks missing
            numbers.
    """

    names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fill: tuple[float, ...] = ()
    marked: tuple[str, ...] = ()

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names of the columns that a model gets."""
        return (*self.names, *(f"{name} is missing" for name in self.marked))

    def __call__(self, x: Any) -> Any:
        """Scales a batch.

        Args:
            x: numbers [..., F], a tensor or an array, as exact as they are known, NaN
                where one is missing; or a dict with these as ``dense``.

        Returns:
            The scaled numbers, and a column for each `marked` one: float32.
        """
        if isinstance(x, Mapping):
            return {**x, "dense": self(x["dense"])} if "dense" in x else x
        # In float32, close numbers far from 0 would be equal before the mean is
        # subtracted.
        x = tf.cast(x, tf.float64)
        marks = []
        if self.fill:
            missing = tf.math.is_nan(x)
            x = tf.where(missing, np.float64(self.fill), x)
            indices = [self.names.index(name) for name in self.marked]
            marks = [tf.gather(missing, indices, axis=-1)] if indices else []
        x = tf.cast((x - np.float64(self.mean)) / np.float64(self.std), tf.float32)
        return tf.concat([x, *(tf.cast(m, tf.float32) for m in marks)], axis=-1)

    def to_json(self) -> dict[str, Any]:
        """Returns a dictionary for ``from_json``; it keeps the numbers exactly."""
        return {
            field.name: [*getattr(self, field.name)]
            for field in dataclasses.fields(self)
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Sequence[Any]]) -> Self:
        """Makes a scaling from the result of ``to_json``.

        Raises:
            KeyError, TypeError, ValueError: `content` is something else.
        """
        scaling = cls(
            tuple(map(str, content["names"])),
            tuple(map(float, content["mean"])),
            tuple(map(float, content["std"])),
            tuple(map(float, content.get("fill", ()))),
            tuple(map(str, content.get("marked", ()))),
        )
        count = len(scaling.names)
        sizes = len(scaling.mean), len(scaling.std), len(scaling.fill) or count
        if {*sizes} != {count} or not {*scaling.marked} <= {*scaling.names}:
            raise ValueError(f"received {dict(content)}: expected lists of one length")
        return scaling


def as_float32(x: Any) -> Any:
    """Converts rows of numbers to float32, in which models compute.

    Args:
        x: a batch of examples of any kind; only float64 changes.
    """
    if isinstance(x, Mapping):
        return {name: as_float32(column) for name, column in x.items()}
    return tf.cast(x, tf.float32) if x.dtype == tf.float64 else x


def measure_scaling(
    source: Source, split: str = "train", standardize: bool = True
) -> Scaling:
    """Measures mean and standard deviation of columns, in one pass over a split.

    Tables were measured when they were opened, and are not read again. Values that are
    no numbers are left out; training on them raises an error.

    Args:
        source: a prepared source of rows of numbers.
        split: the training data.
        standardize: whether columns get mean 0 and standard deviation 1; else they stay
            as they are, and only missing numbers are filled in.

    Raises:
        ValueError: the source has no rows of numbers.
    """
    if source.input_kind not in ("row", "columns"):
        raise ValueError(
            f"{source.name} has no rows of numbers to scale: expected a table"
        )
    moments = source.moments if split == "train" else None
    if moments is None:
        moments = _measured(source, split)
    names = _names(source)
    mean, std = moments.mean, np.sqrt(moments.squares / np.maximum(moments.count, 1))
    std = np.where(std > _ROUNDING * np.abs(mean), std, 1)
    fill, marked = (), ()
    if source.missing != "fail":
        fill = mean if source.missing == "mean" else source.medians()
        marked = source.missing_columns
    if not standardize:
        mean, std = np.zeros(len(names)), np.ones(len(names))
    return Scaling(
        names, *(tuple(map(float, numbers)) for numbers in (mean, std, fill)), marked
    )


@tf.autograph.experimental.do_not_convert
def _measured(source: Source, split: str) -> Moments:
    def parse(_, records):
        x, _ = source.parse(records)
        return x["dense"] if isinstance(x, Mapping) else x

    moments = Moments.of_nothing(len(_names(source)))
    with tf.device("/CPU:0"):
        batches = source.batches(split, _AT_ONCE).map(parse, tf.data.AUTOTUNE)
        for rows in batches.prefetch(tf.data.AUTOTUNE).as_numpy_iterator():
            moments.add(np.asarray(rows, np.float64))
    return moments


def _names(source: Source) -> tuple[str, ...]:
    """Returns the columns' names; the columns of an array are numbered."""
    (size,) = source.image_shape
    names = tuple(source.image_fields)
    return names if len(names) == size else tuple(map(str, range(size)))


@tf.autograph.experimental.do_not_convert
def columns_merged_by_float32(
    source: Source, scaled: bool, split: str = "train"
) -> tuple[list[str], list[str]]:
    """Finds columns most of whose values are equal in float32, such as Unix seconds.

    It looks at the first rows only.

    Args:
        source: a prepared source.
        scaled: whether the numbers of an example are scaled before they are float32.
        split: the training data.

    Returns:
        Names of the columns to learn from, and of the columns to predict.
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
        # Rounding decimals takes seconds in a wide table, so few columns get there.
        if _is_merged(column) and _is_merged(_without_rounding(column))
    ]


def _is_merged(column: np.ndarray) -> bool:
    with np.errstate(over="ignore"):  # such a number is a bad record's
        merged = np.unique(column.astype(np.float32))
    return len(merged) <= len(np.unique(column)) / 2


def _without_rounding(column: np.ndarray) -> np.ndarray:
    """Rounds numbers to 12 digits, as sums of decimals differ in later ones."""
    return np.array([float(f"{value:.12g}") for value in column])
