"""Names the test files about what has changed, for `make test-changed`.

    python -m scripts.changed_tests --since=HEAD~3

These are the changed tests; of each changed module, the tests that import it and those
in the folder of its tests; and the tests that read the whole tree.
"""

import ast
import pathlib
import subprocess
from collections.abc import Iterable, Iterator

from absl import app, flags

ROOT = pathlib.Path(__file__).resolve().parents[1]
# They read all files, whatever has changed.
OF_THE_TREE = [
    f"tests/test_{name}.py" for name in ("docs", "layout", "manners", "writers")
]

flags.DEFINE_string("since", "HEAD", "Commit to compare the working tree with.")


def changed_files(since: str) -> list[str]:
    """Returns the files that differ from a commit, and new ones, from the root."""
    commands = (
        ["git", "diff", "--name-only", since],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    lines = []
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        lines += done.stdout.decode().splitlines()
    return lines


def tests_about(changed: Iterable[str], root: pathlib.Path = ROOT) -> list[str]:
    """Returns the test files about files, sorted.

    Args:
        changed: Paths from the root.
        root: The project.
    """
    changed = set(changed)
    modules = {_module(path) for path in changed if path.endswith(".py")}
    folders = {folder for path in changed for folder in _folder_of_tests(path, root)}
    named = {*OF_THE_TREE}
    for path in (root / "tests").rglob("test_*.py"):
        name = path.relative_to(root).as_posix()
        in_folder = path.parent.relative_to(root).as_posix() in folders
        if in_folder or name in changed or modules & {*_imported(path)}:
            named.add(name)
    return sorted(name for name in named if _is_test(name) and (root / name).exists())


def _is_test(path):
    # Of the exact cases, the quick ones run; the others take hours.
    is_exact = path.startswith("tests/exact/")
    name = path.rpartition("/")[2]
    return path.startswith("tests/") and name.startswith("test_") and not is_exact


def _module(path):
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _folder_of_tests(path, root):
    """Yields the folder that mirrors a module's, unless it holds tests of much more."""
    parent = pathlib.PurePosixPath(path).parent
    below_package = len(parent.parts) > 1 or parent.parts == ("models",)
    if below_package and (root / "tests" / parent).is_dir():
        yield f"tests/{parent}"


def _imported(path: pathlib.Path) -> Iterator[str]:
    """Yields the names of modules that a file imports, and of what it takes of them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def main(_) -> None:
    """Prints the names, with blanks between."""
    print(*tests_about(changed_files(flags.FLAGS.since)))


if __name__ == "__main__":
    app.run(main)
