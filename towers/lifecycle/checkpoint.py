"""Saves a run while it goes on, so that another process can continue it."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import keras

from towers.lifecycle.checkpoints import saved_model, states, store
from towers.lifecycle.checkpoints.best import Best, Monitor
from towers.lifecycle.checkpoints.manager import CheckpointManager
from towers.lifecycle.checkpoints.store import Position
from towers.lifecycle.run_state import RunState, SaveFirst, SavePoints
from towers.model import fit_call
from towers.model.fit_call import FitCall


@fit_call.changes_no_variable
class Checkpoint(keras.callbacks.Callback):
    """Saves a run of a tower model, so that the next `fit` continues it.

    A checkpoint contains the variables of model and optimizer (with loss scale and
    moving averages), the metrics of the epoch, the states of random generators, the
    history, the states of Keras's callbacks, and the position in the data. Of a model
    with its own `train_step`, it contains all optimizers, and the `tf.Variable`s that
    attributes hold. It is made at the end of each epoch, at the given intervals, on
    SIGUSR1, and before SIGTERM or Ctrl-C ends the run. A thread writes it from a copy,
    so training waits only for the previous save; see `background`.

    With data from `towers.input_pipeline.make_dataset`, `fit` continues at the next
    batch. Other data are read again up to that batch, so they must contain the same
    records in the same order. During an epoch, the data and the arguments of `fit` must
    stay the same. A second `fit` in the same process continues where the first one
    ended, with the current weights. After an error, or with another model, it continues
    from the last checkpoint.

    If a variable is not finite, the run ends at the next save or at the end of the
    epoch, before later callbacks such as `ModelCheckpoint` see it.

    A run may continue with another number of towers.

    Attributes:
        run: The state of the run. This callback is its handle.
    """

    def __init__(
        self,
        directory: str,
        *,
        save_steps: int | None = None,
        save_minutes: float | None = None,
        keep_checkpoints: int = 3,
        monitor: str | None = None,
        mode: str = "auto",
        on_save_error: str = "stop",
        background: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Initializes the callback. It writes nothing yet.

        Args:
            directory: Folder for the checkpoints.
            save_steps: Batches between two checkpoints during an epoch. None: none.
            save_minutes: Minutes between two checkpoints during an epoch. None: none.
            keep_checkpoints: Number of checkpoints to keep, besides the best one.
            monitor: Metric that determines the best checkpoint, after a whole epoch.
                None: `val_loss`, or `loss` without validation data.
            mode: Whether the best is the "min" or the "max" of the metric. "auto"
                infers it from the metric, as Keras does.
            on_save_error: What to do if a checkpoint cannot be written, because the
                disk is full, for example: "stop" training, or "continue" with a
                warning.
            background: Whether a thread writes checkpoints while training goes on. That
                takes memory for a copy of the variables. Otherwise training waits, and
                they are written piece by piece, without a copy. None: in the
                background if twice the size of the variables is free.
            clock: Returns seconds.
        """
        super().__init__()
        checkpoints = CheckpointManager(
            directory,
            keep_checkpoints,
            Monitor(monitor, mode),
            on_save_error,
            background,
        )
        self.run = RunState(checkpoints, SavePoints(save_steps, save_minutes, clock))

    @property
    def position(self) -> Position:
        """The position of the run: its epoch and batch."""
        return self.run.position

    @property
    def batch_size(self) -> int | None:
        """Examples in a batch of the data that it was restored with, if known."""
        known = self.run.known
        if known is None:
            return None
        # For foreign data, only the callback knows it.
        size = states.state_of(known.about, "BatchPerTower").get("size")
        return size or (known.about.get("data") or {}).get("batch size")

    @property
    def past(self) -> list[int] | None:
        """Number of batches that were read in each earlier epoch.

        It goes back as far as the data are the same. `None` if unknown.
        """
        return self.run.past

    @property
    def latest(self) -> str | None:
        """Path of the last checkpoint that was read or written, if there is one."""
        return self.run.checkpoints.latest

    @property
    def discarded(self) -> Sequence[str]:
        """Paths of the checkpoints that the next save removes."""
        return self.run.checkpoints.discarded

    def restore(self, model: keras.Model, which: str = "last") -> bool:
        """Restores a checkpoint into a model. The next `fit` continues from there.

        Args:
            model: A built and compiled model.
            which: "last" is the latest checkpoint that can be read, "best" is the best
                one. Otherwise the path of a checkpoint. Later checkpoints are removed
                with the next save.

        Returns:
            Whether there was a checkpoint.

        Raises:
            ValueError: There are checkpoints, but none can be read, or none is of this
                model.
        """
        return self.run.restore(model, which)

    def find_best(self, model: keras.Model) -> Best | None:
        """Returns the best checkpoint up to the current position, if there is one.

        Args:
            model: Its metrics decide whether more is better.

        Raises:
            ValueError: The metrics do not decide that.
        """
        return self.run.checkpoints.find_best(model, self.position)

    @property
    def monitor(self) -> Monitor:
        """The metric that tells which checkpoint is the best."""
        return self.run.checkpoints.monitor

    @property
    def epochs_since_best(self) -> int:
        """Epochs since the best one by the metric, according to the latest checkpoint.

        0 if it has no best epoch, or was made in the middle of an epoch.
        """
        if self.latest is None or self.position.batch:
            return 0
        about = store.load_about(self.latest)
        return self.monitor.epochs_since_best(about)

    @contextlib.contextmanager
    def as_in(self, path: str, model: keras.Model) -> Iterator[None]:
        """A context in which a model has the values of a checkpoint.

        Raises:
            ValueError: The checkpoint cannot be read.
        """
        now = saved_model.values(model)
        saved_model.assign(model, store.load(path).values)
        try:
            yield
        finally:
            saved_model.assign(model, now)

    def around_fit(self, call: FitCall) -> contextlib.AbstractContextManager[None]:
        """A context in which a `fit` begins at the run's position; see `FitCall`."""
        callbacks = keras.tree.flatten(call.options["callbacks"])
        another = any(isinstance(callback, SaveFirst) for callback in callbacks)
        # Keras reports a model that is not compiled.
        if self not in callbacks or another or not call.model.compiled:
            return contextlib.nullcontext()
        return self.run.around(call)

    # Called by Keras.

    def on_train_begin(self, logs=None):
        """Begins to count steps and minutes."""
        if not self.run.runs:
            raise ValueError(
                "Received a Checkpoint that this `fit` does not restore; expected one "
                "only, in the list of callbacks, and a model of multi_gpu_model(), not "
                "a plain Keras model."
            )
        self.run.begin_training()

    def on_train_batch_end(self, batch, logs=None):
        """Counts the batches of the call."""
        self.run.end_batch(batch, self.params.get("steps"))

    def on_test_begin(self, logs=None):
        """Keeps the metrics of training, which validation overwrites."""
        self.run.begin_validation()

    def on_test_batch_begin(self, batch, logs=None):
        """Handles a signal during validation, unless the weights are averages."""
        self.run.heed_in_validation()

    def on_epoch_end(self, epoch, logs=None):
        """Scores the epoch; raises an error before later callbacks see a bad one."""
        self.run.end_epoch(epoch, logs or {}, self.params.get("steps"))

    def on_train_end(self, logs=None):
        """Saves, waits for the save, and keeps the state for another `fit`."""
        self.run.end_training()
