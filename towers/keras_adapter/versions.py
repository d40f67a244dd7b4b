"""The versions of TensorFlow and Keras that Towers is tested with.

`setup.py` names the oldest versions. With newer ones, Towers warns, and works if it
can. docs/reference/versions.md explains how to take in a new version.
"""

import re
import warnings
from importlib import metadata

NEWEST = {"tensorflow": (2, 21), "keras": (3, 15)}
"""The newest minor versions that the tests run with."""


def newer_than_tested(name: str) -> str | None:
    """Returns a warning if a package of `NEWEST` is newer than tested, else `None`."""
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    major, minor = NEWEST[name]
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None or tuple(map(int, numbers.groups())) <= (major, minor):
        return None
    return (
        f"{name} {installed} is newer than {major}.{minor}, the newest that Towers is "
        f"tested with; if anything goes wrong, install '{name}<{major}.{minor + 1}'."
    )


_said: set[str] = set()


def notes() -> list[str]:
    """Returns the warnings about packages that are newer than tested, each once."""
    texts = {text for name in NEWEST if (text := newer_than_tested(name))} - _said
    _said.update(texts)
    return sorted(texts)


def warn() -> None:
    """Warns once of packages that are newer than tested."""
    for text in notes():
        warnings.warn(text, stacklevel=3)
