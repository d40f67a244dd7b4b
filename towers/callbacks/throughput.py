"""Measures images per second."""

import time
from collections.abc import Callable

import keras


class Throughput(keras.callbacks.Callback):
    """Measures how many examples a second are trained on.

    Only the time inside training calls counts: not validation, not saving, and not
    the warm-up, in which graphs are built. It adds the epoch's mean so far to Keras's
    logs, as `images_per_sec`, so that every callback after it (progress bar,
    TensorBoard, history) shows it; place it first.

    Attributes:
        images_per_sec: The mean over the run so far, `None` during warm-up.
    """

    def __init__(
        self,
        batch_size: int,
        examples: int | None = None,
        warmup_steps: int = 10,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Initializes the callback.

        Args:
            batch_size: Examples in a full global batch.
            examples: Examples in an epoch, if known: the last batch may be short.
            warmup_steps: Steps at the beginning of the run that are not counted.
            clock: Returns seconds.
        """
        super().__init__()
        self._batch_size = batch_size
        self._examples = examples
        self._warmup_steps = warmup_steps
        self._clock = clock
        self._steps = 0
        self._counted = 0
        self._counted_s = 0.0
        self._epoch_counted = 0
        self._epoch_counted_s = 0.0
        self._begun_s = 0.0
        self._next_batch = 0

    @property
    def images_per_sec(self) -> float | None:
        """Examples a second over the run so far, without the warm-up."""
        return self._counted / self._counted_s if self._counted_s else None

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the epoch's count."""
        self._epoch_counted, self._epoch_counted_s = 0, 0.0

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock; `batch` is the first of the call's batches."""
        self._next_batch = batch
        self._begun_s = self._clock()

    def on_train_batch_end(self, batch, logs=None):
        """Stops the clock; `batch` is the last of the call's batches."""
        elapsed_s = self._clock() - self._begun_s
        examples = self._seen(batch + 1) - self._seen(self._next_batch)
        warm = self._steps >= self._warmup_steps
        self._steps += batch + 1 - self._next_batch
        if warm:
            self._counted += examples
            self._counted_s += elapsed_s
            self._epoch_counted += examples
            self._epoch_counted_s += elapsed_s
        self._report(logs)

    def on_epoch_end(self, epoch, logs=None):
        """Adds the epoch's mean to the logs."""
        self._report(logs)

    def _report(self, logs):
        # A mean, as all that Keras logs is: single steps jump.
        if self._epoch_counted_s:
            logs["images_per_sec"] = self._epoch_counted / self._epoch_counted_s

    def _seen(self, batches):
        seen = batches * self._batch_size
        return seen if self._examples is None else min(seen, self._examples)
