"""A model from the user's own file: file.py:function."""

import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import keras

from towers.models import spec
from towers.models.facts import Facts, arguments


def one_line(error: BaseException, path: Path) -> str:
    """Says what a user's file has raised, and in which of its lines."""
    said = f"{type(error).__name__} ({' '.join(str(error).split())})"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
    return f"{said} in line {lines[-1]}" if lines else said


def build(
    module: ModuleType,
    path: Path,
    function: str,
    facts: Facts,
    options: Mapping[str, Any],
) -> keras.Model:
    """Calls a function of the user's file with what it asks for of the data, by name.

    Args:
        module: What `load` has returned.
        path: Of the file.
        function: The function's name.
        facts: What the data has.
        options: What was asked for, beyond that.

    Raises:
        ValueError: If there is no such function, or it fails.
    """
    build_model = getattr(module, function, None)
    if not callable(build_model):
        # Python adds functions of its own, such as `__annotate__`.
        named = {name for name in vars(module) if not name.startswith("__")}
        defined = {name for name in named if callable(vars(module)[name])}
        raise spec.no_such_function(path, function, defined)
    what = f"The function {function!r} of {str(path)!r}"
    given, named = arguments(build_model, what, facts, options)
    try:
        model = build_model(*given, **named)
    except (Exception, SystemExit) as error:
        shown = [*map(repr, given), *(f"{name}={v!r}" for name, v in named.items())]
        raise ValueError(
            f"{what} raised {one_line(error, path)} when called with "
            f"({', '.join(shown)}); correct the function."
        ) from error
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"{what} returned {type(model).__name__}, not a keras.Model; return the "
            "model."
        )
    return model


def _make_importable(folder: str) -> None:
    """Lets a user's file import what lies beside it, as Python does for a script.

    Such folders come behind what is installed, which they must not hide, and before the
    current directory where that comes last (see `startup.begin`).
    """
    if folder in sys.path:
        return
    last = len(sys.path) - (sys.path[-1:] == [os.getcwd()])
    sys.path.insert(last, folder)


def load(path: Path) -> ModuleType:
    """Runs the user's file as a module of its own.

    Raises:
        ValueError: It fails.
    """
    _make_importable(str(path.absolute().parent))
    found = importlib.util.spec_from_file_location(f"user_model_{path.stem}", path)
    module = importlib.util.module_from_spec(found)
    # Dataclasses and pickle look a class's module up here.
    sys.modules[found.name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[found.name]
        missing = isinstance(error, ModuleNotFoundError)
        raise ValueError(
            f"The file {str(path)!r} raised {one_line(error, path)} when loaded; "
            f"{'install what is missing, or ' if missing else ''}correct the file."
        ) from error
    return module
