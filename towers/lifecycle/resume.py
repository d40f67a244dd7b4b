"""Begins `fit` in the middle of an epoch, where an earlier run has ended.

Keras counts all batches of an epoch, so `fit` goes through those that are done, but
computes nothing and tells no callback.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import keras

from towers.lifecycle import data_position
from towers.lifecycle.checkpoints.store import Position
from towers.lifecycle.skip_batches import Later, Passing, ResumeError, too_few
from towers.model.fit_call import FitCall
from towers.program.voice import say


@runtime_checkable
class Saves(Protocol):
    """What `fit` needs of the callback that saves; see its methods there."""

    position: Position
    past: list[int] | None  # see `data_position.find`
    prepare: Callable
    changes: Callable
    name: str
    used: Callable
    restore_metrics: Callable
    running: Callable
    undisturbed: Callable
    begin_epoch: Callable
    epoch_begun: Callable
    begin_batch: Callable


@contextlib.contextmanager
def going_on(call: FitCall, saves: Saves) -> Iterator[None]:
    """Has `fit` begin where a checkpoint ends, and the callback listen meanwhile.

    Args:
        call: The call of `fit`.
        saves: The callback that saves the model.

    Raises:
        ResumeError: The run cannot go on with such data, or calls of so many steps.
        ValueError: The checkpoint is not of this model.
    """
    model, options = call.model, call.options
    call.build_optimizer()
    saves.prepare(model)
    asked = Position(options["initial_epoch"])
    goes_on = saves.position > asked
    position = saves.position = max(saves.position, asked)
    callbacks = keras.tree.flatten(options["callbacks"])
    data, given = data_position.order(options), options["x"]
    steps = data["steps_per_epoch"]
    start = _start(saves, options, data, goes_on)
    if position.batch:
        _check_calls(position.batch, model.steps_per_execution, steps)
    options["x"], options["initial_epoch"] = start.data, start.epoch
    around = [First(saves), *callbacks]
    options["callbacks"] = around
    validates = options["validation_data"] is not None or options["validation_split"]
    with (
        saves.running(callbacks, data, given, bool(validates)),
        warnings.catch_warnings(),
    ):
        if position > Position(start.epoch):
            # Of data begun in the middle, Keras does not know the end.
            warnings.filterwarnings("ignore", "Your input ran out of data")

            def last():
                if position.batch:
                    saves.epoch_begun()
                    saves.restore_metrics()
                call.skips = None
                model.make_train_function(force=True)

            call.skips = Passing(
                call,
                position,
                past=[*(saves.past or ())],
                whole=start.whole,
                reading=saves.undisturbed if start.read else None,
                last=last,
            )
            options["callbacks"] = Later(
                around,
                position,
                call.skips,
                add_history=True,
                add_progbar=options["verbose"] != 0,
                verbose=options["verbose"],
                epochs=options["epochs"],
                steps=steps,
                model=model,
            )
        yield


def _start(saves, options, data, goes_on):
    """Returns how to begin with the data; prints what has changed in them."""
    if not goes_on:
        saves.past = []
        return data_position.start_anew(options, saves.position)
    position, changes = saves.position, saves.changes(data)
    check_classes(saves.name, *changes.pop("classes", (None, None)))
    if "validation" in changes:
        then, now = changes.pop("validation")
        held_out = {
            k: (then.get(k), now.get(k)) for k in sorted(then.keys() | now.keys())
        }
        held_out = {name: both for name, both in held_out.items() if both[0] != both[1]}
        say(
            f"Note: The run {saves.name} is validated on other data: "
            f"{_listed(held_out, '{} before, {} now')}; the best checkpoint so far was "
            "chosen by the data before."
        )
    if changes and position.batch:
        if [*changes] == ["steps_per_epoch"]:
            _check_calls(position.batch, 1, data["steps_per_epoch"])
        raise ResumeError(
            f"The run {saves.name} goes on in the middle of an epoch, but the data are "
            f"others: {_listed(changes, '{}, but received {}')}; expected the same."
        )
    if changes:
        say(
            f"Note: The run {saves.name} goes on with other data, from their beginning:"
            f" {_listed(changes, '{} before, {} now')}."
        )
        saves.past = []
        return data_position.start_anew(options, position)
    start = data_position.start(options, position, saves.past, saves.used(options["x"]))
    if start.note:
        say(
            "Note: This run goes on with data that are not from towers.input_pipeline."
            f"make_dataset. {start.note}."
        )
    return start


def check_classes(run: str, before: Any, now: Any) -> None:
    """Checks that data have the classes that a run has been trained on.

    Args:
        run: What to call it.
        before: The names of the classes then, or their number; `None` if unknown.
        now: The same of the data it is to go on with.

    Raises:
        ResumeError: They are others.
    """
    if before is None or now is None or before == now:
        return
    numbers = [each if isinstance(each, int) else len(each) for each in (before, now)]
    if numbers[0] != numbers[1]:
        different = f"{numbers[0]} classes, but received data with {numbers[1]}"
    elif int in map(type, (before, now)):
        return
    else:
        first = next(
            i
            for i, names in enumerate(zip(before, now, strict=True))
            if len({*names}) > 1
        )
        different = f"a class {before[first]!r}, but received {now[first]!r} for it"
    raise ResumeError(
        f"The run {run} has {different}; expected the same classes, so choose another "
        "model_dir for these data."
    )


def _listed(changes, text):
    return "; ".join(
        f"{name} {text.format(*('unknown' if each is None else each for each in both))}"
        for name, both in changes.items()
    )


def _check_calls(done: int, call: int, steps: int | None) -> None:
    if steps is not None and done > steps:
        raise too_few(done)
    # The last call of an epoch may be a short one.
    if done % call and done != steps:
        raise ResumeError(
            f"Received steps_per_execution={call} for a run that goes on after batch "
            f"{done} of an epoch, in the middle of such a call; expected a divisor of "
            f"{done}, such as {math.gcd(done, call)}."
        )


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
