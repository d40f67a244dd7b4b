"""Where a run is in its data.

Keras opens data for each epoch anew. With `steps_per_epoch` it keeps what it has opened
across epochs, until its end. A pass is what is read of data that were opened once.
"""

import contextlib
import dataclasses
import json
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.lifecycle.checkpoints.store import Position
from towers.loop import loop
from towers.model.first_calls import ReplayableBatches
from towers.model.fit_call import (
    FitCall,
    array_length,
    batch_count,
    batch_size,
    is_arrays,
)
from towers.program.progress import Progress

# What TensorFlow takes if no seed was set for all operations.
_NO_SEED = 87654321

_ONLY_IF = "The run ends as an uninterrupted one only if"
_OTHER = "The run may end with other numbers than an uninterrupted one"


@dataclasses.dataclass(frozen=True)
class DataPlace:
    """A place in data.

    Attributes:
        opened: The epoch that the data have begun with.
        passes: Passes that are over.
        batches: Batches of the next one that were read.
        epoch: The epoch that this pass has begun with.
    """

    opened: int
    passes: int
    batches: int
    epoch: int


@dataclasses.dataclass(frozen=True)
class Start:
    """How `fit` comes to the place where a run goes on.

    Attributes:
        data: What to give it, in the place of its data.
        epoch: Where it begins to count: at this epoch, or an earlier one.
        read: Whether the batches to skip have to be read, as `data` still have them.
        whole: Whether also passes that are over have to be read.
        note: Why the run may end with other numbers than an uninterrupted one.
        anew: Whether the data begin anew, and not where the run was in them.
    """

    data: Any
    epoch: int
    read: bool = True
    whole: bool = False
    note: str | None = None
    anew: bool = False


def start(
    options: dict[str, Any], position: Position, past: Sequence[int] | None, used: bool
) -> Start:
    """Returns how to go on with the data that a run has begun with.

    Args:
        options: The arguments of `fit`, by name.
        position: Where the run goes on.
        past: See `find`; `None` if it is not known.
        used: Whether an earlier `fit` has trained on the same object.
    """
    data, known = options["x"], past is not None
    if past is None:
        # As if all epochs before had been trained on these data.
        batches = options["steps_per_epoch"] or batch_count(options)
        known = batches is not None
        past = [batches or 0] * position.epoch
    place = find(options, position, past)
    if (pipeline := getattr(data, "pipeline", None)) is not None:
        return _start_pipeline(pipeline, options, position, place)
    at_pass = place.epoch if known else position.epoch
    opened = position.epoch - len(past) if known else position.epoch
    if isinstance(data, types.GeneratorType):
        if used:
            note = "The generator goes on where it is, without the batches read ahead"
            return Start(data, position.epoch, read=False, note=note)
        note = f"{_ONLY_IF} the generator yields the same batches again, from its first"
        return Start(data, opened, whole=True, note=note)
    if isinstance(data, keras.utils.PyDataset):
        if data.workers > 1 or (data.workers and data.use_multiprocessing):
            note = f"{_OTHER}: the workers of a PyDataset read ahead"
            return Start(data, position.epoch, note=note)
        note = f"{_ONLY_IF} the PyDataset gives the same batches again"
    elif is_arrays(options):
        # Each pass has the same order, if there is a seed.
        unseeded = options["shuffle"] and seed() is None
        note = f"{_OTHER}: Keras shuffles the arrays, and no seed was set; call "
        note = f"{note}keras.utils.set_random_seed first" if unseeded else None
        return Start(data, at_pass, note=note)
    else:
        note = f"{_ONLY_IF} the data set gives the same records again; to shuffle, it "
        note = f"{note}needs a seed"
        if used:
            # It goes on with its shuffles, from one pass to the next.
            other = "a data set that shuffles has another order when it is opened again"
            note = f"{_OTHER}: {other}" if place.batches else None
    # A shuffle draws numbers whenever it is opened, so passes that are over are opened.
    return Start(data, at_pass if used else opened, note=note)


def start_anew(options: dict[str, Any], position: Position) -> Start:
    """Returns how to begin an epoch with data that the run has not begun with."""
    data = options["x"]
    if (pipeline := getattr(data, "pipeline", None)) is not None:
        moved = dataclasses.replace(
            pipeline, start_epoch=position.epoch, start_record=0
        )
        data = moved.dataset()
    return Start(data, position.epoch, read=False, anew=True)


def _start_pipeline(pipeline, options, position, place):
    """Of what `make_dataset` has made, what is passed over is not read, if possible."""
    size = pipeline.source.splits[pipeline.split]
    epoch, batches = place.opened + place.passes, place.batches
    first, read = position.epoch, False
    if pipeline.repeat and size is not None:
        # It goes on with its next epoch by itself.
        more, batches = divmod(batches, math.ceil(size / pipeline.batch_size))
        epoch += more
    elif options["steps_per_epoch"]:
        # Keras has to count the batches of the pass, and so to be given them.
        first, batches, read = place.epoch, 0, True
    record = batches * pipeline.batch_size
    moved = dataclasses.replace(
        pipeline,
        start_epoch=epoch,
        start_record=record if size is None else min(record, size),
    )
    return Start(moved.dataset(), first, read)


def find(options: dict[str, Any], position: Position, past: Sequence[int]) -> DataPlace:
    """Finds a position's place in the data.

    `past` has the batches that were read in each epoch from the one on that these data
    have begun with, up to the position; `options` are the arguments of `fit`.
    """
    steps, batches = options["steps_per_epoch"], batch_count(options)
    opened = first = position.epoch - len(past)
    passes = read = 0
    for epoch, now in enumerate(past, opened):
        read += now
        over = now < steps if steps and batches is None else read >= (batches or 0)
        if over or not steps:
            passes, read, first = passes + 1, 0, epoch + 1
    return DataPlace(opened, passes, read + position.batch, first)


def order(options: dict[str, Any]) -> dict[str, Any]:
    """Returns, as JSON, what is known to decide which records a batch has.

    "validation" has what is known of the validation data, if anything; `options` are
    the arguments of `fit`.
    """
    pipeline = getattr(options["x"], "pipeline", None)
    found = getattr(pipeline, "order", None)
    if found is None:
        found = {"batch size": batch_size(options), "batches": batch_count(options)}
        if is_arrays(options):
            found["shuffled by seed"] = seed() if options["shuffle"] else "none"
    found = found | {
        "steps_per_epoch": options["steps_per_epoch"] or batch_count(options)
    }
    if (held_out := _validation(options["validation_data"])) is not None:
        found["validation"] = held_out
    return json.loads(json.dumps(found, default=int))


def _validation(data):
    """What is known to decide what a validation measures."""
    if (pipeline := getattr(data, "pipeline", None)) is not None:
        names = "dataset", "files", "split", "examples"
        return {name: pipeline.order[name] for name in names}
    if isinstance(data, tuple | list) and (examples := array_length(data)) is not None:
        return {"examples": examples}
    return None


def seed() -> int | None:
    """Returns the seed of all of TensorFlow's operations, if one was set."""
    found, _ = tf.compat.v1.random.get_seed(0)
    return None if found == _NO_SEED else found


# Skips the batches that an earlier run has trained on.
#
# Keras counts epochs and batches, opens data and notes their end, as in the earlier
# run, but nothing is computed, and no callback is called.
#
# A `Pipeline` is a value, so one that begins at the right record takes its place. Other
# data are read, in all calls that were made before, so that a seeded shuffle draws the
# same orders.


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
