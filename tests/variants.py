"""Variants of what a quick test proves already."""

from typing import Any

import pytest


def slow(*values: Any, **options: Any) -> Any:
    """Returns parameters of a test that `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)
