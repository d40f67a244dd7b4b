"""CI runs each slow test within fifteen commits; cases of quick ones take turns."""

import pathlib
import types

import pytest

from tests import conftest, variants

CASES = [f"a case of number {n}" for n in range(300)]


@pytest.fixture
def turns(monkeypatch):
    """Yields as many turns as are asked for, one after another, from any on."""

    def take(count):
        for turn in range(1307, 1307 + count):
            monkeypatch.setattr(variants, "TURN", turn)
            yield turn

    return take


def test_each_slow_test_runs_once_in_fifteen_turns(turns):
    n = variants.OF_CI
    ran = [case for _ in turns(n) for case in CASES if variants.one_in(n, case)]
    assert sorted(ran) == sorted(CASES)


def test_ci_takes_the_share_that_is_reckoned_with():
    script = (pathlib.Path(__file__).parents[1] / ".ci/run").read_text()
    assert f"--one-in={variants.OF_CI}" in script


class Item:
    """A test that pytest has collected."""

    def __init__(self, nodeid, *marks):
        self.nodeid, self.marks = nodeid, [*marks]

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, name):
        self.marks.append(getattr(pytest.mark, name).mark)

    def has(self, name):
        return self.get_closest_marker(name) is not None


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_in_each_turn_some_cases_are_quick(turns, count):
    mark = pytest.mark.quick_one_in(4).mark
    quick = []
    for _ in turns(4 * variants.OF_CI):
        items = [Item(f"test_a.py::test_b[{n}]", mark) for n in range(count)]
        variants.mark_slow(items)
        names = [item.nodeid for item in items if not item.has("slow")]
        assert len(names) >= count // 4 and names
        quick += names
    assert {*quick} == {f"test_a.py::test_b[{n}]" for n in range(count)}
    assert len(quick) == 4 * variants.OF_CI * max(count / 4, 1)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_ci_takes_each_case_as_a_slow_one_too(turns, n):
    mark = pytest.mark.quick_one_in(n).mark
    ran = set()
    for _ in turns(2 * n * variants.OF_CI):
        items = [Item(f"test_a.py::test_b[{k}]", mark) for k in range(40)]
        variants.mark_slow(items)
        slow = [item.nodeid for item in items if item.has("slow")]
        ran |= {name for name in slow if variants.one_in(variants.OF_CI, name)}
    assert len(ran) == 40


def test_slow_cases_take_no_turn_of_quick_ones(turns):
    mark, slow = pytest.mark.quick_one_in(2).mark, pytest.mark.slow.mark
    for _ in turns(2 * variants.OF_CI):
        marks = [(mark,), (mark, slow), (mark,), (mark, slow)]
        items = [Item(f"test_a.py::test_b[{n}]", *of) for n, of in enumerate(marks)]
        variants.mark_slow(items)
        assert sum(not item.has("slow") for item in items) == 1


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
    assert command.startswith("TOWERS_TURN=77 ")
    assert command.endswith(" -m pytest 'tests/test_a.py::test_b[x y]'")
    reporter.stats = {"passed": [report]}
    conftest.pytest_terminal_summary(reporter)
    assert len(lines) == 2
