"""Of slow tests, each commit runs some: all run within fifteen."""

import types

import pytest

from tests import conftest, variants

CASES = [f"a case of number {n}" for n in range(300)]


@pytest.fixture
def turns(monkeypatch):
    """Yields as many turns as are asked for, one after another, from any on."""

    def take(count):
        monkeypatch.setattr(variants, "ALL", False)
        for turn in range(1307, 1307 + count):
            monkeypatch.setattr(variants, "TURN", turn)
            yield turn

    return take


@pytest.mark.parametrize("n", [2, 4, 5])
def test_each_case_runs_once_while_all_have_their_turn(turns, n):
    ran = [
        case
        for _ in turns(3 * n)
        for case in CASES
        if variants.one_in(n, case) and variants.is_of_ci(3, f"node of {case}")
    ]
    assert sorted(ran) == sorted(CASES)


def test_a_share_runs_in_each_turn(turns):
    for _ in turns(6):
        share = sum(variants.one_in(5, case) for case in CASES)
        assert 30 < share < 90


def test_for_a_report_all_run(turns, monkeypatch):
    for _ in turns(2):
        monkeypatch.setattr(variants, "ALL", True)
        assert all(variants.one_in(5, case) for case in CASES)


def test_a_sampled_test_of_another_turn_is_skipped(turns):
    for _ in turns(2):
        for case in CASES[:20]:
            marks = {mark.name for mark in variants.sampled(5, case).marks}
            runs = variants.one_in(5, case)
            assert marks == ({"slow"} if runs else {"slow", "skip"})


def test_a_failure_says_how_to_repeat_it(monkeypatch):
    monkeypatch.setenv("TOWERS_TURN", "77")
    monkeypatch.delenv("TOWERS_EXACT_ALL", raising=False)
    lines = []
    report = types.SimpleNamespace(nodeid="tests/test_a.py::test_b[x y]")
    reporter = types.SimpleNamespace(
        stats={"failed": [report], "error": [report]},
        section=lines.append,
        line=lines.append,
    )
    conftest.pytest_terminal_summary(reporter)
    title, command = lines
    assert title == "run again"
    assert command.startswith("TOWERS_TURN=77 TF_ENABLE_ONEDNN_OPTS=")
    assert command.endswith(" -m pytest 'tests/test_a.py::test_b[x y]'")
    reporter.stats = {"passed": [report]}
    conftest.pytest_terminal_summary(reporter)
    assert len(lines) == 2
