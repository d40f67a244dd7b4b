"""What tests of several processes share is made by one of them."""

import fcntl
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def make(
    factory: pytest.TempPathFactory, name: str, function: Callable[[Path], Any]
) -> Any:
    """Calls a function in the first process that asks; the others wait for it.

    With pytest-xdist, each worker would make its own of what a fixture of a module, or
    of the session, makes.

    Args:
        factory: Knows the folder of all that this run of pytest writes.
        name: What is made, unique in the run.
        function: Gets a new folder for it; returns what can be pickled.

    Returns:
        What the function returned.
    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Of a worker, it lies in the folder of all.
        root = root.parent
    made = root / f"{name}.made"
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root))
            made.write_bytes(pickle.dumps(function(folder)))
    return pickle.loads(made.read_bytes())
