"""`make test-changed` runs the tests about what has changed."""

import subprocess

import pytest

from scripts import changed_tests


@pytest.fixture
def project(tmp_path):
    """A project with a module in a package, and tests."""
    files = {
        "towers/loop/timers.py": "",
        "towers/plan.py": "",
        "tests/towers/loop/test_timers.py": "",
        "tests/towers/model/test_model.py": "from towers.loop import timers",
        "tests/towers/model/test_auto.py": "import towers",
        "tests/test_readme.py": "import towers.plan",
        "tests/test_layout.py": "",
        "tests/hosts.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


LAYOUT = "tests/test_layout.py"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            "towers/loop/timers.py",
            ["tests/towers/loop/test_timers.py", "tests/towers/model/test_model.py"],
        ),
        ("towers/loop/gone.py", ["tests/towers/loop/test_timers.py"]),
        ("towers/plan.py", ["tests/test_readme.py"]),
        ("tests/towers/model/test_auto.py", ["tests/towers/model/test_auto.py"]),
        ("tests/towers/model/test_gone.py", []),
        ("README.md", []),
    ],
)
def test_tests_about_a_file(project, changed, expected):
    wanted = [LAYOUT, *expected]
    assert changed_tests.tests_about([changed], project) == sorted(wanted)


def test_tests_of_a_helper_are_those_that_import_it(project):
    file = project / "tests/towers/model/test_auto.py"
    file.write_text("from tests import hosts")
    found = changed_tests.tests_about(["tests/hosts.py"], project)
    assert found == [LAYOUT, "tests/towers/model/test_auto.py"]


def test_tests_that_read_the_tree_exist():
    for name in changed_tests.OF_THE_TREE:
        assert (changed_tests.ROOT / name).exists()


def test_files_that_differ_from_a_commit_and_new_ones(tmp_path, monkeypatch):
    def git(*arguments):
        who = "-c", "user.name=a", "-c", "user.email=a@example.com"
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True)

    for name in ("kept.py", "changed.py", "gone.py"):
        (tmp_path / name).write_text("")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=first")
    (tmp_path / "changed.py").write_text("1")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "new.py").write_text("")
    monkeypatch.setattr(changed_tests, "ROOT", tmp_path)
    files = changed_tests.changed_files("HEAD")
    assert sorted(files) == ["changed.py", "gone.py", "new.py"]
