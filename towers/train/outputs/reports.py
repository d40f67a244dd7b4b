"""What a launcher hears of a run at the end of each epoch, if it asks for that."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping

import keras

from towers.cluster.environment import REPORTS
from towers.loop import listeners


@listeners.changes_no_variable
class Reports(keras.callbacks.Callback):
    """Writes a line for each epoch: what it has logged, and the last checkpoint.

    Args:
        descriptor: Where to.
        latest: Returns the path of the last checkpoint, if there is one.
    """

    def __init__(self, descriptor: int, latest: Callable[[], str | None]):
        super().__init__()
        self._descriptor, self._latest = descriptor, latest

    def on_epoch_end(self, epoch, logs=None):
        """Writes it."""
        numbers = {name: float(value) for name, value in (logs or {}).items()}
        line = {
            "metrics": {"epoch": epoch + 1, **numbers},
            "checkpoint": self._latest(),
        }
        with contextlib.suppress(OSError):  # the launcher has gone
            os.write(self._descriptor, f"{json.dumps(line)}\n".encode())


def wanted(environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns the file descriptor of who wants to hear; `None` if nobody does."""
    text = environ.get(REPORTS, "")
    return int(text) if text.isdecimal() else None
