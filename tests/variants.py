"""Variants of what a quick test proves already: each turn takes some of them."""

import collections
import os
import pathlib
import subprocess
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

ALL = "TOWERS_EXACT_ALL" in os.environ
"""Whether exact cases run in all variants, for the report of parity."""

OF_CI = 30
"""CI runs one in so many slow tests (`--one-in` in .ci/run)."""


def _turn() -> int:
    """Returns TOWERS_TURN, or how many commits lead to this one."""
    if given := os.environ.get("TOWERS_TURN"):
        return int(given)
    command = ["git", "rev-list", "--count", "HEAD"]
    folder = pathlib.Path(__file__).parent
    try:
        count = subprocess.run(command, cwd=folder, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(count.stdout)


TURN = _turn()
"""Says which variants run.

With each commit, CI runs other slow tests; with each thirtieth, other cases are quick.
Without Git, this is 0; in a shallow clone, it counts the commits that are there.
"""
# Workers of pytest-xdist inherit it.
os.environ["TOWERS_TURN"] = str(TURN)


def number_of(case: Any) -> int:
    """Returns a number that depends on the text of a case alone."""
    return zlib.crc32(str(case).encode())


def one_in(n: int, nodeid: str) -> bool:
    """Tells whether this is the turn, out of `n`, in which a test runs."""
    return (number_of(nodeid) + TURN) % n == 0


def slow(*values: Any, **options: Any) -> Any:
    """Returns parameters of a test that `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Marks as slow the tests that are marked quick_one_in, and not quick in this turn.

    Cases take turns by their places; of fewer cases than `n`, one is quick in each.
    Other cases are quick after thirty turns. Meanwhile, CI runs each of the rest once.
    """
    tests = collections.defaultdict(list)
    for item in items:
        is_slow = item.get_closest_marker("slow") is not None
        if item.get_closest_marker("quick_one_in") and not is_slow:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        for place, item in enumerate(cases):
            (n,) = item.get_closest_marker("quick_one_in").args
            if (place + TURN // OF_CI) % min(n, len(cases)):
                item.add_marker("slow")
                item.add_marker("other_turn")
