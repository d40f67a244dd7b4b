"""Lets one process at a time save to a folder of checkpoints."""

import contextlib
import os
from collections.abc import Iterator

from towers.lifecycle.checkpoints.manager import SaveError
from towers.program import locks

LOCK = "lock"


@contextlib.contextmanager
def alone(directory: str) -> Iterator[None]:
    """Inside, no other process saves to a folder, which is made.

    If nothing is saved there, it is gone afterwards.

    Args:
        directory: Where the checkpoints lie.

    Raises:
        SaveError: Another process does already, or the lock belongs to another user.
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
            # Where no file can be made, the first save says so.
        yield
