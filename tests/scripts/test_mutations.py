"""The changes of scripts/mutations.toml fit the code, and what became of them is said.

If the first test fails, code has changed under an entry of the table: bring the entry
up to date, so that it breaks the new code in the same way.
"""

import collections
import json

import pytest

from scripts import mutations
from scripts.mutations import AREAS, Mutation, Result

TABLE = mutations.read()
CHANGE = Mutation("a sum is a difference", AREAS[0], "sums.py", "a + b", "a - b", ())
FAILED = (
    "FAILED tests/test_sums.py::test_sum[1 - 2] - assert -1 == 3\n1 failed in 1 s\n"
)
NO_TEST = "ERROR tests/test_sums.py - SyntaxError: bad input\n1 error in 1 s\n"


@pytest.fixture
def runner(tmp_path):
    """Makes a runner whose pytest ends as it is told."""
    (tmp_path / "sums.py").write_text("total = a + b\n")
    return mutations.Runner(tmp_path, timeout_s=1)


def test_the_table_fits_the_code():
    said = mutations.faults(TABLE)
    assert not said, "\n".join([f"{mutations.UP_TO_DATE}:", *said])


def test_each_area_has_some():
    assert min(collections.Counter(entry.area for entry in TABLE).values()) >= 12
    assert {entry.area for entry in TABLE} == {*AREAS}


def test_entries_differ():
    names = [entry.name for entry in TABLE]
    assert len({*names}) == len(names)
    assert all(entry.old != entry.new for entry in TABLE)


def test_their_tests_are_there():
    for entry in TABLE:
        gone = [path for path in entry.tests if not (mutations.ROOT / path).exists()]
        assert entry.tests and not gone, f"{entry.name}: {mutations.UP_TO_DATE}: {gone}"


def test_what_does_not_fit_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    (tmp_path / "sums.py").write_text("a + b\na + b\n")
    (tmp_path / "good.py").write_text("a + b\n")
    twice, gone = CHANGE, Mutation(*("gone", AREAS[0], "none.py", "a", "b", ()))
    broken = Mutation("broken", AREAS[0], "good.py", "a + b", "a +", ())
    said = mutations.faults([twice, gone, broken])
    assert "sums.py has its text not once" in said[0]
    assert "none.py has its text not once" in said[1]
    assert "good.py does not compile" in said[2]


@pytest.mark.parametrize(
    ("code", "said", "unchanged", "status", "test"),
    [
        (2, FAILED, 0, "found", "tests/test_sums.py::test_sum[1 - 2]"),
        (1, FAILED, 1, "broken", "without the change, too"),
        (0, "3 passed in 1 s\n", 0, "MISSED", ""),
        (None, "", 0, "time out", ""),
        (2, NO_TEST, 0, "broken", "exit code is 2: 1 error in 1 s"),
        (5, "no tests ran in 1 s\n", 0, "broken", "exit code is 5"),
    ],
    ids=["found", "fails anyway", "missed", "late", "no import", "no tests"],
)
def test_what_the_tests_tell(
    runner, tmp_path, monkeypatch, code, said, unchanged, status, test
):
    seen = []

    def run_tests(folder, tests, timeout_s, *options):
        seen.append((folder / "sums.py").read_text())
        return (code, said) if options else (unchanged, "")

    monkeypatch.setattr(mutations, "run_tests", run_tests)
    before = (tmp_path / "sums.py").stat().st_mtime_ns
    result = runner.run(CHANGE)
    assert result.status == status and test in result.test
    assert seen[0] == "total = a - b\n"
    assert seen[1:] in ([], ["total = a + b\n"])
    assert (tmp_path / "sums.py").read_text() == "total = a + b\n"
    assert (tmp_path / "sums.py").stat().st_mtime_ns == before


def test_what_has_no_place_is_not_run(runner, tmp_path):
    (tmp_path / "sums.py").write_text("total = sum([a, b])\n")
    result = runner.run(CHANGE)
    assert result.status == "gone" and mutations.UP_TO_DATE in str(result)


def test_a_run_goes_on_where_it_was(tmp_path):
    path = tmp_path / "results.jsonl"
    assert mutations.read_results(str(path)) == {}
    results = [
        Result("one", AREAS[0], "a.py", mutations.FOUND, "test_a.py::test", 1.5),
        Result("two", AREAS[0], "b.py", mutations.GONE),
        Result("three", AREAS[1], "c.py", mutations.MISSED, seconds=2.0),
    ]
    for result in results:
        mutations.write_result(str(path), result)
    assert len([*map(json.loads, path.read_text().splitlines())]) == 3
    # A test may have come that finds it, or the table is up to date.
    assert mutations.read_results(str(path)) == {"one": results[0]}
    lines = mutations.summary(results).splitlines()
    assert lines[0] == "| area | found | missed | gone | time out | broken |"
    assert lines[2:4] == [
        "| step | 1 | 0 | 1 | 0 | 0 |",
        "| reduction | 0 | 1 | 0 | 0 | 0 |",
    ]
    assert lines[-2:] == ["Missed:", "- three (c.py)"]


@pytest.mark.skipif(
    not (mutations.ROOT / ".git").exists(), reason="Git lists what is copied"
)
def test_a_copy_is_what_is_imported_there(tmp_path):
    mutations.copy_tree(tmp_path)
    assert (tmp_path / "towers" / "input_pipeline").is_symlink()
    mutations.check_imports(tmp_path)
