"""Where a run is, and what continues it from there.

One object owns position, restore, skipping, save points and signals, which work only
together. A checkpoint is made when every callback has seen a batch, and before any sees
the next: so states of callbacks and variables are of the same step.
"""

import contextlib
import functools
import math
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from towers.collectives.joined_hosts import this_host
from towers.hosts.group import SignalReceived
from towers.keras_adapter import randomness
from towers.keras_adapter.models import batches_done
from towers.lifecycle import current_fit
from towers.lifecycle.checkpoints import saved_model, states, store
from towers.lifecycle.checkpoints.manager import CheckpointManager, alone
from towers.lifecycle.checkpoints.store import Contents, Position
from towers.lifecycle.continuing import data_position, resume
from towers.lifecycle.continuing.data_position import SkipDoneBatches, call_from_batch
from towers.lifecycle.continuing.resume import ResumeError
from towers.lifecycle.current_fit import CurrentEpoch, CurrentFit
from towers.model.fit_call import FitCall, FitsAgain
from towers.numerics.errors import NotFiniteStep
from towers.processes.signals import STOPPING, Signals, Stopped
from towers.program import forks, voice, words


class SavePoints:
    """Tells when the next checkpoint is due, by steps or by minutes.

    Attributes:
        steps: Batches between two checkpoints, if they are counted.
    """

    def __init__(
        self,
        steps: int | None,
        minutes: float | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """See `Checkpoint` for the arguments.

        Raises:
            ValueError: One of them is not as described.
        """
        if steps is not None and (type(steps) is not int or steps < 1):
            raise ValueError(
                f"Received save_steps={steps!r}; expected an integer of at least 1."
            )
        if minutes is not None and not (
            isinstance(minutes, int | float) and minutes >= 0
        ):
            raise ValueError(
                f"Received save_minutes={minutes!r}; expected a number of at least 0, "
                "or None."
            )
        self.steps, self._minutes, self._clock = steps, minutes, clock

    def count_from(self, step: int) -> None:
        """Counts from now on; `step` is the number of the step that is done."""
        self._step, self._time_s = step, self._clock()

    def steps_are_done(self, step: int) -> bool:
        """Tells whether the run is to be saved after a step, by its number."""
        return bool(self.steps) and step - self._step >= self.steps

    def minutes_are_over(self) -> bool:
        """Tells whether the run is to be saved by the clock."""
        if self._minutes is None:
            return False
        return self._clock() - self._time_s >= 60 * self._minutes


class RunState:
    """Owns a run's position, its restoring, skipping, save points and signals.

    `fit` runs inside of `around`. There, `SaveFirst` tells what begins, before any
    other callback hears of it, and `Checkpoint` what ends.

    Attributes:
        checkpoints: Those of the run.
        save_points: When to save inside of an epoch.
        position: How far the run has come.
        past: Batches that were read in each epoch before that, as far back as the data
            are the same; `None` if that is not known.
        known: What the next `fit` is to know besides the variables, if anything.
        preprocessing: What a program does to examples before the model has them, as
            JSON; each checkpoint has a copy.
    """

    def __init__(self, checkpoints: CheckpointManager, save_points: SavePoints):
        self.checkpoints, self.save_points = checkpoints, save_points
        self.position, self.past = Position(0), None
        self._signals = Signals()
        self.known: Contents | None = None
        # Of which model.
        self._known_of: keras.Model | None = None
        self.preprocessing: Mapping[str, Any] | None = None
        self._saved: Position | None = None
        # The checkpoints of the folder, as this process knows them.
        self._seen: set[tuple[str, int]] = set()
        # The object that the last `fit` has trained on.
        self._trained_on = lambda: None
        self._fit, self._epoch = None, CurrentEpoch()

    @property
    def runs(self) -> bool:
        """Tells whether a `fit` runs inside of `around`."""
        return self._fit is not None

    def restore(self, model: keras.Model, which: str = "last") -> bool:
        """Restores a checkpoint; see `Checkpoint.restore`."""
        directory = self.checkpoints.directory
        if not (model.built or model.variables) and store.find(directory):
            raise ValueError(
                f"Received a model without variables for {directory}, where "
                "checkpoints are; expected a built one, so give it a keras.Input."
            )
        self._seen = self._on_disk()
        path, found = self.checkpoints.load(model, which)
        self._known_of, self.known, self._saved = model, None, None
        self.position, self.past = Position(0), None
        if path is None:
            return False
        saved_model.assign(model, found.values)
        self.known = _without_variables(found)
        self.position, self.past = store.position(path), found.about.get("past")
        return True

    @contextlib.contextmanager
    def around(self, call: FitCall) -> Iterator[None]:
        """Has `fit` begin where the run is, and listens to it and to signals.

        Raises:
            ResumeError: The run cannot go on with such data, or another one has gone on
                in its folder.
            SaveError: Another process saves to the folder.
            ValueError: The checkpoint is not of this model.
        """
        writes = this_host().index == 0
        directory = self.checkpoints.directory
        # First of all: what is read later is what nobody else changes.
        with alone(directory) if writes else contextlib.nullcontext():
            if writes:
                self._check_no_others()
            try:
                with self._around(call):
                    yield
            finally:
                self._seen = self._on_disk()

    def _on_disk(self):
        """Returns path and time of each checkpoint: another one may get its name."""
        saved = set()
        try:
            for path in store.find(self.checkpoints.directory):
                # Somebody may have removed it meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    saved.add((path, os.stat(path).st_mtime_ns))
        except (store.DamagedError, OSError):
            return self._seen  # that is said where the folder is read for more
        return saved

    def _check_no_others(self):
        """Checks that nobody has saved since this process has read the folder."""
        others = {path for path, _ in self._on_disk() - self._seen}
        # A run that knows nothing yet reads the folder now.
        if self.known is not None and others:
            newest = max(others, key=store.position)
            raise ResumeError(
                f"Another run has saved {newest} since this one has read the folder; "
                "expected one at a time, so make a new Checkpoint to go on from there."
            )

    @contextlib.contextmanager
    def _around(self, call):
        options = call.options
        call.build_optimizer()
        _restore(self, call)
        asked = Position(options["initial_epoch"])
        goes_on, self.position = self.position > asked, max(self.position, asked)
        data, given = data_position.order(options), options["x"]
        start = _start(self, call, data, goes_on)
        options["x"], options["initial_epoch"] = start.data, start.epoch
        self._trained_on = lambda: None
        with contextlib.suppress(TypeError):  # a list, say
            self._trained_on = weakref.ref(given)
        validates = options["validation_data"] is not None
        validates |= bool(options["validation_split"])
        callbacks = keras.tree.flatten(options["callbacks"])
        options["callbacks"] = [SaveFirst(self), *callbacks, *_history(callbacks)]
        self._fit = CurrentFit(call, callbacks, data, validates, self.position)
        self._epoch = CurrentEpoch()
        with self._signals, warnings.catch_warnings():
            try:
                if self.position > Position(start.epoch):
                    self._skip(call, start)
                yield
                # One that came after the last batch, or even after `on_train_end`.
                self.heed()
                call.meet_hosts()
            except SignalReceived as received:
                self.heed(received.number)
            except NotFiniteStep as error:
                self.checkpoints.finish()
                error.checkpoint = self.checkpoints.latest or ""
                raise
            except FitsAgain:
                self._hand_over()
                raise
            finally:
                self._fit = None
                # What is begun is finished, whatever ends the run.
                self.checkpoints.finish()

    def _hand_over(self):
        """Keeps what the next call of `fit` is to know.

        Raises:
            Stopped: A signal has come too late for this call to heed it.
        """
        if self.known is None:
            self.known, self._known_of = self._contents(), self._fit.call.model
        self._saved = None
        if (number := self._signals.stop) is not None:
            self._stop(number)

    def _skip(self, call, start):
        # Of data begun in the middle, Keras does not know the end.
        warnings.filterwarnings("ignore", "Your input ran out of data")
        call.skips = SkipDoneBatches(
            call,
            self.position,
            batches=self._fit.data["steps_per_epoch"],
            past=[*(self.past or ())],
            whole=start.whole,
            reading=randomness.undisturbed if start.read else None,
            at_end=functools.partial(_end_skipping, self),
        )
        call_from_batch(call, self.position, self._fit.data["steps_per_epoch"])

    def _restore_states(self):
        """Gives others what they knew; after `on_train_begin`, where they forget it."""
        known, self.known = self.known, None
        model, others = self._fit.call.model, self._fit.others
        states.give_back(model, others, known.about, known.values["callbacks"])
        return known

    # What happens, in order.

    def begin_training(self) -> None:
        """Counts steps and minutes from here."""
        self.save_points.count_from(self._fit.step)

    def begin_epoch(self, epoch: int) -> None:
        """Saves what the epoch before has come to."""
        model = self._fit.call.model
        self._fit.values_at_end = None  # It was not the end.
        for callback in states.averaging(self._fit.others):
            callback.on_epoch_begin(epoch)  # puts weights back; twice does no harm
        if self.known is None:
            self.position = Position(epoch)
            self.save()
        elif self.position.batch:
            self._fit.values_before = saved_model.values(model)
            # What is read again is drawn as it was: the order of a pass, say.
            if (found := self.known.about.get("random_at_begin")) is not None:
                randomness.set_random_states(found)
        else:
            self._restore_states()
        call = model.steps_per_execution
        read = math.ceil(self.position.batch / call) * call
        self._epoch = CurrentEpoch(randomness.random_states(), read)
        self.heed()

    def begin_batch(self, batch: int) -> None:
        """Saves if it is time, when all callbacks have seen the batch before."""
        # Of a call that goes on, some steps are done.
        self.position = max(self.position, Position(self.position.epoch, batch))
        self._epoch.batch_begun, self._epoch.metrics = True, None
        # Clocks differ between hosts, and one alone may have heard a signal; but all
        # have a part in a checkpoint.
        wished = self.save_points.minutes_are_over() or self._signals.save
        agreed = self._fit.call.agrees_to_save(wished)
        if self.save_points.steps_are_done(self._fit.step) or agreed:
            self.save()
        self.heed()

    def end_batch(self, batch: int, steps: int | None) -> None:
        """Counts; `steps` are the batches of an epoch, if that is known."""
        done = batches_done(self._fit.call.model, batch)
        self._epoch.batch_begun, self._epoch.read = False, done
        self.position = Position(self.position.epoch, min(done, steps or done))

    def begin_validation(self) -> None:
        """Keeps the metrics of training, whose place validation takes."""
        metrics = self._fit.call.model.metrics_variables
        self._epoch.metrics = saved_model.copies(metrics)

    def heed_in_validation(self) -> None:
        """Heeds, unless averages are in the place of weights until validation ends."""
        if not states.averaging(self._fit.others):
            self.heed()

    def keep_weights(self) -> None:
        """Keeps weights before Keras, as `fit` ends, puts averages in their place."""
        model = self._fit.call.model
        if saved_model.averages(model.optimizer):
            self._fit.values_at_end = self.checkpoints.values(model)

    def end_epoch(self, epoch: int, logs: Mapping[str, Any], steps: int | None) -> None:
        """Notes how good the epoch was, unless later callbacks should not see it."""
        model = self._fit.call.model
        self.checkpoints.wait()
        about = {"variables": self._fit.described(), "step": self._fit.step}
        self.checkpoints.check_finite(saved_model.own_values(model), about)
        self._epoch.score = self.checkpoints.score(logs, self._fit.validates, model)
        # Where Keras does not know how many there are, it begins one batch too many; an
        # epoch also ends where data do.
        begun = self._epoch.batch_begun and not self._fit.call.left_a_batch
        if (
            begun
            or not model.stop_training
            or self.position.batch >= (steps or math.inf)
        ):
            self.position = Position(epoch + 1)
            if self.past is not None:
                self.past.append(self._epoch.read)

    def end_training(self) -> None:
        """Saves, waits for it, and keeps what another `fit` is to know."""
        if self.known is not None:
            # There was no epoch, and nobody was given what they knew.
            self.known = self._restore_states()
            done = words.count(self.position.epoch, "epoch")
            directory = self.checkpoints.directory
            voice.say(f"Nothing left to train: {directory} has {done} already.")
        self.save(self._fit.values_at_end)
        self.checkpoints.wait()
        if self.known is None:
            self.known = self._contents()

    # Saving.

    def heed(self, agreed: int | None = None) -> None:
        """Does what a signal asks for, and hears of a save that has ended.

        `agreed` is the number of a signal on which several hosts have agreed.

        Raises:
            Stopped: A signal asks for the end.
        """
        together = self._fit.call.agreement is not None
        if self._signals.save and not (together and self.position != self._saved):
            self._signals.save = False
            self.save()
            self.checkpoints.wait()
            voice.end_progress_bar()
            voice.say(f"SIGUSR1 received: {self.checkpoints.tell_latest()}.")
        number = agreed or self._signals.stop
        if agreed or (number and self._fit.call.may_stop(number)):
            self._stop(number)
        self.checkpoints.wait(only_if_done=True)

    def _stop(self, number):
        if self._fit.call.can_read_variables():
            self.save()
        self.checkpoints.wait()
        again = "the last checkpoint is {}; run again to continue"
        again = self.checkpoints.tell_latest(again)
        voice.end_progress_bar()
        voice.say(f"Stopped by {STOPPING[number]}: {again}.")
        # Whoever has sent the signal may have sent it to other processes as well.
        forks.end_pools_at_exit()
        raise Stopped(number)

    def save(self, values: Mapping[str, Any] | None = None) -> None:
        """Saves `values`, or the variables', unless that was done here."""
        if self.position in (self._fit.begun, self._saved):
            return
        self.checkpoints.wait()
        self._saved = self.position
        self.save_points.count_from(self._fit.step)
        model = self._fit.call.model
        self.checkpoints.save(self.position, self._contents(), model, values)

    def _contents(self):
        """All that is saved, but for the variables."""
        parts = self._fit, self._epoch, self.position, self.past
        monitor = self.checkpoints.monitor
        return current_fit.contents(*parts, monitor, self.preprocessing)


def _without_variables(found):
    """Returns what a checkpoint holds besides variables, which the model has now."""
    rest = found.values.keys() - found.about["variables"].keys()
    values = {part: [value.numpy() for value in found.values[part]] for part in rest}
    return Contents(values, found.about)


def _restore(run, call):
    """Has a run be where it was."""
    # Equal, if not the same: a tower model is a proxy.
    if run.known is None or call.model != run._known_of:
        run.restore(call.model)


def _start(run, call, data, goes_on):
    """Returns how to begin with the data; says what has changed in them."""
    if goes_on:
        name = run.checkpoints.latest or run.checkpoints.directory
        used = run._trained_on() is call.options["x"]
        start = resume.start(name, run.known.about, run.position, call, data, used)
    else:
        start = data_position.start_anew(call.options, run.position)
    if start.anew:
        run.past = []
    return start


def _history(callbacks):
    """Returns the callback that Keras adds last, to stand before failures of hosts."""
    known = any(isinstance(each, keras.callbacks.History) for each in callbacks)
    return [] if known else [keras.callbacks.History()]


def _end_skipping(run):
    """Undoes what callbacks have done at the beginning of an epoch that goes on.

    They have done it before: what was saved inside of the epoch has seen it.
    """
    if not run.position.batch:
        return
    model = run._fit.call.model
    saved_model.assign(model, run._fit.values_before)
    run._fit.values_before = None
    values = run._restore_states().values.get("metrics", ())
    if len(values) != len(model.metrics_variables):
        raise ResumeError(
            f"The checkpoint {run.checkpoints.latest} is of the middle of an "
            "epoch with other metrics; compile the model with the same, or start "
            "over."
        )
    for variable, value in zip(model.metrics_variables, values, strict=True):
        variable.assign(value)


class SaveFirst(keras.callbacks.Callback):
    """Has the run saved before any other callback hears of what begins."""

    def __init__(self, run: RunState):
        super().__init__()
        self._run = run

    def on_epoch_begin(self, epoch, logs=None):
        """Passes it on."""
        self._run.begin_epoch(epoch)

    def on_train_batch_begin(self, batch, logs=None):
        """Passes it on."""
        self._run.begin_batch(batch)

    def on_epoch_end(self, epoch, logs=None):
        """Passes it on."""
        self._run.keep_weights()
