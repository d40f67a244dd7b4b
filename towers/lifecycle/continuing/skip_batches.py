"""Skips the batches that an earlier run has trained on.

Keras counts epochs and batches, opens data and notes their end, as in the earlier run,
but nothing is computed, and no callback is called.

A `Pipeline` is a value, so one that begins at the right record takes its place. Other
data are read, in all calls that were made before, so that a seeded shuffle draws the
same orders.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from towers.lifecycle.checkpoints.store import Position
from towers.loop import loop
from towers.model.fit_call import FitCall
from towers.model.replayable import ReplayableBatches
from towers.program.progress import Progress


class ResumeError(ValueError):
    """A run cannot go on with what `fit` was given."""


def too_few(batches: int) -> ResumeError:
    """Returns the error for data that end too early."""
    return ResumeError(
        f"Received data that end before batch {batches} of an epoch, and the run goes "
        "on after it; expected the data that the run has begun with."
    )


class SkipDoneBatches:
    """A train function that skips batches, and then gives way to the real one.

    It reads again only the batches that were read in the last pass, once it knows that
    the pass is the last. A call that has begun before the position is made up of the
    batches that are left of it.
    """

    def __init__(
        self,
        call: FitCall,
        position: Position,
        *,
        batches: int | None,
        past: Sequence[int],
        whole: bool,
        reading: Callable[[], contextlib.AbstractContextManager] | None,
        at_end: Callable[[], None],
    ):
        """Skips nothing yet.

        Args:
            call: The call of `fit` that skips them.
            position: Where the real train function begins.
            batches: Those of an epoch, if that is known.
            past: Batches that were read in each epoch before, or none if that is not
                known.
            whole: Whether to read also passes that are over.
            reading: Makes what to read in; `None` to read nothing, of data that begin
                where they should.
            at_end: Is called when all are skipped, before the real function is used.
        """
        self._call, self._position = call, position
        self._model, self._steps = call.model, call.model.steps_per_execution
        self._past, self._whole, self._reading = past, whole, reading
        # The last call of an epoch may be of fewer; Keras counts it as a whole one.
        at_epochs_end = batches is not None and position.batch >= batches
        calls = math.ceil(position.batch / self._steps)
        self._done = calls * self._steps if at_epochs_end else position.batch
        self._at_end = at_end
        self._epoch = self._skipped = self._unread = 0
        self._iterator = None

    def begin_epoch(self, epoch: int) -> None:
        """Begins to count the batches of an epoch."""
        self._epoch, self._skipped = epoch, 0

    def __call__(self, iterator: Iterator) -> Any:
        """Skips the batches of a call; returns logs, which nobody sees.

        Raises:
            StopIteration: There were no more in this epoch.
        """
        self._open(iterator)
        if Position(self._epoch) >= self._position:
            self._end()
            return self._model.train_function(iterator)
        before = self._epoch < self._position.epoch
        # The last of them is that of the epoch before the position's.
        ago = self._epoch - self._position.epoch
        if before and self._past and self._skipped >= self._past[ago]:
            raise StopIteration
        self._skipped += self._steps
        self._call.skipped += self._steps
        self._unread += self._steps
        if before or self._skipped < self._done:
            return {}
        left = self._skipped - self._done
        self._unread -= left
        self._call.skipped -= left
        self._end()
        if left > 0:
            rest = ReplayableBatches(iterator, left)
            return self._model.train_function(rest.read())
        return self._model.get_metrics_result()

    def is_done(self, epoch: int, batch: int) -> bool:
        """Tells whether a call is skipped that begins with a batch of an epoch."""
        done = Position(self._position.epoch, self._done)
        return Position(epoch, batch + self._steps) <= done

    def _open(self, iterator):
        if iterator is self._iterator:
            return
        if self._iterator is None:
            self._call.create_variables(loop.without_optionals(iterator.element_spec))
        elif self._whole:
            self._read()
        self._iterator, self._unread = iterator, 0

    def _end(self):
        self._read()
        self._iterator = None
        self._at_end()
        self._call.skips = None
        self._model.make_train_function(force=True)

    def _read(self):
        if self._reading is None or not self._unread:
            return
        what = "Passing over what was trained on before"
        with self._reading(), Progress(what, self._unread, "batches") as shown:
            while shown.done < self._unread and next(self._iterator, None) is not None:
                shown.add()
                self._call.skipped += 1
        # Of a call, there may be fewer, but not none.
        if shown.done <= self._unread - self._steps:
            raise too_few(self._unread)


class CallbacksFromBatch(keras.callbacks.CallbackList):
    """Callbacks that hear only of what comes from a position on."""

    def __init__(
        self, callbacks: Any, position: Position, skips: SkipDoneBatches, **options: Any
    ):
        """Wraps callbacks as `fit` does, with the options of a `CallbackList`.

        The callbacks hear of the batch at `position` first; `skips` skips the batches
        before it.
        """
        self._position, self._skips, self._now = position, skips, 0
        self._hears = False
        # Of data begun in the middle, Keras announces a batch more than there are.
        self._end = options["steps"] or math.inf
        super().__init__(callbacks, **options)

    def on_epoch_begin(self, epoch, logs=None):
        """Notes which epoch it is; passes on what is not skipped."""
        self._now = epoch
        self._skips.begin_epoch(epoch)
        if epoch >= self._position.epoch:
            super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch, logs=None):
        """Passes on what is not skipped."""
        if epoch >= self._position.epoch:
            super().on_epoch_end(epoch, logs)

    def on_train_batch_begin(self, batch, logs=None):
        """Passes on what is not skipped."""
        self._hears = not self._skips.is_done(self._now, batch)
        if self._hears and batch < self._end:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        """Passes on the end of a call that is not skipped."""
        if self._hears:
            super().on_train_batch_end(batch, logs)


def call_from_batch(call: FitCall, position: Position, steps: int | None) -> None:
    """Has the callbacks of a `fit` hear only of what comes from a position on.

    Args:
        call: The call, which skips what comes before.
        position: What they hear of first.
        steps: Batches of an epoch, if that is known.
    """
    options = call.options
    options["callbacks"] = CallbacksFromBatch(
        options["callbacks"],
        position,
        call.skips,
        add_history=True,
        add_progbar=options["verbose"] != 0,
        verbose=options["verbose"],
        epochs=options["epochs"],
        steps=steps,
        model=call.model,
    )
