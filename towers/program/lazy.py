"""Imports the names of a package on first use, so that importing it is cheap."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attach(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Makes the `__getattr__`, `__dir__` and `__all__` of a package; see PEP 562.

    The names are those in the package's __init__.pyi, which type checkers read.
    `lazy_loader` does the same (https://scientific-python.org/specs/spec-0001), but
    would have to be installed, and towers.doctor is for machines without any packages.

    Args:
        package: Name of the package.
        file: `__file__` of the package. Imports in the .pyi file beside it are relative
            to the package: `from .module import name as name`.

    Returns:
        The two functions, and the names.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text())
    # `from . import name` has no module: the name is a module.
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {name.name: node.module for node in imports for name in node.names}

    def find(name):
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value = importlib.import_module(f"{package}.{home or name}")
        if home and not hasattr(value, name):
            value = importlib.import_module(f"{package}.{home}.{name}")
        elif home:
            value = getattr(value, name)
        # Later look-ups do not call this function.
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted({*vars(sys.modules[package]), *homes}), sorted(homes)
