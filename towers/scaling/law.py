"""Amdahl's law, fitted to measured speeds."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Amdahl:
    """The time of a step with `n` towers: `serial_s + parallel_s / n`.

    Source: Amdahl 1967, "Validity of the single processor approach to achieving large
    scale computing capabilities".

    Attributes:
        serial_s: Seconds that more towers do not shorten.
        parallel_s: Seconds that towers divide.
        error: The standard error of `serial_fraction`; `None` if there are too few
            measurements to tell.
    """

    serial_s: float
    parallel_s: float
    error: float | None = None

    @property
    def serial_fraction(self) -> float:
        """The part of a step with one tower that more towers do not shorten."""
        return self.serial_s / (self.serial_s + self.parallel_s)

    def step_s(self, towers: int) -> float:
        """Returns the seconds that a step takes with so many towers."""
        return self.serial_s + self.parallel_s / towers


def fit(measured: Sequence[tuple[int, float]]) -> Amdahl | None:
    """Fits the law to measurements, by least squares of the relative errors.

    Args:
        measured: Pairs of a number of towers and the seconds of a step with them.

    Returns:
        The law; `None` if all measurements are of one number of towers.
    """
    towers = np.array([count for count, _ in measured], float)
    seconds = np.array([each for _, each in measured], float)
    if len({*towers}) < 2:
        return None
    terms = np.stack([np.ones_like(towers), 1 / towers], axis=1) / seconds[:, None]
    found, *_ = np.linalg.lstsq(terms, np.ones_like(seconds))
    serial_s, parallel_s = map(float, found)
    error = _error(terms, found)
    if serial_s < 0:
        # Faster than dividing all of a step explains, as caches or noise do.
        return Amdahl(0.0, float(np.mean(seconds * towers)), error)
    if parallel_s < 0:
        return Amdahl(float(np.mean(seconds)), 0.0, error)
    return Amdahl(serial_s, parallel_s, error)


def _error(terms, found):
    """The standard error of the serial fraction, by the delta method."""
    free = len(terms) - 2
    if free < 1:
        return None
    residuals = terms @ found - 1
    covariance = np.linalg.inv(terms.T @ terms) * (residuals @ residuals) / free
    serial, parallel = found
    slope = np.array([parallel, -serial]) / (serial + parallel) ** 2
    return math.sqrt(slope @ covariance @ slope)
