"""Prints one plain line an interval, for log files."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import keras

from towers.keras_adapter.models import batches_done
from towers.model import fit_call
from towers.monitoring.steps import Interval
from towers.program.progress import Progress


@fit_call.changes_no_variable
class Lines(keras.callbacks.Callback):
    """Writes a line every `log_steps` steps, and one at the end of each epoch.

    It replaces a progress bar where that would only fill a file. It prints Keras's logs
    and measures nothing.
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
            stream: The stream to write to; standard output by default.
            rate: Describes the speed of the run, in place of the logs' mean.

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
        """Takes the number of the epoch."""
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


# Shows how far an evaluation is, in `fit` and elsewhere, if it takes long.


@fit_call.changes_no_variable
class EvaluationProgress(keras.callbacks.Callback):
    """Counts the batches of each evaluation; see `Progress`."""

    def __init__(self, data: Any):
        """Initializes it.

        Args:
            data: What is evaluated on: a `tf.data.Dataset`, or a `PyDataset`.
        """
        super().__init__()
        self._batches = _count(data)
        self._shown: Progress | None = None
        self._open = contextlib.ExitStack()

    @contextlib.contextmanager
    def around_fit(self, call: Any = None) -> Iterator[None]:
        """Ends what is shown, whatever ends the evaluation."""
        with self._open:
            yield

    def on_test_begin(self, logs=None):
        """Begins to count."""
        progress = Progress("Evaluating", self._batches, "batches")
        self._shown = self._open.enter_context(progress)

    # Not as a batch ends: Keras would fetch its logs from the device for that.
    def on_test_batch_begin(self, batch, logs=None):
        """Counts the batches before this one."""
        self._shown.add(batch - self._shown.done)

    def on_test_end(self, logs=None):
        """Ends it."""
        if self._batches is not None:
            self._shown.add(self._batches - self._shown.done)
        self._open.close()


def _count(data: Any) -> int | None:
    """Returns how many batches there are, if that is known."""
    if isinstance(data, keras.utils.PyDataset):
        return data.num_batches
    count = int(data.cardinality())
    return count if count >= 0 else None
