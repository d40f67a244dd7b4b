"""Waits for the lock of a file, and not without end."""

import errno
import fcntl
import os
import time
from typing import IO

_AGAIN_S = 0.02


def opened(path: str) -> IO:
    """Opens a file to lock, which is made if there is none.

    Raises:
        OSError: It cannot be opened, or is something else, such as a pipe.
    """
    if os.path.lexists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return open(path, "a")


def take(file: IO, seconds: float) -> None:
    """Takes the lock of an open file.

    Args:
        file: The file.
        seconds: How long to wait for a process that has it.

    Raises:
        TimeoutError: It still has it: it stands still, or is none of ours.
        OSError: There are no locks here.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"another process has held the lock of {file.name} for {seconds:g} "
                    "s"
                ) from None
        time.sleep(_AGAIN_S)
