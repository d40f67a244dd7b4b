"""What is imported is asked for in setup.py: by the core, or by an extra."""

import ast
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_layout import _name, _targets, _trees

ROOT = Path(__file__).parents[1]
# The distributions of packages with another name.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "absl": "absl-py",
    "google": "protobuf",
    "grpc": "grpcio",
    "nvidia": "nvidia-dali-cuda120",
}
# The core asks for these, and imports them by no statement: `towers.machine.nvml` the
# first, TensorFlow Datasets the second.
BY_OTHERS = {"nvidia-ml-py", "importlib-resources"}
# These files import packages of an extra when they are imported, and so are imported
# late: after a check that says how to install the extra.
OF_EXTRAS = {
    "input_pipeline/images/dali.py": "dali",
    "input_pipeline/text/hugging_face.py": "tokenizers",
    "input_pipeline/text/pieces.py": "text",
    "towers/launch/on_ray/": "ray",
    "towers/queue/on_ray/": "ray",
    "towers/report/charts.py": "report",
    "towers/report/figures.py": "report",
    "towers/report/page.py": "report",
}
# Whoever works in a checkout has these.
FOR_DEVELOPERS = {"dev", "docs", "bench", "examples"}


@pytest.fixture(scope="module")
def asked():
    """The distributions that setup.py asks for: by an extra's name, "" for the core."""
    given = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", given.update)
        runpy.run_path(str(ROOT / "setup.py"))
    requirements = {"": given["install_requires"], **given["extras_require"]}
    return {
        extra: {canonicalize_name(Requirement(text).name) for text in texts}
        for extra, texts in requirements.items()
    }


def test_what_is_imported_at_once_is_asked_for(asked):
    """By the core, or by the extra of a file that is imported late."""
    for path, tree in _sources():
        allowed = asked[""] | asked.get(_extra(path), set())
        assert _distributions(_at_once(tree)) <= allowed, path


def test_what_is_imported_late_is_asked_for(asked):
    """By the core, or by an extra for users."""
    allowed = set().union(*(asked[extra] for extra in asked.keys() - FOR_DEVELOPERS))
    for path, tree in _sources():
        assert _distributions(ast.walk(tree)) <= allowed, path


def test_files_of_an_extra_are_imported_late():
    extras = {_name(path).removesuffix(".__init__"): _extra(path) for path in _paths()}
    for path, tree in _sources():
        for node in _at_once(tree):
            for target in _targets(node):
                # What is no module is a name in one.
                module = target if target in extras else target.rpartition(".")[0]
                assert extras.get(module) in (None, _extra(path)), (path, target)


def test_nothing_else_is_asked_for(asked):
    imported = _distributions(node for _, tree in _sources() for node in ast.walk(tree))
    assert asked[""] - imported == BY_OTHERS


def _sources() -> list[tuple[Path, ast.Module]]:
    return [
        (path, tree) for path, tree in _trees().items() if path.parts[0] != "scripts"
    ]


def _paths() -> list[Path]:
    return [path for path, _ in _sources()]


def _extra(path: Path) -> str | None:
    """The extra that a file belongs to."""
    found = (extra for begin, extra in OF_EXTRAS.items() if str(path).startswith(begin))
    return next(found, None)


def _at_once(node: ast.AST) -> Iterator[ast.AST]:
    """Everything that runs when a module is imported."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _at_once(child)


def _distributions(nodes: Iterator[ast.AST]) -> set[str]:
    """What brings the packages that statements import, without Python's and ours."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    roots = {name.partition(".")[0] for name in names}
    roots -= {"towers", *sys.stdlib_module_names}
    return {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in roots}
