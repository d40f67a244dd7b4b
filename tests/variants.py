"""Variants of what a quick test proves already."""

import os
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
