"""Saves a run while it goes on, so that another process can continue it."""

import concurrent.futures
import contextlib
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers import checkpoints
from towers.checkpoints import Contents, Position
from towers.signals import Signals, Stopped

# What Keras's own callbacks know of earlier epochs; others have a `state_dict()`.
_STATES = {
    keras.callbacks.EarlyStopping: (
        *("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    ),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best",),
}


_ARRAY = "array"


class NotFinite(Exception):
    """A variable is infinite or not a number; what was saved before is not."""


class SaveError(Exception):
    """A checkpoint could not be written; those before are as they were."""


class Checkpoint(keras.callbacks.Callback):
    """Saves a run of a tower model, and has the next `fit` continue it.

    A checkpoint holds the variables of model and optimizer (with loss scale and moving
    averages), the metrics of the epoch, the states of Python's, NumPy's and Keras's
    random numbers, the history, what Keras's callbacks know of earlier epochs, and the
    position in the data. It is made at the end of each epoch, at the intervals asked
    for, on SIGUSR1, and before SIGTERM or Ctrl-C ends the run. A thread of its own
    writes it, from copies; training waits only for the save before.

    With data of `input_pipeline.make_dataset`, `fit` goes on at the next batch. Other
    data are read again, and passed over: the run is the same if they are.

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
        for name, value in (("save_steps", save_steps), ("keep", keep)):
            if value is not None and value < 1:
                raise ValueError(f"Received {name}={value}; expected at least 1.")
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
        self._restored = None
        self._signals = Signals()
        self._others = []
        self._batch_size = self._saved = self._metrics = self._score = None
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
        path, contents = _newest_good(self._directory, checkpoints.load, model)
        if path is None:
            return False
        for part, variables in _parts(model).items():
            for variable, value in zip(variables, contents.values[part], strict=True):
                variable.assign(value)
        self.latest, self.position = path, checkpoints.position(path)
        self._restored = contents
        self._restored_metrics = contents.values.get("metrics", ())
        return True

    @contextlib.contextmanager
    def running(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        batch_size: int | None,
    ) -> Iterator[None]:
        """Listens to signals while `fit` runs.

        Args:
            callbacks: All those of `fit`.
            batch_size: Examples in a batch, if known.

        Raises:
            ValueError: The position restored is inside of an epoch, and counts batches
                of another size.
        """
        before = self._restored and self._restored.about["batch_size"]
        if self.position.batch and before != batch_size:
            raise ValueError(
                f"Received batches of {batch_size or 'unknown size'}, but "
                f"{self.latest} is of the middle of an epoch in batches of "
                f"{before or 'unknown size'}; expected the same."
            )
        self._batch_size = batch_size
        self._others = [other for other in callbacks if other is not self]
        with self._signals:
            try:
                yield
            finally:
                # What is begun is finished, whatever ends the run.
                if self._saving is not None:
                    concurrent.futures.wait([self._saving])

    def restore_metrics(self) -> None:
        """Gives the metrics of the epoch their values, once they are built."""
        values = self._restored_metrics
        variables = self.model.metrics_variables
        if len(values) != len(variables):
            raise ValueError(
                f"The checkpoint {self.latest} is of the middle of an epoch with other "
                "metrics; compile the model with the same, or start over."
            )
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    # Called by Keras.

    def on_train_begin(self, logs=None):
        """Notes where the run begins."""
        self._begun = self.position
        self._saved_s, self._saved_step = self._clock(), self._step()

    def on_epoch_begin(self, epoch, logs=None):
        """Saves what the epoch before has come to."""
        if self._restored is not None:
            self._restore_states()
        else:
            self.position = Position(epoch)
            self._save()
        self._heed()

    def on_train_batch_begin(self, batch, logs=None):
        """Saves if it is time, when all callbacks have seen the batch before."""
        self.position = Position(self.position.epoch, batch)
        due = self.save_steps and self._step() - self._saved_step >= self.save_steps
        if self._save_minutes is not None:
            due = due or self._clock() - self._saved_s >= 60 * self._save_minutes
        if due:
            self._save()
        self._heed()

    def on_train_batch_end(self, batch, logs=None):
        """Counts."""
        batches = min(batch + 1, self.params.get("steps") or batch + 1)
        self.position = Position(self.position.epoch, batches)

    def on_test_begin(self, logs=None):
        """Keeps the metrics of training, whose place validation takes."""
        self._metrics = _copies(self.model.metrics_variables)

    def on_test_end(self, logs=None):
        """Forgets them."""
        self._metrics = None

    def on_test_batch_begin(self, batch, logs=None):
        """Does not wait for the end of a validation to be stopped."""
        self._heed()

    def on_epoch_end(self, epoch, logs=None):
        """Notes how good the epoch was."""
        logs = logs or {}
        score = logs.get("val_loss", logs.get("loss"))
        self._score = None if score is None else float(score)
        steps = self.params.get("steps")
        if not steps or self.position.batch >= steps:
            self.position = Position(epoch + 1)

    def on_train_end(self, logs=None):
        """Saves, and waits for it."""
        self._save()
        self._wait()

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
            _say(f"Stopped by {name}: {again}.")
            raise Stopped(number)
        if self._saving is not None and self._saving.done():
            self._wait()

    def _save(self):
        """Begins to save, unless that was done here."""
        if self.position == self._begun or self.position == self._saved:
            return
        self._wait()
        position = self._saved = self.position
        values, arrays = self._values(position), []
        about = self._about(position, arrays)
        contents = Contents(values | {"callbacks": arrays}, about)
        self._saved_s, self._saved_step = self._clock(), self._step()
        self._saving = self._writer.submit(self._write, position, contents)

    def _values(self, position):
        """Copies of all values, in the host's memory."""
        values = {part: _copies(found) for part, found in _parts(self.model).items()}
        if position.batch:
            metrics = self._metrics or _copies(self.model.metrics_variables)
            values["metrics"] = metrics
        return values

    def _about(self, position, arrays):
        return {
            "variables": {
                part: _describe(variables)
                for part, variables in _parts(self.model).items()
            },
            "batch_size": self._batch_size,
            "step": self._step(),
            "score": None if position.batch else self._score,
            "history": _history(self.model, position.epoch),
            "callbacks": _states(self._others, arrays),
            "random": _random_states(),
        }

    def _write(self, position, contents):
        about = contents.about
        for part, variables in about["variables"].items():
            pairs = zip(contents.values[part], variables, strict=True)
            for value, (name, *_) in pairs:
                if not checkpoints.is_finite(value):
                    raise NotFinite(
                        f"The variable {name} is not finite at step {about['step']}; "
                        "the last checkpoint, from before, is "
                        f"{self.latest or 'none'}. Look for such numbers in the data, "
                        "or train with a smaller learning rate."
                    )
        path = checkpoints.save(self._directory, position, contents)
        self._scores[path] = contents.about["score"]
        self.latest = path
        self._prune()

    def _prune(self):
        paths = checkpoints.find(self._directory)
        for path in paths:
            if path not in self._scores:
                with contextlib.suppress(ValueError):
                    self._scores[path] = checkpoints.load_about(path)["score"]
        scored = [path for path in paths if self._scores.get(path) is not None]
        best = min(scored, key=self._scores.get, default=None)
        for path in paths[self._keep :]:
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
            text = (
                f"Cannot save a checkpoint in {self._directory}: {error}; the last one "
                f"is {self.latest or 'none'}."
            )
            if self._on_save_error == "stop":
                raise SaveError(text) from error
            _say(f"Warning: {text}")

    def _step(self):
        return int(self.model.optimizer.iterations)

    def _restore_states(self):
        """Gives others what they knew; after `on_train_begin`, where they forget it."""
        contents, self._restored = self._restored, None
        about = contents.about
        _set_states(self._others, about["callbacks"], contents.values["callbacks"])
        _set_random_states(about["random"])
        if (history := getattr(self.model, "history", None)) is not None:
            history.epoch = about["history"]["epoch"]
            history.history = about["history"]["history"]


def check_checkpoint(directory: str, model: keras.Model) -> None:
    """Checks that there is a checkpoint of this model, if there is any.

    Args:
        directory: Where the checkpoints lie.
        model: Need not be compiled.

    Raises:
        ValueError: All are of another model, or cannot be read.
    """
    _newest_good(directory, checkpoints.load_about, model, quiet=True)


def _say(text):
    print(f"towers: {text}", file=sys.stderr, flush=True)


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
            _say(f"Warning: {str(failed).partition('; choose')[0]}; {lost}.")
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


def _copies(variables):
    with tf.device("/CPU:0"):
        # What is in this memory already is not copied: TensorFlow does that when it is
        # next written to.
        return [tf.identity(variable.value) for variable in variables]


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


def _history(model, epochs):
    """That of whole epochs; one that was broken off goes on later."""
    history = getattr(model, "history", None)
    past = getattr(history, "epoch", [])
    kept = sum(epoch < epochs for epoch in past)
    logs = history.history if past else {}
    return {
        "epoch": past[:kept],
        "history": {name: [*map(float, v[:kept])] for name, v in logs.items()},
    }


def _states(callbacks, arrays):
    """What callbacks know, by class, as JSON; arrays are put aside."""
    return [
        [type(other).__name__, _as_json(_state(other), arrays)] for other in callbacks
    ]


def _state(callback):
    if hasattr(callback, "state_dict"):
        return callback.state_dict()
    for kind, names in _STATES.items():
        if isinstance(callback, kind):
            return {name: getattr(callback, name, None) for name in names}
    return None


def _set_states(callbacks, states, arrays):
    # By class: another run may have more callbacks, or fewer.
    for callback in callbacks:
        for known in states:
            name, state = known
            if name != type(callback).__name__ or state is None:
                continue
            states.remove(known)
            state = _from_json(state, arrays)
            if hasattr(callback, "load_state_dict"):
                callback.load_state_dict(state)
            else:
                vars(callback).update(state)
            break


def _as_json(value, arrays):
    if isinstance(value, dict):
        return {name: _as_json(part, arrays) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(part, arrays) for part in value]
    if isinstance(value, np.ndarray | tf.Tensor):
        arrays.append(tf.convert_to_tensor(value))
        return {_ARRAY: len(arrays) - 1}
    return value.item() if isinstance(value, np.generic) else value


def _from_json(value, arrays):
    if isinstance(value, list):
        return [_from_json(part, arrays) for part in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return np.asarray(arrays[value[_ARRAY]])
    return {name: _from_json(part, arrays) for name, part in value.items()}


def _random_states():
    """Those of Python and NumPy; Keras's own are variables of the model."""
    kind, keys, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), *rest],
    }


def _set_random_states(states):
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
