"""Writes a file that gets its name once it is whole."""

import contextlib
import os
from collections.abc import Iterator
from typing import IO, Any


@contextlib.contextmanager
def opened(path: str, mode: str = "w", **options: Any) -> Iterator[IO]:
    """Opens a file to write to.

    Whoever reads it sees all of it, or what was there before. Processes of a machine
    that write to the same one use different names, and the last one to end wins. If
    writing fails, nothing is left; a process that is killed leaves
    PATH.PID.unfinished.

    Args:
        path: Its name. The folder has to be there.
        mode: "w", or "wb" for bytes.
        options: Further ones of `open`.

    Raises:
        OSError: It cannot be written.
    """
    path = os.path.realpath(path)  # Links stay.
    unfinished = f"{path}.{os.getpid()}.unfinished"
    try:
        with open(unfinished, mode, **options) as file:
            yield file
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(OSError):
            os.remove(unfinished)
