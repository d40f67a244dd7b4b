"""Variants of what a quick test proves already, of which each run takes some."""

import os
import pathlib
import subprocess
import zlib
from typing import Any

import pytest

ALL = "TOWERS_EXACT_ALL" in os.environ
"""Whether tests take all variants, for a report; it takes hours."""


# Of the slow tests that a run takes, CI runs one in so many.
_OF_CI = 3


def _commits() -> int:
    """Returns how many commits lead to this one; 0 where Git cannot tell."""
    command = ["git", "rev-list", "--count", "HEAD"]
    folder = pathlib.Path(__file__).parent
    try:
        told = subprocess.run(command, cwd=folder, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(told.stdout)


# By the environment, workers of pytest-xdist have the same one.
TURN = int(os.environ.setdefault("TOWERS_TURN", str(_commits())))
"""Which of the sampled tests run: with each commit, others do.

Where CI runs for each commit, a test that is one in five, and of which CI runs one in
three, runs once in fifteen runs.
"""


def slow(*values: Any, **options: Any) -> Any:
    """Returns parameters of a test that `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def number_of(case: Any) -> int:
    """Returns a number that is always this case's: it depends on its text alone."""
    return zlib.crc32(str(case).encode())


def is_of_ci(n: int, case: Any) -> bool:
    """Whether a case is one of the one in `n` that CI runs in this turn."""
    return (number_of(case) + TURN) % n == 0


def one_in(n: int, case: Any) -> bool:
    """Whether a case is one of the one in `n` that run in this turn, or all do."""
    # Slower than `is_of_ci`: so each meets each.
    return ALL or (number_of(case) + TURN // _OF_CI) % n == 0


def sampled(n: int, *values: Any, **options: Any) -> Any:
    """Returns parameters of a slow test, of which one in `n` runs in each turn.

    Which one it is depends on the text of the values.
    """
    of_this_turn = one_in(n, " ".join(map(str, values)))
    return (slow if of_this_turn else not_now)(*values, **options)


def not_now(*values: Any, **options: Any) -> Any:
    """Returns parameters of a slow test that runs in another turn."""
    other = pytest.mark.skip("of another turn; TOWERS_EXACT_ALL=1 runs all")
    return pytest.param(*values, marks=[pytest.mark.slow, other], **options)


def seldom(*values: Any, **options: Any) -> Any:
    """Returns parameters of a slow test that proves little more than others do."""
    return sampled(5, *values, **options)
