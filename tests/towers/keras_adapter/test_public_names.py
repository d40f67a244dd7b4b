"""Public names of Keras and TensorFlow that our code writes out exist in every version.

`make test-oldest` runs this with the oldest versions of docs/reference/versions.md.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
import tensorflow as tf

ROOT = Path(__file__).parents[3]
PACKAGES = "towers", "input_pipeline", "models"
LIBRARIES = {"keras": keras, "tf": tf}


def _written_in(source: str) -> Iterator[tuple[str, ...]]:
    """Yields each dotted name that begins with a library's."""
    for node in ast.walk(ast.parse(source)):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in LIBRARIES:
            yield (node.id, *reversed(parts))


def _exists(name: tuple[str, ...]) -> bool:
    library, *attributes = name
    found = LIBRARIES[library]
    for attribute in attributes:
        if isinstance(found, type):
            return True  # What instances have, a class may not show.
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True


@pytest.mark.oldest
@pytest.mark.parametrize("package", PACKAGES)
def test_each_name_that_a_package_writes_exists(package):
    files = [*(ROOT / package).rglob("*.py")]
    names = {name for file in files for name in _written_in(file.read_text("utf-8"))}
    assert len(names) > 10
    assert sorted(".".join(name) for name in names if not _exists(name)) == []


def test_a_name_that_does_not_exist_is_found():
    names = [*_written_in("keras.optimizers.Nothing(1)")]
    assert names == [("keras", "optimizers", "Nothing"), ("keras", "optimizers")]
    assert [_exists(name) for name in names] == [False, True]
