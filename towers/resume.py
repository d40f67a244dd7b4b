"""Begins `fit` in the middle of an epoch, where an earlier run has left it.

Keras counts all batches of an epoch, so those that are done are passed over: nothing is
computed, and no callback hears of them.
"""

import contextlib
import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import keras
import tensorflow as tf

from towers import loop
from towers.checkpoints import Position


@runtime_checkable
class Saves(Protocol):
    """What `fit` needs of the callback that saves; see its methods there."""

    position: Position
    prepare: Callable
    restore_metrics: Callable
    running: Callable


@contextlib.contextmanager
def going_on(
    model: keras.Model,
    saves: Saves,
    options: dict[str, Any],
    build: Callable[[Any], None],
) -> Iterator["Passing | None"]:
    """Has `fit` begin where a checkpoint ends, and the callback listen meanwhile.

    Args:
        model: What is to be fitted.
        saves: The callback that saves it.
        options: The arguments of `fit`, by name; are changed.
        build: Takes the `tf.TypeSpec`s of a batch, and creates what is missing.

    Yields:
        What is to be the train function at first, if batches are to be passed over.

    Raises:
        ValueError: The checkpoint is not of this model, or not of such batches.
    """
    saves.prepare(model)
    saves.position = max(saves.position, Position(options["initial_epoch"]))
    position, passing = saves.position, None
    callbacks = keras.tree.flatten(options["callbacks"])
    size = batch_size(options["x"]) or options["batch_size"]
    steps = options["steps_per_epoch"] or count(options["x"])
    options["initial_epoch"] = position.epoch
    options["x"], read = data_at(options["x"], position)
    if read:
        print(
            "towers: Note: Data that are not of input_pipeline.make_dataset are read "
            "from their beginning when a run goes on; it ends as one that was not "
            "broken off only if they come in the same order again.",
            file=sys.stderr,
            flush=True,
        )
    if position.batch:

        def last(iterator):
            build(loop.without_optionals(iterator.element_spec))
            saves.restore_metrics()
            model.make_train_function(force=True)
            return model.get_metrics_result()

        passing = Passing(position.batch, model.steps_per_execution, read, last)
        options["callbacks"] = Later(
            callbacks,
            position.epoch,
            position.batch,
            add_history=True,
            add_progbar=options["verbose"] != 0,
            verbose=options["verbose"],
            epochs=options["epochs"],
            steps=steps,
            model=model,
        )
    with saves.running(callbacks, size), warnings.catch_warnings():
        if passing is not None:
            # Of an epoch begun in its middle, Keras does not know the end.
            warnings.filterwarnings("ignore", "Your input ran out of data")
        yield passing


def data_at(data: Any, position: Position) -> tuple[Any, bool]:
    """Returns data that begin at a position, and whether to pass over the batches.

    Args:
        data: What `fit` was given. Of what `input_pipeline.make_dataset` has made, the
            records before are not read; the epochs of others are all alike.
        position: Where to begin.
    """
    pipeline = getattr(data, "pipeline", None)
    if pipeline is None:
        return data, True
    size = pipeline.source.splits[pipeline.split]
    record = position.batch * pipeline.batch_size
    moved = dataclasses.replace(
        pipeline,
        start_epoch=position.epoch,
        start_record=record if size is None else min(record, size),
    )
    return moved.dataset(), False


def batch_size(data: Any) -> int | None:
    """Returns the batch size of data, if it is known."""
    return getattr(getattr(data, "pipeline", None), "batch_size", None)


def count(data: Any) -> int | None:
    """Returns the number of batches of a data set, if it is known."""
    if not isinstance(data, tf.data.Dataset):
        return None
    cardinality = int(data.cardinality())
    return cardinality if cardinality >= 0 else None


class Passing:
    """A train function that passes over batches, and then gives way to the real one."""

    def __init__(
        self,
        batches: int,
        steps: int,
        read: bool,
        last: Callable[[Iterator], Any],
    ):
        """Passes over nothing yet.

        Args:
            batches: How many to pass over.
            steps: Batches in a call.
            read: Whether the iterator has them, so that they must be read.
            last: Is called with the iterator when all are passed; returns the logs.
        """
        self._left, self._steps, self._read, self._last = batches, steps, read, last

    def __call__(self, iterator: Iterator) -> Any:
        """Passes over the batches of a call; returns logs, which nobody sees."""
        count = min(self._left, self._steps)
        if self._read:
            for _ in range(count):
                next(iterator, None)  # of a call, there may be fewer
        self._left -= count
        return {} if self._left else self._last(iterator)


class Later(keras.callbacks.CallbackList):
    """Callbacks that hear of an epoch's batches only from one of them on."""

    def __init__(self, callbacks: Any, epoch: int, batch: int, **options: Any):
        """Wraps callbacks as `fit` does.

        Args:
            callbacks: As for `keras.callbacks.CallbackList`.
            epoch: The epoch.
            batch: The first batch of it to hear of.
            **options: As for `keras.callbacks.CallbackList`.
        """
        self._epoch, self._batch, self._first = epoch, batch, 0
        # Of data begun in the middle, Keras announces a batch more than there are.
        self._end = options["steps"] or math.inf
        super().__init__(callbacks, **options)

    def on_epoch_begin(self, epoch, logs=None):
        """Notes which batches to pass on."""
        self._first = self._batch if epoch == self._epoch else 0
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch, logs=None):
        """Passes on what is not passed over."""
        if self._first <= batch < self._end:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        """Passes on what is not passed over."""
        if self._first <= batch:
            super().on_train_batch_end(batch, logs)
