"""Variants of what a quick test proves already."""

import os
import zlib
from typing import Any

import pytest

ALL = "TOWERS_EXACT_ALL" in os.environ
"""Whether tests take all variants, for a report; it takes hours."""


def for_the_report(*values: Any, **options: Any) -> Any:
    """Returns parameters of a test that runs only where all variants do."""
    only = pytest.mark.skipif(not ALL, reason="takes long: set TOWERS_EXACT_ALL=1")
    marks = [pytest.mark.slow, pytest.mark.timeout(0), only]
    return pytest.param(*values, marks=marks, **options)


def slow(*values: Any, **options: Any) -> Any:
    """Returns parameters of a test that `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def number_of(case: Any) -> int:
    """Returns a number that is always this case's: it depends on its text alone."""
    return zlib.crc32(str(case).encode())


def one_in(n: int, case: Any) -> bool:
    """Whether a case is one of those that run everywhere: one in `n`, or all."""
    return ALL or number_of(case) % n == 0


def sampled(n: int, *values: Any, **options: Any) -> Any:
    """Returns parameters of a slow test; all but one in `n` are for the report.

    Which one it is depends on the text of the values, which must not change.
    """
    text = " ".join(map(str, values))
    return (slow if one_in(n, text) else for_the_report)(*values, **options)
