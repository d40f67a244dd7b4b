"""Saves a run while it goes on, so that another process can continue it."""

import concurrent.futures
import contextlib
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from towers._deprecated import accepts_old_names
from towers.keras_adapter.models import batches_done
from towers.lifecycle import resume
from towers.lifecycle.checkpoints import saved_model, states, store
from towers.lifecycle.checkpoints.best import Best, Monitor
from towers.lifecycle.checkpoints.store import Contents, Position
from towers.lifecycle.resume import ResumeError
from towers.lifecycle.signals import Signals, Stopped
from towers.loop import listeners
from towers.model.fit_call import FitCall
from towers.numerics.not_finite import NotFinite, NotFiniteStep
from towers.program import words
from towers.program.voice import say, warn


class SaveError(Exception):
    """A checkpoint could not be written; those before are as they were."""


@accepts_old_names
@listeners.changes_no_variable
class Checkpoint(keras.callbacks.Callback):
    """Saves a run of a tower model, so that the next `fit` continues it.

    A checkpoint contains the variables of model and optimizer (with loss scale and
    moving averages), the metrics of the epoch, the states of random generators, the
    history, the states of Keras's callbacks, and the position in the data. It is made
    at the end of each epoch, at the given intervals, on SIGUSR1, and before SIGTERM or
    Ctrl-C ends the run. A thread writes it from copies, so training waits only for the
    previous save.

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
        position: How far the run has come.
        past: Number of batches that were read in each epoch before, as far back as the
            data are the same. `None` if that is not known.
        latest: Path of the last checkpoint that was read or written, or `None`.
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
        clock: Callable[[], float] = time.monotonic,
    ):
        """Initializes the callback. It writes nothing yet.

        Args:
            directory: Folder for the checkpoints.
            save_steps: Batches between two checkpoints during an epoch. None: no limit.
            save_minutes: Minutes between two checkpoints during an epoch. None: no
                limit.
            keep_checkpoints: Number of checkpoints to keep, besides the best one.
            monitor: Metric that determines the best checkpoint, after a whole epoch.
                None: `val_loss`, or `loss` without validation data.
            mode: Whether the best is the "min" or the "max" of the metric. "auto"
                infers it from the metric, as Keras does.
            on_save_error: What to do if a checkpoint cannot be written, because the
                disk is full, for example: "stop" training, or "continue" with a
                warning.
            clock: Returns seconds.
        """
        super().__init__()
        if not isinstance(directory, str | os.PathLike):
            raise ValueError(f"Received directory={directory!r}; expected a path.")
        numbers = {"keep_checkpoints": keep_checkpoints}
        if save_steps is not None:
            numbers["save_steps"] = save_steps
        for name, value in numbers.items():
            if type(value) is not int or value < 1:
                raise ValueError(
                    f"Received {name}={value!r}; expected an integer of at least 1."
                )
        if save_minutes is not None and not (
            isinstance(save_minutes, int | float) and save_minutes >= 0
        ):
            raise ValueError(
                f"Received save_minutes={save_minutes!r}; expected a number of at "
                "least 0, or None."
            )
        if on_save_error not in ("stop", "continue"):
            raise ValueError(
                f"Received on_save_error={on_save_error!r}; expected 'stop' or "
                "'continue'."
            )
        self._directory = os.path.abspath(os.path.expanduser(directory))
        self.save_steps, self._save_minutes = save_steps, save_minutes
        self._keep, self._on_save_error = keep_checkpoints, on_save_error
        self._clock = clock
        self.position, self.past = Position(0), None
        self.latest: str | None = None
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._saving = None
        # What the next `fit` is to know besides the variables, and of which model.
        self._known = self._known_of = None
        self._metrics_then = ()
        self._signals = Signals()
        self._others = None  # no list: `fit` does not listen
        self._monitor, self._validates = Monitor(monitor, mode), False
        self._discarded = ()
        self._data = self._saved = self._metrics = self._score = None
        # The object that the last `fit` has trained on; random numbers at the epoch's
        # beginning; batches that were read since.
        self._given, self._random, self._read = None, None, 0
        self._described = self._averaged_later = self._before = None
        self._batch_begun = False
        self._scores = {}

    # Restoring.

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
        if not model.built and store.find(self._directory):
            raise ValueError(
                f"Received a model without variables for {self._directory}, where "
                "checkpoints are; expected a built one, so give it a keras.Input."
            )
        if which == "last":
            load = store.load
            path, contents = saved_model.newest_good(self._directory, load, model)
        else:
            path, contents = self._load_chosen(model, which)
        self._known_of, self._known, self._saved = model, contents, None
        self.latest, self.position, self.past = path, Position(0), None
        if path is None:
            return False
        self.position = store.position(path)
        self.past = contents.about.get("past")
        self._monitor.recall(contents.about)
        if which != "last":
            later = store.find(self._directory)
            later = [each for each in later if store.position(each) > self.position]
            self._discarded = later
        saved_model.assign(model, contents.values)
        return True

    def _load_chosen(self, model, which):
        path = os.path.abspath(os.path.expanduser(which))
        if which == "best":
            load = store.load_about
            last, about = saved_model.newest_good(self._directory, load, model)
            if last is None:
                return None, None
            self.position = store.position(last)
            self._monitor.recall(about)
            if (best := self.find_best(model)) is None:
                raise ValueError(
                    f"No checkpoint in {self._directory} has a value of "
                    f"{self._monitor.name}, so none is the best; expected the last "
                    "one, or the path of one."
                )
            path = best.path
        elif not store.is_one(path):
            raise ValueError(
                f"Received the checkpoint {which!r}; expected 'last', 'best' or the "
                f"path of one, such as {self._directory}/ckpt-1-0."
            )
        contents = store.load(path)
        saved_model.check_is_of(path, contents.about, model)
        return path, contents

    def find_best(self, model: keras.Model) -> Best | None:
        """Returns the best checkpoint up to the current position, if there is one.

        Args:
            model: Its metrics tell whether more is better.

        Raises:
            ValueError: The metrics do not tell.
        """
        self._wait()
        paths = self._up_to(self.position)
        scores = self._read_scores(paths)
        if self._monitor.name is None or not any(
            score is not None for score in scores.values()
        ):
            return None
        self._monitor.settle(model)
        path = self._monitor.best(reversed(scores.items()))
        epoch = store.position(path).epoch
        return Best(path, epoch, self._monitor.name, scores[path])

    @property
    def discarded(self) -> Sequence[str]:
        """Paths of what is removed when the next checkpoint is saved."""
        return self._discarded

    @contextlib.contextmanager
    def as_in(self, path: str, model: keras.Model) -> Iterator[None]:
        """Gives a model the values of a checkpoint meanwhile.

        Raises:
            ValueError: It cannot be read.
        """
        now = saved_model.values(model)
        saved_model.assign(model, store.load(path).values)
        try:
            yield
        finally:
            saved_model.assign(model, now)

    def prepare(self, model: keras.Model) -> None:
        """Restores the latest checkpoint, unless `fit` can go on with the model as is.

        Args:
            model: As for `restore`.

        Raises:
            ValueError: As by `restore`.
        """
        # Equal, if not the same: a tower model is a proxy.
        if self._known is None or model != self._known_of:
            self.restore(model)

    @property
    def name(self) -> str:
        """What to call the run that goes on."""
        return self.latest or self._directory

    def used(self, data: Any) -> bool:
        """Tells whether an earlier `fit` has trained on the same object."""
        return self._given is not None and self._given() is data

    def changes(self, data: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Compares data with those that the run has been trained on.

        Args:
            data: What is known to decide which records a batch has.

        Returns:
            By name, what it was and what it is, where the two differ.
        """
        about = self._known.about
        size = about.get("batch_size")
        before = about.get("data", {} if size is None else {"batch size": size})
        before = before or {}
        names = before.keys() & data.keys()
        if "data" in about:
            # Foreign data have none.
            names |= {"dataset"} & (before.keys() | data.keys())
        both = {name: (before.get(name), data.get(name)) for name in sorted(names)}
        return {name: each for name, each in both.items() if each[0] != each[1]}

    @contextlib.contextmanager
    def around_fit(self, call: FitCall) -> Iterator[None]:
        """Has a `fit` of a tower model begin where the run is, and listens to it."""
        callbacks = call.options["callbacks"]
        # Keras says of a model that is not compiled that it is not.
        first = self not in keras.tree.flatten(callbacks) or any(
            isinstance(each, resume.First) for each in callbacks
        )
        if first or not call.model.compiled:
            yield
            return
        try:
            with resume.going_on(call, self):
                yield
        except NotFiniteStep as error:
            error.checkpoint = self.latest or ""
            raise

    @contextlib.contextmanager
    def running(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        data: Mapping[str, Any],
        given: Any,
        validates: bool,
    ) -> Iterator[None]:
        """Listens to a `fit` that begins at `position`, and to signals.

        Args:
            callbacks: All those of `fit`.
            data: What is known to decide which records a batch has, as JSON.
            given: The data themselves.
            validates: Whether `fit` has data to validate on.
        """
        self._data, self._before, self._validates = data, None, validates
        try:
            self._given = weakref.ref(given)
        except TypeError:  # a list, say
            self._given = None
        self._others = [other for other in callbacks if other is not self]
        with self._signals:
            try:
                yield
                # One that came after the last batch, or even after `on_train_end`.
                self._heed()
            finally:
                self._others = None
                # What is begun is finished, whatever ends the run.
                if self._saving is not None:
                    concurrent.futures.wait([self._saving])

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Leaves random numbers as they were, whoever draws some meanwhile."""
        found = states.random_states()
        try:
            yield
        finally:
            states.set_random_states(found)

    def restore_metrics(self) -> None:
        """Gives the metrics of the epoch their values, once they are built.

        Raises:
            ResumeError: They are others.
        """
        values = self._metrics_then
        variables = self.model.metrics_variables
        if len(values) != len(variables):
            raise ResumeError(
                f"The checkpoint {self.latest} is of the middle of an epoch with other "
                "metrics; compile the model with the same, or start over."
            )
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    # Called by Keras.

    def on_train_begin(self, logs=None):
        """Notes where the run begins."""
        if self._others is None:
            raise ValueError(
                "Received a Checkpoint that this `fit` does not restore; expected one "
                "only, in the list of callbacks, and a model of multi_gpu_model(), not "
                "a plain Keras model."
            )
        self._begun, self._described = self.position, None
        self._saved_s, self._saved_step = self._clock(), self._step()

    def begin_epoch(self, epoch: int) -> None:
        """Saves what the epoch before has come to, before any callback hears of this.

        Args:
            epoch: Number of the epoch.
        """
        if self._known is None:
            self.position = Position(epoch)
            self._save()
        elif self.position.batch:
            self._before = saved_model.values(self.model)
            # What is read again is drawn as it was: the order of a pass, say.
            if (found := self._known.about.get("random_at_begin")) is not None:
                states.set_random_states(found)
        else:
            self._restore_states()
        self._random = states.random_states()
        call = self.model.steps_per_execution
        self._read = -(-self.position.batch // call) * call
        self._heed()

    def epoch_begun(self) -> None:
        """Undoes what callbacks have done at the beginning of an epoch that goes on.

        They have done it before: what was saved inside of the epoch has seen it.
        """
        saved_model.assign(self.model, self._before)
        self._before = None
        self._restore_states()

    def begin_batch(self, batch: int) -> None:
        """Saves if it is time, when all callbacks have seen the batch before.

        Args:
            batch: Number of the batch that begins.
        """
        self.position = Position(self.position.epoch, batch)
        self._batch_begun, self._metrics = True, None
        due = self.save_steps and self._step() - self._saved_step >= self.save_steps
        if self._save_minutes is not None:
            due = due or self._clock() - self._saved_s >= 60 * self._save_minutes
        if due:
            self._save()
        self._heed()

    def on_train_batch_end(self, batch, logs=None):
        """Counts."""
        done = batches_done(self.model, batch)
        self._batch_begun, self._read = False, done
        batches = min(done, self.params.get("steps") or done)
        self.position = Position(self.position.epoch, batches)

    def on_test_begin(self, logs=None):
        """Keeps the metrics of training, whose place validation takes."""
        self._metrics = saved_model.copies(self.model.metrics_variables)

    def on_test_batch_begin(self, batch, logs=None):
        """Does not wait for the end of a validation to be stopped."""
        self._heed()

    def on_epoch_end(self, epoch, logs=None):
        """Notes how good the epoch was, unless later callbacks should not see it."""
        self._wait()
        self._check_finite(self._step(), saved_model.values(self.model))
        if saved_model.averages(self.model.optimizer):
            # At the end of `fit`, Keras puts averages in the place of weights.
            self._averaged_later = saved_model.values(self.model)
        before = self._monitor.name
        self._score = self._monitor.score(logs or {}, self._validates, self.model)
        if self._monitor.name != before:
            self._scores.clear()
            if self._monitor.asked is None and self._monitor.name == "loss":
                say(
                    "Note: There is no validation data; the best checkpoint is that of "
                    "the lowest loss."
                )
        # Where Keras does not know how many there are, it begins one batch too many; an
        # epoch also ends where data do.
        steps = self.params.get("steps") or math.inf
        ended = self._batch_begun or not self.model.stop_training
        if ended or self.position.batch >= steps:
            self.position = Position(epoch + 1)
            if self.past is not None:
                self.past.append(self._read)

    def on_train_end(self, logs=None):
        """Saves, waits for it, and keeps what another `fit` is to know."""
        if self._known is not None:
            # There was no epoch, and nobody was given what they knew.
            known, epochs = self._known, self.position.epoch
            self._restore_states()
            self._known = known
            say(
                f"Nothing left to train: {self._directory} has "
                f"{words.count(epochs, 'epoch')} already."
            )
        self._save(self._averaged_later)
        self._wait()
        self._averaged_later = None
        if self._known is None:
            self._known = self._contents()

    # Saving.

    def _heed(self):
        """Does what a signal asks for, and hears of a save that has ended."""
        if self._signals.save:
            self._signals.save = False
            self._save()
        if (number := self._signals.stop) is not None:
            self._save()
            self._wait()
            again = "nothing was saved yet"
            if self.latest:
                again = f"the last checkpoint is {self.latest}; run again to continue"
            if sys.stdout.isatty():
                print()  # ends the progress bar's line
            name = {2: "Ctrl-C", 15: "SIGTERM"}[number]
            say(f"Stopped by {name}: {again}.")
            raise Stopped(number)
        if self._saving is not None and self._saving.done():
            self._wait()

    def _save(self, values=None):
        """Begins to save, unless that was done here; the variables as they are now."""
        if self.position == self._begun or self.position == self._saved:
            return
        self._wait()
        position = self._saved = self.position
        contents = self._contents()
        values = values or saved_model.values(self.model)
        contents = Contents(values | contents.values, contents.about)
        self._saved_s, self._saved_step = self._clock(), self._step()
        self._saving = self._writer.submit(self._write, position, contents)

    def _contents(self):
        """All that is saved, but for the variables."""
        position, arrays = self.position, []
        about = {
            "variables": self._descriptions(),
            "data": self._data,
            "past": None if self.past is None else [*self.past],
            "step": self._step(),
            **self._monitor.describe(None if position.batch else self._score),
            **states.collect(self.model, self._others, position.epoch, arrays),
        }
        values = {"callbacks": arrays}
        if position.batch:
            metrics = self._metrics or saved_model.copies(self.model.metrics_variables)
            values["metrics"] = metrics
            about["random_at_begin"] = self._random
        return Contents(values, about)

    def _descriptions(self):
        # While a `fit` runs, they stay as they are.
        if self._described is None:
            parts = saved_model.parts(self.model)
            self._described = {
                part: saved_model.describe(found) for part, found in parts.items()
            }
        return self._described

    def _write(self, position, contents):
        self._check_finite(contents.about["step"], contents.values)
        if self.latest and not os.path.isdir(self._directory):
            raise OSError("the directory is gone")
        while self._discarded:
            *self._discarded, path = self._discarded
            store.remove(path)
            self._scores.pop(path, None)
        path = store.save(self._directory, position, contents)
        self._scores[path] = contents.about["score"]
        self.latest = path
        self._prune(position)

    def _check_finite(self, step, values):
        for part, described in self._descriptions().items():
            for value, (name, *_) in zip(values[part], described, strict=True):
                if not store.is_finite(value):
                    saved = "nothing was saved yet"
                    if self.latest:
                        saved = f"the last checkpoint, from before, is {self.latest}"
                    raise NotFinite(
                        f"The variable {name} is not finite at step {step}; {saved}. "
                        "Look for such numbers in the data, or train with a smaller "
                        "learning rate."
                    )

    def _prune(self, position):
        paths = self._up_to(position)
        scores = self._read_scores(paths)
        scored = {path for path, score in scores.items() if score is not None}
        if self._monitor.mode != "auto":
            scored = {self._monitor.best(reversed(scores.items()))}
        kept = [*scores][: self._keep]
        older = paths[paths.index(kept[-1]) + 1 :] if kept else ()
        for path in older:
            if path not in scored:
                store.remove(path)

    def _up_to(self, position):
        # Later ones were passed over, as damaged say, when the run was continued.
        found = store.find(self._directory)
        return [path for path in found if store.position(path) <= position]

    def _read_scores(self, paths):
        """Those of checkpoints that can be read."""
        for path in paths:
            if path not in self._scores:
                with contextlib.suppress(ValueError):
                    about = store.load_about(path)
                    self._scores[path] = self._monitor.read(about)
        return {path: self._scores[path] for path in paths if path in self._scores}

    def _wait(self):
        """Waits for the save that is going on, and says if it has failed."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        try:
            saving.result()
        except OSError as error:
            saved = "nothing was saved yet"
            if self.latest:
                saved = f"the last one is {self.latest}"
            text = f"Cannot save a checkpoint in {self._directory}: {error}; {saved}."
            if self._on_save_error == "stop":
                raise SaveError(text) from error
            warn(text)

    def _step(self):
        return int(self.model.optimizer.iterations)

    def _restore_states(self):
        """Gives others what they knew; after `on_train_begin`, where they forget it."""
        values, about = self._known.values, self._known.about
        self._known, self._metrics_then = None, values.get("metrics", ())
        states.give_back(self.model, self._others, about, values["callbacks"])
