"""Saves a run while it goes on, so that another process can continue it."""

import concurrent.futures
import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import checkpoints, listeners
from towers.callbacks import states
from towers.checkpoints import Contents, Position
from towers.resume import ResumeError, say
from towers.signals import Signals, Stopped


class NotFinite(Exception):
    """A variable is infinite or not a number; what was saved before is not."""


class SaveError(Exception):
    """A checkpoint could not be written; those before are as they were."""


@listeners.changes_no_variable
class Checkpoint(keras.callbacks.Callback):
    """Saves a run of a tower model, and has the next `fit` continue it.

    A checkpoint holds the variables of model and optimizer (with loss scale and moving
    averages), the metrics of the epoch, the states of random numbers, the history, what
    Keras's callbacks know of earlier epochs, and the position in the data. It is made
    at the end of each epoch, at the intervals asked for, on SIGUSR1, and before SIGTERM
    or Ctrl-C ends the run. A thread of its own writes it, from copies; training waits
    only for the save before.

    With data of `towers.input_pipeline.make_dataset`, `fit` goes on at the next batch.
    Other data are read again, and passed over: the run is the same if they are. Inside
    of an epoch, it goes on only with the data and calls that it has begun with. A
    second `fit` goes on where the first has ended, with the model as it is then; where
    that was broken off by an error, or another model is fitted, with the last
    checkpoint.

    Variables that are not finite end the run, at a save or at the end of an epoch. To
    callbacks further down the list, such as `ModelCheckpoint`, that comes in time.

    It knows nothing of towers: a run may continue on another number of them.

    Attributes:
        position: How far the run has come.
        latest: Path of the last checkpoint that was read or written, if there is one.
    """

    def __init__(
        self,
        directory: str,
        *,
        save_steps: int | None = None,
        save_minutes: float | None = None,
        keep: int = 3,
        on_save_error: str = "stop",
        clock: Callable[[], float] = time.monotonic,
    ):
        """Initializes the callback; writes nothing.

        Args:
            directory: Where the checkpoints lie.
            save_steps: Batches between two checkpoints. None: none inside of an epoch.
            save_minutes: The same in minutes.
            keep: How many of the last checkpoints to keep. The best one, by `val_loss`
                or else `loss` of its epoch, stays as well.
            on_save_error: What to do if a checkpoint cannot be written, for want of
                space, say: "stop" training, or "continue" with a warning.
            clock: Returns seconds.
        """
        super().__init__()
        if not isinstance(directory, str | os.PathLike):
            raise ValueError(f"Received directory={directory!r}; expected a path.")
        numbers = {"keep": keep}
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
        self._keep, self._on_save_error, self._clock = keep, on_save_error, clock
        self.position = Position(0)
        self.latest: str | None = None
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._saving = None
        # What the next `fit` is to know besides the variables, and of which model.
        self._known = self._known_of = None
        self._metrics_then = ()
        self._signals = Signals()
        self._others = None  # no list: `fit` does not listen
        self._data = self._saved = self._metrics = self._score = None
        self._described = self._averaged_later = self._before = None
        self._batch_begun = False
        self._scores = {}

    # Restoring.

    def restore(self, model: keras.Model) -> bool:
        """Restores the latest checkpoint that can be read into a model.

        Args:
            model: Compiled and built, and so its optimizer.

        Returns:
            Whether there was one.

        Raises:
            ValueError: There are some, but none can be read, or is of this model.
        """
        if not model.built and checkpoints.find(self._directory):
            raise ValueError(
                f"Received a model without variables for {self._directory}, where "
                "checkpoints are; expected a built one, so give it a keras.Input."
            )
        path, contents = _newest_good(self._directory, checkpoints.load, model)
        self._known_of, self._known, self._saved = model, contents, None
        self.latest, self.position = path, Position(0)
        if path is None:
            return False
        self.position = checkpoints.position(path)
        _assign(model, contents.values)
        return True

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

    @contextlib.contextmanager
    def running(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        data: Mapping[str, Any],
    ) -> Iterator[None]:
        """Listens to signals while `fit` runs.

        Args:
            callbacks: All those of `fit`.
            data: What is known to decide which records a batch has, as JSON.

        Raises:
            ResumeError: The position restored is inside of an epoch of other data.
        """
        if self.position.batch:
            self._check_data(data)
        self._data, self._before = data, None
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

    def _check_data(self, data):
        about = self._known.about
        size = about.get("batch_size")
        before = about.get("data", {} if size is None else {"batch size": size})
        names = before.keys() & data.keys()
        if "data" in about:
            # Foreign data have none.
            names |= {"dataset"} & (before.keys() | data.keys())
        different = []
        for name in sorted(names):
            then, now = before.get(name), data.get(name)
            if then != now:
                received = f"{_or_unknown(then)}, but received {_or_unknown(now)}"
                different.append(f"{name} {received}")
        if different:
            raise ResumeError(
                f"The run {self.latest or self._directory} goes on in the middle of an "
                f"epoch of data with {'; '.join(different)}; expected the same data."
            )

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
            self._before = _values(self.model)
        else:
            self._restore_states()
        self._heed()

    def epoch_begun(self) -> None:
        """Undoes what callbacks have done at the beginning of an epoch that goes on.

        They have done it before: what was saved inside of the epoch has seen it.
        """
        if self._before is not None:
            _assign(self.model, self._before)
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
        self._batch_begun = False
        batches = min(batch + 1, self.params.get("steps") or batch + 1)
        self.position = Position(self.position.epoch, batches)

    def on_test_begin(self, logs=None):
        """Keeps the metrics of training, whose place validation takes."""
        self._metrics = _copies(self.model.metrics_variables)

    def on_test_batch_begin(self, batch, logs=None):
        """Does not wait for the end of a validation to be stopped."""
        self._heed()

    def on_epoch_end(self, epoch, logs=None):
        """Notes how good the epoch was, unless later callbacks should not see it."""
        self._wait()
        self._check_finite(self._step(), _values(self.model))
        if _averages(self.model.optimizer):
            # At the end of `fit`, Keras puts averages in the place of weights.
            self._averaged_later = _values(self.model)
        logs = logs or {}
        self._score = None
        with contextlib.suppress(TypeError, ValueError):  # no number
            score = float(logs.get("val_loss", logs.get("loss", math.nan)))
            self._score = score if math.isfinite(score) else None
        # Where Keras does not know how many there are, it begins one batch too many.
        steps = self.params.get("steps") or math.inf
        if self._batch_begun or self.position.batch >= steps:
            self.position = Position(epoch + 1)

    def on_train_end(self, logs=None):
        """Saves, waits for it, and keeps what another `fit` is to know."""
        if self._known is not None:
            # There was no epoch, and nobody was given what they knew.
            known, epochs = self._known, self.position.epoch
            self._restore_states()
            self._known = known
            say(
                f"Nothing left to train: {self._directory} has {epochs} "
                f"{'epoch' if epochs == 1 else 'epochs'} already."
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
        values = values or _values(self.model)
        contents = Contents(values | contents.values, contents.about)
        self._saved_s, self._saved_step = self._clock(), self._step()
        self._saving = self._writer.submit(self._write, position, contents)

    def _contents(self):
        """All that is saved, but for the variables."""
        position, arrays = self.position, []
        about = {
            "variables": self._descriptions(),
            "data": self._data,
            "step": self._step(),
            "score": None if position.batch else self._score,
            **states.collect(self.model, self._others, position.epoch, arrays),
        }
        values = {"callbacks": arrays}
        if position.batch:
            metrics = self._metrics or _copies(self.model.metrics_variables)
            values["metrics"] = metrics
        return Contents(values, about)

    def _descriptions(self):
        # While a `fit` runs, they stay as they are.
        if self._described is None:
            parts = _parts(self.model)
            self._described = {part: _describe(found) for part, found in parts.items()}
        return self._described

    def _write(self, position, contents):
        self._check_finite(contents.about["step"], contents.values)
        if self.latest and not os.path.isdir(self._directory):
            raise OSError("the directory is gone")
        path = checkpoints.save(self._directory, position, contents)
        self._scores[path] = contents.about["score"]
        self.latest = path
        self._prune(position)

    def _check_finite(self, step, values):
        for part, described in self._descriptions().items():
            for value, (name, *_) in zip(values[part], described, strict=True):
                if not checkpoints.is_finite(value):
                    saved = "nothing was saved yet"
                    if self.latest:
                        saved = f"the last checkpoint, from before, is {self.latest}"
                    raise NotFinite(
                        f"The variable {name} is not finite at step {step}; {saved}. "
                        "Look for such numbers in the data, or train with a smaller "
                        "learning rate."
                    )

    def _prune(self, position):
        # Later ones were passed over, as damaged say, when the run was continued.
        found = checkpoints.find(self._directory)
        paths = [path for path in found if checkpoints.position(path) <= position]
        for path in paths:
            if path not in self._scores:
                with contextlib.suppress(ValueError):
                    self._scores[path] = checkpoints.load_about(path)["score"]
        scored = [path for path in paths if self._scores.get(path) is not None]
        best = min(scored, key=self._scores.get, default=None)
        kept = [path for path in paths if path in self._scores][: self._keep]
        older = paths[paths.index(kept[-1]) + 1 :] if kept else ()
        for path in older:
            if path != best:
                checkpoints.remove(path)

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
            say(f"Warning: {text}")

    def _step(self):
        return int(self.model.optimizer.iterations)

    def _restore_states(self):
        """Gives others what they knew; after `on_train_begin`, where they forget it."""
        values, about = self._known.values, self._known.about
        self._known, self._metrics_then = None, values.get("metrics", ())
        states.give_back(self.model, self._others, about, values["callbacks"])


def check_checkpoint(directory: str, model: keras.Model) -> None:
    """Checks that there is a checkpoint of this model, if there is any.

    Args:
        directory: Where the checkpoints lie.
        model: Need not be compiled.

    Raises:
        ValueError: All are of another model, or cannot be read.
    """
    _newest_good(directory, checkpoints.load_about, model, quiet=True)


def _newest_good(directory, load, model, quiet=False):
    """The newest checkpoint that is of this model, and what `load` returns of it."""
    failed = None
    for path in checkpoints.find(directory):
        try:
            found = load(path)
            about = getattr(found, "about", found)
            for part, variables in _parts(model).items():
                _check_same(path, part, about["variables"][part], _describe(variables))
        except ValueError as error:
            failed = failed or error
            continue
        if failed is not None and not quiet:
            lost = f"what was trained after it is lost: going back to {path}"
            say(f"Warning: {str(failed).partition('; choose')[0]}; {lost}.")
        return path, found
    if failed is not None:
        raise failed
    return None, None


def _parts(model):
    """The variables that a run cannot do without."""
    parts = {"model": model.variables}
    if getattr(model, "optimizer", None) is not None:
        parts["optimizer"] = model.optimizer.variables
    return parts


def _averages(optimizer):
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner.use_ema and inner.ema_overwrite_frequency is None


def _values(model):
    """Copies of all variables."""
    return {part: _copies(variables) for part, variables in _parts(model).items()}


def _assign(model, values):
    for part, variables in _parts(model).items():
        for variable, value in zip(variables, values[part], strict=True):
            variable.assign(value)


def _copies(variables):
    return [*map(_copy, variables)]


def _copy(variable):
    # What is in the host's memory already is not copied: TensorFlow does that when it
    # is next written to. This takes a third of the time of `tf.identity`.
    variable = variable.value
    read = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    return np.asarray(read)


def _or_unknown(value):
    return "unknown" if value is None else value


def _check_same(path, part, found, expected):
    if found != expected:
        raise ValueError(
            f"The checkpoint {path} holds another {part}: "
            f"{_difference(found, expected)}; choose another model_dir, or start over "
            "with --clean."
        )


def _describe(variables):
    # Keras numbers names by how many were made before in the process.
    return [[re.sub(r"_\d+", "", v.path), list(v.shape), v.dtype] for v in variables]


def _difference(found, expected):
    for a, b in zip(found, expected, strict=False):
        if a != b:
            return f"it has {_name(a)} where this one has {_name(b)}"
    return f"it has {len(found)} variables where this one has {len(expected)}"


def _name(variable):
    path, shape, dtype = variable
    return f"{path} {shape} {dtype}"
