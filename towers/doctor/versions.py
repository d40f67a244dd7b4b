"""Versions of Python and packages, as setup.py asks for them; settings of Keras."""

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from towers.doctor.finding import Finding, note, ok, wrong
from towers.keras_adapter import versions
from towers.keras_adapter.versions import installed
from towers.program import keras_settings

_OURS = "keras-towers"
# Each has a line of its own, by the package that asks for it.
NAMED = {"tensorflow": _OURS, "keras": _OURS, "numpy": "tensorflow"}


def python() -> Finding:
    """Checks Python's version."""
    from packaging.specifiers import SpecifierSet

    found = platform.python_version()
    try:
        asked = metadata.metadata(_OURS)["Requires-Python"]
    except metadata.PackageNotFoundError:
        return _not_installed(_OURS)
    text, figures = f"{found} (expected {asked})", {"found": found, "expected": asked}
    if SpecifierSet(asked).contains(found, prereleases=True):
        return ok(text, **figures)
    return wrong(f"{text}; make the environment by such a Python", **figures)


def package(name: str, asked_by: str) -> Finding:
    """Checks a package's version: the requirement of `asked_by` counts."""
    try:
        asked = [each for each in requirements(asked_by) if each.name == name]
    except metadata.PackageNotFoundError:
        return _not_installed(asked_by)
    expected = ",".join(str(each.specifier) for each in asked)
    found = installed(name)
    text = f"{found or 'not installed'} ({asked_by} expects {expected or 'any'})"
    figures = {"found": found, "expected": expected}
    if not all(_fits(each) for each in asked):
        return wrong(f"{text}; {_install(asked)}", **figures)
    if name in versions.NEWEST and (both := versions.mixed(name)):
        return wrong(both, **figures)
    if name in versions.NEWEST and (newer := versions.newer_than_tested(name)):
        return note(newer, **figures)
    return ok(text, **figures)


def others() -> Finding:
    """Checks the versions of all other packages that ours needs."""
    try:
        asked = [each for each in requirements(_OURS) if each.name not in NAMED]
    except metadata.PackageNotFoundError:
        return _not_installed(_OURS)
    found = {each.name: installed(each.name) for each in asked}
    if bad := [each for each in asked if not _fits(each)]:
        return wrong(f"{', '.join(unfit(bad))}; {_install(bad)}", found=found)
    return ok(", ".join(f"{name} {text}" for name, text in found.items()), found=found)


def requirements(name: str, extra: str = "") -> Iterator[Any]:
    """Finds what an installed package needs here.

    Args:
        name: The package.
        extra: An extra of it, whose requirements alone are meant; without one, those
            that are needed without any.

    Returns:
        Requirements of `packaging`.

    Raises:
        PackageNotFoundError: If it is not installed.
    """
    from packaging.requirements import Requirement

    asked = [Requirement(text) for text in metadata.requires(name) or ()]
    needed = [r for r in asked if _applies(r, "")]
    if not extra:
        return iter(needed)
    return (r for r in asked if r not in needed and _applies(r, extra))


def unfit(asked: list[Any]) -> list[str]:
    """Says of each requirement that is not met what is there instead."""
    return [
        f"{each.name} {installed(each.name) or 'not installed'} (expected "
        f"{each.specifier})"
        for each in asked
        if not _fits(each)
    ]


def _applies(requirement, extra):
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _fits(requirement):
    found = installed(requirement.name)
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def _install(requirements):
    asked = " ".join(f"'{each.name}{each.specifier}'" for each in requirements)
    return f"pip install {asked}"


def _not_installed(name):
    return note(
        f"not known whether it fits, as the package {name} is not installed in this "
        "Python: install it, or run another Python, such as .venv/bin/python"
    )


def of_keras() -> Finding:
    """Checks Keras's settings in the environment and in keras.json."""
    try:
        found = keras_settings.ignored()
    except ValueError as error:
        return wrong(str(error))
    if not found:
        return ok("as Towers needs them")
    in_python = "; in Python, set KERAS_BACKEND=tensorflow before Keras is imported"
    hint = in_python if any("on TensorFlow" in each for each in found) else ""
    return note(f"{' '.join(found).rstrip('.')}{hint}", ignored=found)
