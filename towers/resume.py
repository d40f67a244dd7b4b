"""Begins `fit` in the middle of an epoch, where an earlier run has left it.

Keras counts all batches of an epoch, so those that are done are passed over: nothing is
computed, and no callback hears of them.
"""

import contextlib
import dataclasses
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import keras
import tensorflow as tf

from towers import loop
from towers.checkpoints import Position


class ResumeError(ValueError):
    """A run cannot go on with what `fit` was given."""


def say(text: str) -> None:
    """Says on standard error what is no part of a run's results."""
    print(f"towers: {text}", file=sys.stderr, flush=True)


@runtime_checkable
class Saves(Protocol):
    """What `fit` needs of the callback that saves; see its methods there."""

    position: Position
    prepare: Callable
    restore_metrics: Callable
    running: Callable
    begin_epoch: Callable
    epoch_begun: Callable
    begin_batch: Callable


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
        ResumeError: The run cannot go on with such data, or calls of so many steps.
        ValueError: The checkpoint is not of this model.
    """
    saves.prepare(model)
    start = Position(options["initial_epoch"])
    position = saves.position = max(saves.position, start)
    passing, callbacks = None, keras.tree.flatten(options["callbacks"])
    data, steps = order(options), options["steps_per_epoch"] or count(options)
    options["initial_epoch"] = position.epoch
    options["x"], read = data_at(options["x"], position)
    if read and position > start:
        say(
            "Note: Data that are not of towers.input_pipeline.make_dataset are read "
            "from their beginning, as this run goes on; it ends as one that was not "
            "broken off only if they come in the same order again."
        )
    around = [
        First(saves),
        *callbacks,
        keras.callbacks.LambdaCallback(lambda epoch, logs: saves.epoch_begun()),
    ]
    options["callbacks"] = around
    with saves.running(callbacks, data), warnings.catch_warnings():
        if position.batch:
            _check_calls(position.batch, model.steps_per_execution, steps)
            # Of an epoch begun in its middle, Keras does not know the end.
            warnings.filterwarnings("ignore", "Your input ran out of data")

            def last(iterator):
                build(loop.without_optionals(iterator.element_spec))
                saves.restore_metrics()
                model.make_train_function(force=True)
                return model.get_metrics_result()

            passing = Passing(position.batch, model.steps_per_execution, read, last)
            options["callbacks"] = Later(
                around,
                position.epoch,
                position.batch,
                add_history=True,
                add_progbar=options["verbose"] != 0,
                verbose=options["verbose"],
                epochs=options["epochs"],
                steps=steps,
                model=model,
            )
        yield passing


def _check_calls(done: int, call: int, steps: int | None) -> None:
    if steps is not None and done > steps:
        raise _too_few(done)
    # The last call of an epoch may be a short one.
    if done % call and done != steps:
        raise ResumeError(
            f"Received steps_per_execution={call} for a run that goes on after batch "
            f"{done} of an epoch, in the middle of such a call; expected a divisor of "
            f"{done}, such as {math.gcd(done, call)}."
        )


def _too_few(done: int) -> ResumeError:
    return ResumeError(
        f"Received data that end before batch {done} of an epoch, after which the run "
        "goes on; expected the data that it has begun with."
    )


def data_at(data: Any, position: Position) -> tuple[Any, bool]:
    """Returns data that begin at a position, and whether to pass over the batches.

    Args:
        data: What `fit` was given. Of what `towers.input_pipeline.make_dataset` has
            made, the records before are not read; the epochs of others are all alike.
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


def order(options: dict[str, Any]) -> dict[str, Any]:
    """Returns, as JSON, what is known to decide which records a batch has.

    Args:
        options: The arguments of `fit`, by name.
    """
    pipeline = getattr(options["x"], "pipeline", None)
    found = getattr(pipeline, "order", None)
    if found is None:
        found = {"batch size": batch_size(options), "batches": count(options)}
    return json.loads(json.dumps(found, default=int))


def batch_size(options: dict[str, Any]) -> int | None:
    """Returns the batch size of the data of `fit`, if it is known."""
    data = options["x"]
    if (pipeline := getattr(data, "pipeline", None)) is not None:
        return pipeline.batch_size
    if isinstance(data, tf.data.Dataset):
        return _length(data.element_spec)
    return None if _length(data) is None else options["batch_size"] or 32


def count(options: dict[str, Any]) -> int | None:
    """Returns the number of batches of the data of `fit`, if it is known."""
    data = options["x"]
    if isinstance(data, keras.utils.PyDataset):
        return data.num_batches
    if isinstance(data, tf.data.Dataset):
        cardinality = int(data.cardinality())
        return cardinality if cardinality >= 0 else None
    if (examples := _length(data)) is None:
        return None
    if options["validation_split"] and options["validation_data"] is None:
        examples = math.floor(examples * (1 - options["validation_split"]))
    return math.ceil(examples / batch_size(options))


def _length(arrays: Any) -> int | None:
    """The first dimension of arrays, or of their specs, if it is known."""
    first = next(iter(keras.tree.flatten(arrays)), None)
    shape = getattr(first, "shape", None)
    if isinstance(shape, tf.TensorShape):
        shape = shape.rank and shape.as_list()
    return shape[0] if shape else None


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
        self._batches, self._steps, self._read, self._last = batches, steps, read, last
        self._left = batches

    def __call__(self, iterator: Iterator) -> Any:
        """Passes over the batches of a call; returns logs, which nobody sees."""
        count = min(self._left, self._steps)
        if self._read:
            # Of a call, there may be fewer, but not none.
            found = [next(iterator, None) is not None for _ in range(count)]
            if not any(found):
                raise _too_few(self._batches)
        self._left -= count
        return {} if self._left else self._last(iterator)


class First(keras.callbacks.Callback, Saves):
    """Has the run saved before any callback hears of what begins.

    It is told by its class, wherever a save is looked for.
    """

    def __init__(self, saves: Saves):
        """Initializes the callback.

        Args:
            saves: What saves.
        """
        super().__init__()
        self._saves = saves

    def on_epoch_begin(self, epoch, logs=None):
        """Passes it on."""
        self._saves.begin_epoch(epoch)

    def on_train_batch_begin(self, batch, logs=None):
        """Passes it on."""
        self._saves.begin_batch(batch)


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
