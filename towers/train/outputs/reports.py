"""Reports a run's progress to the launcher that asks for it."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping

import keras

from towers.loop import listeners
from towers.monitoring.steps import Interval
from towers.program import forks
from towers.train.settings import REPORTS


@listeners.changes_no_variable
class Reports(keras.callbacks.Callback):
    """Writes a line of JSON now and then.

    "progress" has the step and the logs. After an epoch there is a line with "metrics",
    the epoch and its logs, and "checkpoint", the last one.

    Args:
        descriptor: Where to.
        latest: Returns the path of the last checkpoint, if there is one.
        log_steps: Steps between two lines of progress.
    """

    def __init__(
        self, descriptor: int, latest: Callable[[], str | None], log_steps: int
    ):
        super().__init__()
        # Neither forks nor programs that the run starts keep it open.
        os.set_inheritable(descriptor, False)
        pipe = open(descriptor, "wb", buffering=0, closefd=False)
        self._pipe, self._latest = forks.close_in_children(pipe), latest
        self._interval = Interval(log_steps)

    def on_train_begin(self, logs=None):
        """Says at which step the run begins."""
        self._interval.begin(self.model)
        self._write({"progress": {"step": self._interval.step}})

    def on_train_batch_end(self, batch, logs=None):
        """Writes the progress, if its turn has come."""
        if self._interval.is_over(self.model):
            numbers = {name: float(value) for name, value in logs.items()}
            self._write({"progress": {"step": self._interval.step, **numbers}})

    def on_epoch_end(self, epoch, logs=None):
        """Writes the epoch's metrics, and the last checkpoint."""
        numbers = {name: float(value) for name, value in (logs or {}).items()}
        self._interval.begin(self.model)
        self._write({"progress": {"step": self._interval.step, **numbers}})
        self._write(
            {
                "metrics": {"epoch": epoch + 1, **numbers},
                "checkpoint": self._latest(),
            }
        )

    def _write(self, line):
        with contextlib.suppress(OSError):  # the launcher has gone
            self._pipe.write(f"{json.dumps(line)}\n".encode())


def wanted(environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns the file descriptor to report to; `None` if no launcher asks."""
    text = environ.get(REPORTS, "")
    return int(text) if text.isdecimal() else None
