"""Shows how far an evaluation is, in `fit` and elsewhere, if it takes long."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from towers.loop import listeners
from towers.program.progress import Progress


@listeners.changes_no_variable
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
