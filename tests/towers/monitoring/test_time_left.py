"""An estimate of the time that a run still takes."""

import types

import pytest

from towers.monitoring.steps import TimeLeft


@pytest.fixture
def clock():
    return types.SimpleNamespace(now=100.0)


@pytest.fixture
def time_left(clock):
    return TimeLeft(lambda: clock.now)


def test_the_first_call_which_builds_graphs_does_not_count(clock, time_left):
    assert time_left.left_s(10) is None
    clock.now += 30
    time_left.count(1)
    assert time_left.left_s(9) is None
    for step in (2, 3, 4):
        clock.now += 2
        time_left.count(step)
    assert time_left.left_s(6) == pytest.approx(12)
    assert time_left.elapsed_s == 36


def test_what_happens_between_steps_counts(clock, time_left):
    time_left.count(10)
    clock.now += 10
    time_left.count(20)
    clock.now += 5  # a validation
    assert time_left.left_s(20) == pytest.approx(30)


def test_a_run_that_goes_on_counts_its_own_steps(clock, time_left):
    time_left.count(1000)
    clock.now += 3
    time_left.count(1003)
    assert time_left.left_s(7) == pytest.approx(7)
