"""Prints one plain line an interval, for log files."""

import sys
from collections.abc import Callable
from typing import TextIO

import keras

from towers.keras_adapter.models import batches_done
from towers.loop import listeners
from towers.monitoring.steps import Interval


@listeners.changes_no_variable
class Lines(keras.callbacks.Callback):
    """Writes a line every so many steps, and one at the end of each epoch.

    It is for where a progress bar would only fill a file; it prints what is in Keras's
    logs and measures nothing.
    """

    def __init__(
        self,
        log_steps: int = 100,
        stream: TextIO | None = None,
        rate: Callable[[], str] | None = None,
    ):
        """Initializes the callback.

        Args:
            log_steps: Steps between lines.
            stream: Where to write; standard output by default.
            rate: Says how fast the run has been, in place of the logs' mean.

        Raises:
            ValueError: If the number of steps is not positive.
        """
        super().__init__()
        self._interval = Interval(log_steps)
        self._rate = rate
        self._stream = stream
        self._epoch = 0
        self._batches = 0

    def on_train_begin(self, logs=None):
        """Continues the count of a resumed run."""
        self._interval.begin(self.model)

    def on_epoch_begin(self, epoch, logs=None):
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        """Prints a line if the interval is over."""
        self._batches = batches_done(self.model, batch)
        if self._interval.is_over(self.model):
            self._print(logs)

    def on_epoch_end(self, epoch, logs=None):
        """Prints the epoch's line."""
        whole = self._batches >= (self.params.get("steps") or 0)
        self._print(logs, " done" if whole else " stopped")

    def _print(self, logs, suffix=""):
        values = dict(logs)
        rate = values.pop("examples_per_sec", None)
        parts = [f"{name} {value:.4f}" for name, value in values.items()]
        if rate is not None:
            text = self._rate() if self._rate else f"examples/sec: {rate:,.1f}"
            parts.insert(0, text)
        epochs = self.params["epochs"]
        print(
            f"epoch {self._epoch + 1}/{epochs}{suffix}, step {self._interval.step}: "
            + ", ".join(parts),
            file=self._stream or sys.stdout,
            flush=True,
        )
