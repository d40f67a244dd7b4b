"""Locks a folder of checkpoints for the process that saves there."""

import contextlib
import os
from collections.abc import Iterator

from towers.lifecycle.checkpoints.manager import SaveError
from towers.program import locks

LOCK = "lock"


@contextlib.contextmanager
def alone(directory: str) -> Iterator[None]:
    """Makes a folder, and keeps other processes from saving there.

    A folder that is empty at the end is removed.

    Args:
        directory: The folder of the checkpoints.

    Raises:
        SaveError: Another process saves there, or the lock is another user's.
    """
    path = os.path.join(directory, LOCK)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.made_folder(directory))
            stack.enter_context(locks.locked(path))
        except BlockingIOError as error:
            raise SaveError(
                f"Another run saves to {directory}; expected one at a time, so wait "
                "for its end, or choose another folder."
            ) from error
        except OSError as error:
            if os.path.lexists(path):
                raise SaveError(
                    f"Cannot lock {directory}: {error}; remove that file if no run "
                    "saves there, or choose another folder."
                ) from error
            # If no file can be made there, the first save says so.
        yield
