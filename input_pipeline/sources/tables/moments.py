"""Means and standard deviations of columns, in one pass."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass
class Moments:
    """Count, mean and sum of squares of columns, over parts that come one by one.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", 1979: exact where squares of large numbers would cancel.

    Attributes:
        count: number of known values in each column.
        mean: the mean of each column.
        squares: sums of squared distances from the mean.
        missing: number of missing values in each column.
    """

    count: np.ndarray
    mean: np.ndarray
    squares: np.ndarray
    missing: np.ndarray

    @classmethod
    def of_nothing(cls, size: int) -> "Moments":
        """Returns the moments of no rows."""
        return cls(*np.zeros([4, size]))

    def of(self, columns: Sequence[int]) -> "Moments":
        """Returns the moments of some of the columns."""
        every = self.count, self.mean, self.squares, self.missing
        return Moments(*(part[columns] for part in every))

    def add(self, rows: np.ndarray) -> None:
        """Adds rows, float64 [N, columns]; numbers that are not finite are missing."""
        good = np.isfinite(rows)
        count = good.sum(axis=0)
        rows = np.where(good, rows, 0)
        mean = rows.sum(axis=0) / np.maximum(count, 1)
        apart = (np.where(good, rows - mean, 0) ** 2).sum(axis=0)
        total = np.maximum(self.count + count, 1)
        step = mean - self.mean
        self.squares += apart + step**2 * self.count * count / total
        self.mean += step * count / total
        self.count += count
        self.missing += len(rows) - count
