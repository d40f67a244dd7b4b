"""Optional parts of Towers: the command that installs one, and its import."""

import importlib
import importlib.metadata
import shlex
from types import ModuleType


def install_command(extra: str) -> str:
    """Returns the command that installs the packages of an extra of setup.py.

    The command names these packages, and not ``keras-towers[EXTRA]``, because no
    package index has Towers.

    Args:
        extra: Name of the extra, such as "plots".

    Returns:
        A command such as ``pip install 'pyarrow>=20'``.
    """
    try:
        requirements = importlib.metadata.requires("keras-towers") or []
    except importlib.metadata.PackageNotFoundError:  # the checkout is only on the path
        return f"pip install '.[{extra}]' in the checkout of Towers"
    packages = [
        package.strip()
        for package, _, marker in (line.partition(";") for line in requirements)
        # Some tools write array-record for array_record.
        if f'extra == "{extra}"' in marker.replace("-", "_")
    ]
    return f"pip install {shlex.join(packages)}"


def import_extra(package: str, extra: str) -> ModuleType:
    """Imports a package of an extra of setup.py.

    Raises:
        ValueError: It is not installed, or one that it needs is not.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"{package} cannot be imported ({reason}); run: {install_command(extra)}"
        ) from error
