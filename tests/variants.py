"""Variants of what a quick test proves already, of which each run takes some."""

import collections
import os
import pathlib
import subprocess
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

ALL = "TOWERS_EXACT_ALL" in os.environ
"""Whether tests take all variants, for a report; it takes hours."""

OF_CI = 3
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
"""Which of the sampled tests run: with each commit, others do.

A test that runs in one turn of five, and of which CI runs one in three, runs once in
fifteen commits. Without Git, this is 0; in a shallow clone, it counts what is there.
"""
# Workers of pytest-xdist inherit it.
os.environ["TOWERS_TURN"] = str(TURN)


def number_of(case: Any) -> int:
    """Returns a number that depends on the text of a case alone."""
    return zlib.crc32(str(case).encode())


def is_of_ci(n: int, nodeid: str) -> bool:
    """Tells whether CI, which takes one test in `n`, runs this test in this turn."""
    return (number_of(nodeid) + TURN) % n == 0


def one_in(n: int, case: Any) -> bool:
    """Tells whether this is the turn, out of `n`, in which a case runs."""
    # This changes with every third commit, and `is_of_ci` with each: so in the three
    # commits of a case's turn, CI takes each of its three thirds once.
    return ALL or (number_of(case) + TURN // OF_CI) % n == 0


def slow(*values: Any, **options: Any) -> Any:
    """Returns parameters of a test that `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def sampled(n: int, *values: Any, **options: Any) -> Any:
    """Returns parameters of a slow test that runs in one turn of `n`."""
    marks = [pytest.mark.slow, pytest.mark.one_in(n)]
    return pytest.param(*values, marks=marks, **options)


def seldom(*values: Any, **options: Any) -> Any:
    """Returns parameters of a slow test that proves little more than others do."""
    return sampled(5, *values, **options)


def choose(items: Sequence[pytest.Item]) -> None:
    """Marks as slow, or skips, what is not of this turn; see pyproject.toml.

    A test is chosen by its name as a whole, once, however many marks it has.
    """
    other = pytest.mark.skip("of another turn; TOWERS_EXACT_ALL=1 runs all")
    for item in items:
        turns = [mark.args[0] for mark in item.iter_markers("one_in")]
        if turns and not one_in(max(turns), item.nodeid):
            item.add_marker(other)
        if ALL and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(0))
    tests = collections.defaultdict(list)
    for item in items:
        is_slow = item.get_closest_marker("slow") is not None
        if item.get_closest_marker("quick_one_in") and not is_slow:
            tests[item.nodeid.partition("[")[0]].append(item)
    # By their places: of few cases, too, one is quick in each turn.
    for cases in tests.values():
        for place, item in enumerate(cases):
            (n,) = item.get_closest_marker("quick_one_in").args
            if (place + TURN // OF_CI) % n:
                item.add_marker("slow")
