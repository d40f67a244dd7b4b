"""Of slow tests, each commit runs some: all run within fifteen."""

import pathlib
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


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_each_case_runs_once_while_all_have_their_turn(turns, n):
    ran = [
        case
        for _ in turns(variants.OF_CI * n)
        for case in CASES
        if variants.one_in(n, case) and variants.is_of_ci(variants.OF_CI, case)
    ]
    assert sorted(ran) == sorted(CASES)


def test_ci_takes_the_share_that_is_reckoned_with():
    script = (pathlib.Path(__file__).parents[1] / ".ci/run").read_text()
    assert f"--one-in={variants.OF_CI}" in script


class Item:
    """A test that pytest has collected."""

    def __init__(self, nodeid, *marks):
        self.nodeid, self.marks = nodeid, [*marks]

    def iter_markers(self, name):
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)

    def add_marker(self, mark):
        mark = getattr(pytest.mark, mark) if isinstance(mark, str) else mark
        self.marks.append(mark.mark)

    def has(self, name):
        return self.get_closest_marker(name) is not None


def test_a_test_of_several_marks_runs_as_often_as_one(turns):
    (mark,) = (m for m in variants.seldom(1).marks if m.name == "one_in")
    ran = []
    for _ in turns(5 * variants.OF_CI):
        items = [Item(case, mark.mark, mark.mark) for case in CASES]
        variants.choose(items)
        ran += [item.nodeid for item in items if not item.has("skip")]
    assert sorted(ran) == sorted(CASES * variants.OF_CI)


@pytest.mark.parametrize("count", [2, 4, 9])
def test_in_each_turn_some_cases_are_quick(turns, count):
    mark = pytest.mark.quick_one_in(4).mark
    quick = []
    for _ in turns(4 * variants.OF_CI):
        items = [Item(f"test_a.py::test_b[{n}]", mark) for n in range(count)]
        variants.choose(items)
        names = [item.nodeid for item in items if not item.has("slow")]
        assert names or count < 4
        quick += names
    assert {*quick} == {f"test_a.py::test_b[{n}]" for n in range(count)}
    assert len(quick) == count * variants.OF_CI


def test_slow_cases_take_no_turn_of_quick_ones(turns):
    mark, slow = pytest.mark.quick_one_in(2).mark, pytest.mark.slow.mark
    for _ in turns(2 * variants.OF_CI):
        marks = [(mark,), (mark, slow), (mark,), (mark, slow)]
        items = [Item(f"test_a.py::test_b[{n}]", *of) for n, of in enumerate(marks)]
        variants.choose(items)
        assert sum(not item.has("slow") for item in items) == 1


def test_for_a_report_all_run(turns, monkeypatch):
    mark = pytest.mark.one_in(5).mark
    for _ in turns(2):
        monkeypatch.setattr(variants, "ALL", True)
        items = [Item(case, mark, pytest.mark.slow.mark) for case in CASES]
        variants.choose(items)
        assert not any(item.has("skip") for item in items)
        assert all(item.has("timeout") for item in items)


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
