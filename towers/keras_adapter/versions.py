"""The versions of TensorFlow and Keras that Towers is tested with.

`setup.py` names the oldest versions. With newer ones, Towers warns, and works if it
can. docs/reference/versions.md explains how to take in a new version.
"""

import contextlib
import re
import warnings
from importlib import metadata

NEWEST = {"tensorflow": (2, 22), "keras": (3, 15)}
"""The newest minor versions that the tests run with."""

_PACKAGES = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu"),
    "keras": ("keras", "keras-nightly"),
}


def packages(name: str) -> dict[str, str]:
    """Returns the versions of the installed packages that provide a library.

    TensorFlow and Keras come in several packages, such as keras-nightly, which a
    release candidate of TensorFlow installs.

    Args:
        name: The library, as in `NEWEST`, or another package.

    Returns:
        The versions by the packages' names; more than one if they share a folder, where
        the files of one lie among those of the other.
    """
    versions = {}
    for package in _PACKAGES.get(name, (name,)):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def installed(name: str) -> str | None:
    """Returns the version of an installed library, such as "keras", if there is one."""
    return next(iter(packages(name).values()), None)


def mixed(name: str) -> str | None:
    """Returns a warning if two installed packages provide a library, else `None`."""
    both = packages(name)
    if len(both) < 2:
        return None
    listed = " and ".join(f"{package} {version}" for package, version in both.items())
    return (
        f"{listed} are both installed, and overwrite each other's files; run: pip "
        f"uninstall -y {' '.join(both)}, then install one of them."
    )


def newer_than_tested(name: str) -> str | None:
    """Returns a warning if a package of `NEWEST` is newer than tested, else `None`."""
    package, version = next(iter(packages(name).items()), (name, ""))
    major, minor = NEWEST[name]
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) <= (major, minor):
        return None
    first = "" if package == name else f"uninstall {package}, and "
    return (
        f"{package} {version} is newer than {major}.{minor}, the newest that Towers is "
        f"tested with; if anything goes wrong, {first}install "
        f"'{name}<{major}.{minor + 1}'."
    )


_said: set[str] = set()


def notes() -> list[str]:
    """Returns the warnings about the packages of `NEWEST`, each once."""
    checks = mixed, newer_than_tested
    texts = {text for name in NEWEST for c in checks if (text := c(name))} - _said
    _said.update(texts)
    return sorted(texts)


def warn() -> None:
    """Warns once of packages that are newer than tested, or in each other's way."""
    for text in notes():
        warnings.warn(text, stacklevel=3)
